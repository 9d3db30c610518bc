"""Looking after a database: pruning, compacting, checking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, inspect, select, text

from autospec.errors import ConfigurationError
from autospec.telemetry.rollups import hour_of
from autospec.telemetry.schema import (
    Base,
    ComparisonRow,
    HourlyActions,
    HourlyPositions,
    HourlyRequests,
    RecordingRow,
    RequestRow,
    TraceRow,
)
from autospec.telemetry.store import Store

PRUNE_ROWS = 5_000
YOUNGEST_SECONDS = 86_400
"""Requests younger than a day are not pruned: one that still waits in a spool would be counted twice in its hour."""

TOLERANCE = 1e-6
"""Relative, of seconds that were added up in another order."""

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be."""

    what: str
    advice: str


def num_older(store: Store, before: datetime) -> int:
    """Requests that `prune` would delete."""
    _check_age(before)
    with store.reading() as connection:
        found = connection.scalar(select(func.count()).select_from(RequestRow).where(RequestRow.started_at < before))
        return int(found or 0)


def prune(store: Store, before: datetime, *, hours: bool = False, progress: Progress | None = None) -> int:
    """Deletes requests that started before a time, with all that belongs to them, in short transactions.

    Args:
        store: the database.
        before: an aware datetime at least a day ago.
        hours: delete the sums by the hour of that time, too; without it the report by hours stays what it was.
        progress: called with the number of requests deleted in each transaction.

    Returns:
        How many requests were deleted.

    Raises:
        ConfigurationError: the time has no zone or is too recent.
        StoreError: the database cannot be used; what was deleted before stays deleted.
    """
    _check_age(before)
    total = 0
    while True:
        with store.writing() as connection:
            oldest = (
                select(RequestRow.id, RequestRow.request_id)
                .where(RequestRow.started_at < before)
                .order_by(RequestRow.id)
                .limit(PRUNE_ROWS)
            )
            found = connection.execute(oldest).all()
            names = [row.request_id for row in found]
            for row_type, column in (
                (ComparisonRow, ComparisonRow.request_id),
                (ComparisonRow, ComparisonRow.control_request_id),
                (TraceRow, TraceRow.request_id),
                (RecordingRow, RecordingRow.request_id),
            ):
                connection.execute(delete(row_type).where(column.in_(names)))
            connection.execute(delete(RequestRow).where(RequestRow.id.in_([row.id for row in found])))
        if not found:
            break
        total += len(found)
        if progress is not None:
            progress(len(found))
    if hours:
        with store.writing() as connection:
            for table in (HourlyRequests, HourlyActions, HourlyPositions):
                connection.execute(delete(table).where(table.hour < hour_of(before.astimezone(UTC))))
    return total


def vacuum(store: Store) -> None:
    """Gives room that is not used any more back to the disk, and refreshes what the query planner knows."""
    commands = {
        "sqlite": ["PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM", "PRAGMA optimize"],
        "postgresql": ["VACUUM ANALYZE"],
    }
    store.execute_alone(commands[store.kind])


def check(store: Store) -> list[Problem]:
    """What is wrong with a database; nothing is changed.

    Looked at are the file itself (SQLite), keys that point nowhere, the tables' columns and indexes, and whether the
    sums by the hour are those of the requests, for hours of which none was pruned.
    """
    problems: list[Problem] = []
    with store.reading() as connection:
        if connection.dialect.name == "sqlite":
            for (line,) in connection.exec_driver_sql("PRAGMA integrity_check"):
                if line != "ok":
                    problems.append(
                        Problem(f"the file is damaged: {line}", "restore a backup, or export what can be read")
                    )
            for row in connection.exec_driver_sql("PRAGMA foreign_key_check"):
                problems.append(Problem(f"a row of {row[0]} points to no row of {row[2]}", "restore a backup"))
        problems += _check_tables(connection)
        problems += _check_hours(connection)
    return problems


def _check_age(before: datetime) -> None:
    if before.tzinfo is None:
        raise ConfigurationError(f"{before!r} has no time zone: give an aware datetime")
    if (datetime.now(UTC) - before).total_seconds() < YOUNGEST_SECONDS:
        raise ConfigurationError(
            f"{before:%Y-%m-%d %H:%M %Z} is less than a day ago: requests that young may still wait in a spool"
        )


def _check_tables(connection: Connection) -> list[Problem]:
    inspector = inspect(connection)
    there = set(inspector.get_table_names())
    problems = []
    for name, table in Base.metadata.tables.items():
        if name not in there:
            problems.append(Problem(f"the table {name} is missing", "restore a backup"))
            continue
        columns = {column["name"] for column in inspector.get_columns(name)}
        if missing := sorted({column.name for column in table.columns} - columns):
            problems.append(Problem(f"{name} lacks {', '.join(missing)}", "restore a backup"))
        indexes = {index["name"] for index in inspector.get_indexes(name)}
        if lost := sorted(str(index.name) for index in table.indexes if index.name not in indexes):
            problems.append(Problem(f"{name} lacks the index {', '.join(lost)}", "queries will be slow: make it again"))
    return problems


def _check_hours(connection: Connection) -> list[Problem]:
    """Hours that hold fewer requests than there are, or other sums than those of the same number of requests."""
    hour = "(started_at - started_at % 3600000000)"
    requests = connection.execute(
        text(
            f"SELECT {hour} AS hour, segment, COUNT(*) AS requests, SUM(output_tokens) AS output_tokens, "
            f"SUM(total_seconds) AS total_seconds FROM requests GROUP BY {hour}, segment"
        )
    )
    wanted = {(row.hour, row.segment): row for row in requests}
    summed = connection.execute(
        text(
            "SELECT hour, segment, SUM(requests) AS requests, SUM(output_tokens) AS output_tokens, "
            "SUM(total_seconds) AS total_seconds FROM hourly_requests GROUP BY hour, segment"
        )
    )
    found = {(row.hour, row.segment): row for row in summed}
    wrong = [key for key, row in wanted.items() if key not in found or not _agree(row, found[key])]
    if not wrong:
        return []
    return [
        Problem(
            f"in {len(wrong)} of {len(wanted)} hours and segments the sums are not those of the requests",
            "was something else writing to the database? export it and import it into a new one",
        )
    ]


def _agree(requests: Any, summed: Any) -> bool:
    if summed.requests > requests.requests:
        return True  # some of that hour were pruned
    return (
        int(summed.requests) == int(requests.requests)
        and int(summed.output_tokens) == int(requests.output_tokens)
        and abs(summed.total_seconds - requests.total_seconds) <= TOLERANCE * abs(requests.total_seconds)
    )
