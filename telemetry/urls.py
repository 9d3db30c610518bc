"""Database URLs: which kinds there are."""

from __future__ import annotations

import os

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from autospec.errors import ConfigurationError


def parse_url(url: str) -> URL:
    """The URL with plain `postgresql` mapped to psycopg, and a file's path made absolute.

    A file's path is taken as it is written: nothing in it is percent-encoded.

    Raises:
        ConfigurationError: it is not a URL, or of a kind that is not supported.
    """
    if "://" not in url:
        raise ConfigurationError(
            f"{url!r} is no URL: give sqlite:///file.db or postgresql+psycopg://user@host/database"
        )
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigurationError(
            "the database URL cannot be understood: give sqlite:///file.db or postgresql+psycopg://user@host/database"
        ) from error
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigurationError(
            f"databases of kind {parsed.drivername!r} are not supported: "
            "give sqlite:///file.db or postgresql+psycopg://user@host/database"
        )
    place = url.partition("://")[2]
    if "?" in place or "\0" in place or (place and not place.startswith("/")):
        raise ConfigurationError(
            f"{url!r}: a SQLite URL is a path alone, as in sqlite:///file.db or sqlite:////var/lib/file.db"
        )
    path = place[1:]
    return URL.create("sqlite", database=os.path.abspath(path) if path not in ("", ":memory:") else None)


def shown_url(url: URL) -> str:
    """The URL for messages and for the eye: passwords hidden, paths as they are written."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database}" if url.database else "sqlite://"
    return url.render_as_string(hide_password=True)
