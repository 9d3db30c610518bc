"""The telemetry database: one class for SQLite and PostgreSQL."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from datetime import datetime
from operator import eq
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, Engine, Pool, func, select
from sqlalchemy.exc import (
    CompileError,
    DataError,
    DBAPIError,
    IntegrityError,
    InvalidRequestError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry import codec, insertion, postgres, sqlite, states
from autospec.telemetry.schema import ComparisonRow, DeploymentRow, PolicyStateRow, RecordingRow, RequestRow
from autospec.telemetry.urls import parse_url, shown_url
from autospec.types import Comparison, Deployment, PolicyState, RecordedTokens, RequestRecord

PAGE_ROWS = 1_000
RETRY_SECONDS = 10.0
FORK_SECONDS = 2.0
STATE_KEY = (PolicyStateRow.family, PolicyStateRow.version, PolicyStateRow.process)


class Store:
    """Requests and comparisons in a database. Threads and forked children may share one store.

    Args:
        url: `sqlite:///file.db` (relative to the working directory), `sqlite://` (in memory), or
            `postgresql+psycopg://user@host/database`; plain `postgresql://` means the same.
        readonly: open without writing; the database must exist and be up to date.

    Raises:
        ConfigurationError: the URL is of another kind, or PostgreSQL's driver is missing.
        StoreError: the database cannot be used: unreachable, unwritable, of another application, or of a newer
            autospec. It is then as it was.
    """

    def __init__(self, url: str, *, readonly: bool = False) -> None:
        self._url = parse_url(url)
        self.readonly = readonly
        self.url = shown_url(self._url)
        self._is_memory = self._url.get_backend_name() == "sqlite" and self._url.database is None
        if self._is_memory and readonly:
            raise StoreError("an in-memory database is empty when it is opened: readonly needs a file or a server")
        self._is_file = self._url.get_backend_name() == "sqlite" and not self._is_memory
        self._lock = threading.RLock()  # in memory all threads share one connection; in a file one writes at a time
        self._engine: Engine | None = self._open()
        _stores.add(self)

    @property
    def kind(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._url.get_backend_name()

    @property
    def is_lasting(self) -> bool:
        """Whether the database outlives this process."""
        return not self._is_memory

    def add(self, records: Sequence[RequestRecord], comparisons: Sequence[Comparison] = ()) -> None:
        """Writes all of them in one transaction. What is already there is skipped, so writing twice is harmless.

        Args:
            records: requests; one is known by its `request_id`.
            comparisons: comparisons; one is known by its pair of requests, which may be written later.

        Raises:
            ConfigurationError: a record cannot be stored as it is; nothing was written.
            StoreError: the database cannot be used; nothing was written.
        """
        self.write([*map(codec.to_entry, records), *map(codec.to_entry, comparisons)])

    def write(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """The same for records as `codec.to_entry` makes them, and with the same errors."""
        if self.readonly:
            raise StoreError(f"{self.url} was opened for reading only: open it without readonly=True to write")
        if not entries:
            return
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                with self._transaction(write=True) as connection:
                    insertion.insert(connection, entries)
                return
            except StoreError as error:
                if not _is_passing(error.__cause__) or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def requests(
        self, run: str | None = None, segment: str | None = None, since: datetime | None = None
    ) -> Iterator[RequestRecord]:
        """The requests in the order in which they were written, read in short transactions.

        Args:
            run: only those of this experiment or demonstration.
            segment: only those of this segment.
            since: only those started at this time or later; an aware datetime.

        Raises:
            ConfigurationError: `since` has no time zone.
            StoreError: the database cannot be read.
        """
        if since is not None and since.tzinfo is None:
            raise ConfigurationError(f"since={since!r} has no time zone: give an aware datetime")
        query = select(RequestRow, DeploymentRow).join(DeploymentRow, isouter=True)
        if run is not None:
            query = query.where(RequestRow.run == codec.clean_text(run))
        if segment is not None:
            query = query.where(RequestRow.segment == codec.clean_text(segment))
        if since is not None:
            query = query.where(RequestRow.started_at >= since)

        def pages() -> Iterator[RequestRecord]:
            last = 0
            while True:
                page = query.where(RequestRow.id > last).order_by(RequestRow.id).limit(PAGE_ROWS)
                with self._transaction() as connection, Session(connection) as session:
                    rows = session.execute(page).all()
                    found = [
                        codec.row_to_request(row, None if place is None else codec.row_to_deployment(place))
                        for row, place in rows
                    ]
                    last = rows[-1][0].id if rows else last
                yield from found
                if len(found) < PAGE_ROWS:
                    return

        return pages()

    def recordings(self, segment: str | None = None) -> Iterator[tuple[str, RecordedTokens]]:
        """Request ids and their tokens, where they were recorded, in the order of the requests.

        Args:
            segment: only those of this segment.

        Raises:
            StoreError: the database cannot be read.
        """
        query = select(RequestRow.id, RecordingRow).join(RequestRow, RequestRow.request_id == RecordingRow.request_id)
        if segment is not None:
            query = query.where(RequestRow.segment == codec.clean_text(segment))
        last = 0
        while True:
            page = query.where(RequestRow.id > last).order_by(RequestRow.id).limit(PAGE_ROWS)
            with self._transaction() as connection, Session(connection) as session:
                found = [(number, row.request_id, _tokens(row)) for number, row in session.execute(page)]
            yield from ((name, tokens) for _, name, tokens in found)
            if len(found) < PAGE_ROWS:
                return
            last = found[-1][0]

    def comparisons(self, run: str | None = None) -> list[Comparison]:
        """The comparisons, in the order in which they were written.

        Args:
            run: only those whose request (not its control) belongs to this run.

        Raises:
            StoreError: the database cannot be read.
        """
        query = select(ComparisonRow).order_by(ComparisonRow.id)
        if run is not None:
            query = query.join(RequestRow, RequestRow.request_id == ComparisonRow.request_id)
            query = query.where(RequestRow.run == codec.clean_text(run))
        with self._transaction() as connection, Session(connection) as session:
            return [codec.row_to_comparison(row) for row in session.scalars(query)]

    def policy_states(
        self, deployment: Deployment, version: str, since: datetime, limit: int = 32
    ) -> tuple[list[PolicyState], int]:
        """What processes of a deployment's family have learned under one policy version.

        Args:
            deployment: where it is to be used, see `states.family`.
            version: as in `PolicyVersion.version`.
            since: only states made at this time or later; an aware datetime.
            limit: how many are read at most.

        Returns:
            The states, newest first, without those that a newer one has taken over; and how many are damaged.

        Raises:
            StoreError: the database cannot be read.
        """
        keys = (
            select(*STATE_KEY)
            .where(
                PolicyStateRow.family == states.family(deployment),
                PolicyStateRow.version == codec.clean_text(version),
                PolicyStateRow.updated_at >= since,
            )
            .order_by(PolicyStateRow.updated_at.desc(), PolicyStateRow.process)
            .limit(limit)
        )
        found: list[PolicyState] = []
        num_damaged = 0
        with self._transaction() as connection, Session(connection) as session:
            for key in session.execute(keys).all():
                try:
                    found.append(read_state(session, key))
                except ValueError:
                    num_damaged += 1
        return states.heads(found), num_damaged

    def runs(self) -> list[str]:
        """The labels of all runs, the one with the newest request last."""
        newest = func.max(RequestRow.started_at)
        query = select(RequestRow.run).where(RequestRow.run.is_not(None)).group_by(RequestRow.run)
        with self._transaction() as connection:
            return [str(label) for label in connection.scalars(query.order_by(newest, RequestRow.run))]

    def count(self) -> int:
        """The number of requests."""
        with self._transaction() as connection:
            return connection.scalar(select(func.count()).select_from(RequestRow)) or 0

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to query with, in one transaction; errors are ours. In memory, as read-only, it cannot write."""
        with self._transaction() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """The same for writing: all of it is committed at the end, or nothing."""
        if self.readonly:
            raise StoreError(f"{self.url} was opened for reading only: open it without readonly=True to write")
        with self._transaction(write=True) as connection:
            yield connection

    def execute_alone(self, statements: Sequence[str]) -> None:
        """Runs commands that cannot be part of a transaction, one after another."""
        with self._errors():
            engine = self._engine
            if engine is None:
                raise StoreError(f"{self.url} was closed: open a new Store")
            with closing(engine.raw_connection()) as connection:
                driver: Any = connection.driver_connection
                if self._is_memory:
                    sqlite.allow_writing(driver)
                was_autocommit = getattr(driver, "autocommit", None)
                if engine.dialect.name == "postgresql":
                    driver.autocommit = True
                try:
                    for statement in statements:
                        driver.execute(statement)
                except engine.dialect.dbapi.Error as error:  # type: ignore[union-attr]
                    raise StoreError(f"{self.url} did not do {statement}: {_one_line(error)}") from error
                finally:
                    if engine.dialect.name == "postgresql":
                        driver.autocommit = was_autocommit

    def close(self) -> None:
        """Closes all connections. A closed store cannot be used again; closing twice is harmless."""
        with self._lock:
            engine, self._engine = self._engine, None
        _stores.discard(self)
        if engine is not None:
            engine.dispose()

    def reopened(self) -> Store:
        """Another store on the same database, for reading only.

        Raises:
            StoreError: the database is in memory, where nobody else can open it, or it cannot be opened any more.
        """
        if self._is_memory:
            raise StoreError("a database in memory cannot be opened a second time: give a file or a server")
        return Store(self.url if self._is_file else self._url.render_as_string(hide_password=False), readonly=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r}{', readonly=True' if self.readonly else ''})"

    def _open(self) -> Engine:
        with self._errors():
            if self._is_memory:
                return sqlite.open_memory()
            if self._url.get_backend_name() == "sqlite":
                return sqlite.open_file(Path(self._url.database or ""), readonly=self.readonly)
            return postgres.open_server(self._url, readonly=self.readonly)

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Connection]:
        with self._errors(), self._lock if self._is_memory or (self._is_file and write) else nullcontext():
            engine = self._engine
            if engine is None:
                raise StoreError(f"{self.url} was closed: open a new Store")
            if self._is_memory and engine in _orphans:
                engine = self._engine = self._open()
            with engine.execution_options(**{sqlite.WRITE: write}).begin() as connection:
                yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the database's errors into ours, in one line."""
        try:
            yield
        except (DataError, IntegrityError, OverflowError, CompileError, InvalidRequestError) as error:
            raise ConfigurationError(f"a record cannot be stored in {self.url}: {_one_line(error)}") from error
        except SQLAlchemyError as error:
            raise StoreError(
                f"the telemetry database {self.url} cannot be used: {_one_line(error)}; check that it can be reached"
            ) from error

    def _before_fork(self) -> bool:
        """Waits for a write under way: the child would inherit SQLite's own locks in the middle of it."""
        return self._lock.acquire(timeout=FORK_SECONDS)

    def _after_fork_in_parent(self) -> None:
        self._lock.release()

    def _after_fork_in_child(self) -> None:
        """New connections; the parent's are left alone, since closing them would end them for the parent too."""
        self._lock = threading.RLock()
        if self._engine is not None:
            _abandoned.append(self._engine.pool)
            self._engine.dispose(close=False)
            if self._is_memory:
                _orphans.add(self._engine)


