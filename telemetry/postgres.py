"""PostgreSQL: the schema is created or migrated under an advisory lock."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text

from autospec.errors import ConfigurationError
from autospec.telemetry.migrate import migrate, needs_migration
from autospec.telemetry.schema import APPLICATION_ID, VERSION_TABLE

CONNECT_SECONDS = 10


def open_server(url: URL, *, readonly: bool) -> Engine:
    """An engine on the database, whose tables are created or migrated if need be.

    Args:
        url: `postgresql+psycopg://...`; options of libpq as its query.
        readonly: write nothing, and require a database that is up to date.

    Raises:
        ConfigurationError: psycopg is not installed.
        StoreError: the database is not ours, or of a newer autospec.
        sqlalchemy.exc.SQLAlchemyError: the server cannot be reached or refuses (the store turns it into StoreError).
    """
    connect_args = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_SECONDS}
    try:
        engine = create_engine(url, pool_pre_ping=True, connect_args=connect_args)
    except ImportError as error:
        raise ConfigurationError(
            "a PostgreSQL database needs psycopg: pip install 'psycopg[binary]', or use sqlite:///file.db"
        ) from error
    if readonly:
        event.listen(engine, "connect", _forbid_writing)
    where = url.render_as_string(hide_password=True)
    try:
        with engine.connect() as connection:
            outdated = needs_migration(*_examine(connection), where, readonly=readonly)
        if outdated:
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": APPLICATION_ID})
                if needs_migration(*_examine(connection), where, readonly=False):
                    migrate(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _forbid_writing(dbapi_connection: Any, connection_record: object) -> None:
    dbapi_connection.read_only = True


def _examine(connection: Connection) -> tuple[frozenset[str], str | None]:
    """The tables of the current schema, and our revision in it."""
    inspector = inspect(connection)
    tables = frozenset([*inspector.get_table_names(), *inspector.get_view_names()])
    if VERSION_TABLE not in tables:
        return tables, None
    return tables, connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
