"""SQLite: WAL, writes that take their lock at once, and a file that is looked at before it is touched.

A file is only ever opened through the sqlite3 library: closing any other handle on it would drop the locks that this
process holds on it (https://sqlite.org/howtocorrupt.html, section 2.2).
"""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, StaticPool, create_engine, event
from sqlalchemy.exc import DisconnectionError

from autospec.errors import StoreError
from autospec.telemetry.migrate import migrate, needs_migration
from autospec.telemetry.schema import APPLICATION_ID, VERSION_TABLE

_log = logging.getLogger("autospec.telemetry")

BUSY_SECONDS = 10.0
WRITE = "autospec_write"
"""Execution option of connections that write: their transaction begins with BEGIN IMMEDIATE. A deferred one that reads
first and writes later fails at once, without waiting, when another process wrote in between."""


def open_memory() -> Engine:
    """A database that lives as long as the engine, on one shared connection."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False, "isolation_level": None}
    )
    event.listen(engine, "begin", _begin_shared)
    with engine.execution_options(**{WRITE: True}).begin() as connection:
        migrate(connection)
    return engine


def open_file(path: Path, *, readonly: bool) -> Engine:
    """An engine on the file, created or migrated if need be.

    Args:
        path: absolute path of the database file.
        readonly: write nothing, and require a file that is up to date.

    Raises:
        StoreError: the file or its folder cannot be used, or it is not ours. The file is then as it was.
    """
    check_file(path, readonly=readonly)
    tables, revision = _examine(path) if path.exists() else (frozenset[str](), None)
    outdated = needs_migration(tables, revision, str(path), readonly=readonly)
    engine = create_engine("sqlite://", poolclass=QueuePool, creator=lambda: _connect(path, "ro" if readonly else "rw"))
    event.listen(engine, "begin", _begin)
    if readonly:
        _follow(engine, path)
        return engine
    if outdated:
        try:
            _connect(path, "rwc").close()
        except sqlite3.Error as error:
            raise _unusable(path, error) from error
        try:
            _create(engine, path, revision)
        except BaseException:
            engine.dispose()
            raise
    _switch_to_wal(path)
    return engine


def check_file(path: Path, *, readonly: bool) -> None:
    """Refuses what cannot be a database of ours for reasons of the file system alone."""
    folder = path.parent
    if not folder.is_dir():
        raise StoreError(f"the folder {str(folder)!r} of the telemetry database does not exist: create it first")
    if path.is_dir():
        raise StoreError(f"{path} is a folder: give the path of a database file in it")
    if not path.exists():
        if readonly:
            raise StoreError(f"there is no telemetry database at {path}: record into it first, or give another path")
    elif not os.access(path, os.R_OK):
        raise StoreError(f"{path} cannot be read: change its permissions, or give another path")
    elif not readonly and not os.access(path, os.W_OK):
        raise StoreError(f"{path} cannot be written to: change its permissions, or give another path")
    if not readonly and not os.access(folder, os.W_OK):
        raise StoreError(
            f"the folder {str(folder)!r} cannot be written to, and SQLite keeps its log beside the database: "
            "change its permissions, or give another path"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection in autocommit (SQLAlchemy's `begin` event starts transactions), set up as every one here is.

    Mode `ro` never writes. While a log (-wal) exists, somebody writes or crashed, and SQLite's own `ro` leaves it as
    it is; without one, SQLite's `ro` would leave a log behind that the owner may be unable to use.
    """
    wanted = mode
    if mode == "ro" and not path.with_name(path.name + "-wal").exists():
        wanted = "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro&immutable=1"
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={wanted}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,  # the pool hands a connection to one thread at a time
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        if mode == "ro":
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _follow(engine: Engine, path: Path) -> None:
    """Opens the file again once another is in its place: a reader would go on reading the one that was deleted."""

    def is_at() -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def connected(connection: Any, record: Any) -> None:
        record.info["file"] = is_at()

    def wanted(connection: Any, record: Any, proxy: Any) -> None:
        if record.info["file"] != is_at():
            raise DisconnectionError(f"{path} was deleted or replaced")

    event.listen(engine, "connect", connected)
    event.listen(engine, "checkout", wanted)


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _begin_shared(connection: Connection) -> None:
    """The same where readers and writers take turns on one connection: readers cannot write."""
    writes = connection.get_execution_options().get(WRITE, False)
    connection.exec_driver_sql(f"PRAGMA query_only = {'OFF' if writes else 'ON'}")
    _begin(connection)


def allow_writing(connection: sqlite3.Connection) -> None:
    """After a reader of a database in memory had the connection."""
    connection.execute("PRAGMA query_only = OFF")


def _examine(path: Path) -> tuple[frozenset[str], str | None]:
    """The file's tables and our revision in it, read without changing it."""
    try:
        connection = _connect(path, "ro")
        try:
            application_id = connection.execute("PRAGMA application_id").fetchone()[0]
            found = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
            tables = frozenset(str(name) for (name,) in found if not str(name).startswith("sqlite_"))
            revision = None
            if VERSION_TABLE in tables:
                row = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
                revision = str(row[0]) if row else None
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    if application_id not in (0, APPLICATION_ID):
        raise StoreError(
            f"{path} belongs to another application (SQLite application_id {application_id:#x}): "
            "give autospec a database of its own; nothing was changed"
        )
    return tables, revision


def _create(engine: Engine, path: Path, revision: str | None) -> None:
    """Creates or migrates under the write lock. If another process did it meanwhile, nothing is left to do."""
    with engine.execution_options(**{WRITE: True}).begin() as connection:
        copy = _back_up(path, revision) if revision is not None and _examine(path)[1] == revision else None
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        try:
            migrate(connection)
        except BaseException:
            if copy is not None:
                copy.unlink(missing_ok=True)
            raise
    if copy is not None:
        _log.warning("%s was migrated; as it was before it is kept in %s", path, copy)


def _back_up(path: Path, revision: str) -> Path:
    """Copies the database, as it was at the revision, beside itself; an earlier copy is never overwritten."""
    names = (path.with_name(f"{path.name}.schema-{revision}{f'.{n}' if n else ''}") for n in itertools.count())
    target = next(name for name in names if not name.exists())
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, path.stat().st_mode & 0o777))
        with closing(_connect(path, "ro")) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    except (sqlite3.Error, OSError) as error:
        target.unlink(missing_ok=True)
        raise StoreError(
            f"{path} has the older schema {revision!r} and cannot be copied to {target} before it is migrated "
            f"({error}): make room, or give another path; nothing was changed"
        ) from error
    return target


def _switch_to_wal(path: Path) -> None:
    """Switches the journal mode, which the file remembers. SQLite does not wait for other connections here: we do."""
    deadline = time.monotonic() + BUSY_SECONDS
    connection = _connect(path, "rw")
    try:
        while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                break  # a file system without shared memory keeps its own mode, which works too
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    finally:
        connection.close()


def _unusable(path: Path, error: sqlite3.Error) -> StoreError:
    if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
        return StoreError(f"{path} is not a SQLite database: give another path; the file was not changed")
    return StoreError(f"{path} cannot be used as a telemetry database ({error}): check the file, or give another path")