def read_state(session: Session, key: Sequence[Any]) -> PolicyState:
    """A learned state by its key. One at a time: what cannot be read of one, not even its JSON, hides no other.

    Raises:
        ValueError: it is damaged.
    """
    query = select(PolicyStateRow, DeploymentRow).join(DeploymentRow, isouter=True)
    try:
        row, place = session.execute(query.where(*map(eq, STATE_KEY, key))).one()
        return states.from_row(row, codec.row_to_deployment(place))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _tokens(row: RecordingRow) -> RecordedTokens:
    return RecordedTokens(codec.unpack_tokens(row.prompt), codec.unpack_tokens(row.output), dict(row.options))


def _is_passing(cause: BaseException | None) -> bool:
    """Whether trying again at once may help: a deadlock, a serialization failure, a lock held for a moment."""
    if not isinstance(cause, OperationalError):
        return False
    state = getattr(cause.orig, "sqlstate", None)
    return state in ("40001", "40P01") or "SQLITE_BUSY" in getattr(cause.orig, "sqlite_errorname", "")


def _one_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_orphans: weakref.WeakSet[Engine] = weakref.WeakSet()  # in-memory databases whose content stayed in the parent
_abandoned: list[Pool] = []  # kept alive in a forked child, so that nothing closes the parent's connections
_forking = threading.local()


def _before_fork() -> None:
    _forking.held = [store for store in list(_stores) if store._before_fork()]


def _after_fork_in_parent() -> None:
    for store in _forking.held:
        store._after_fork_in_parent()
    _forking.held = []


def _after_fork_in_child() -> None:
    _forking.held = []
    for store in list(_stores):
        store._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
