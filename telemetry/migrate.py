"""Brings a database to the newest schema, or says why not. Alembic is loaded only when there is something to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from autospec.errors import StoreError
from autospec.telemetry.schema import VERSION_TABLE

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

REVISIONS = ("0001", "0002", "0003", "0004")
"""The revisions in migrations/versions, oldest first (a test compares)."""

_alembic_lock = threading.Lock()  # Alembic keeps its context in a module global


def _renew_lock() -> None:
    global _alembic_lock
    _alembic_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for our scripts, with the connection that they are to run on."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def migrate(connection: Connection) -> None:
    """Runs what is missing, inside the transaction that the connection is in."""
    from alembic import command
    from alembic.util import CommandError

    try:
        with _alembic_lock:
            command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise StoreError(f"the telemetry database cannot be migrated: {error}") from error


def needs_migration(tables: Set[str], revision: str | None, where: str, *, readonly: bool) -> bool:
    """Whether the database must be created or brought up to date before use.

    Args:
        tables: its tables and views.
        revision: what our version table says; None if there is no such table or it is empty.
        where: the database, as it is named in errors.
        readonly: nothing may be written.

    Raises:
        StoreError: it belongs to another application or a newer autospec, or it needs writing but is read-only.
    """
    if tables and VERSION_TABLE not in tables:
        example = sorted(tables)[0][:60]
        raise StoreError(
            f"{where} belongs to another application (it has a table {example!r}): "
            "give autospec a database of its own; nothing was changed"
        )
    if revision is not None and revision not in REVISIONS:
        raise StoreError(
            f"{where} was written by a newer autospec (schema {revision[:60]!r}, this one knows up to "
            f"{REVISIONS[-1]!r}): upgrade autospec-decoding, or give another database; nothing was changed"
        )
    if revision == REVISIONS[-1]:
        return False
    if readonly:
        state = "is empty" if revision is None else f"has the older schema {revision!r}"
        raise StoreError(f"{where} {state} and was opened for reading only: record into it once, or give another")
    return True
