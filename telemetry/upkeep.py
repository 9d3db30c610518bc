"""Looking after a database: pruning, compacting, checking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, inspect, select, text, update
from sqlalchemy.orm import Session, aliased

from autospec.errors import ConfigurationError
from autospec.telemetry import engines
from autospec.telemetry.rollups import hour_of
from autospec.telemetry.schema import (
    Base,
    CalibrationRow,
    ComparisonRow,
    HorizonRow,
    HourlyActions,
    HourlyPositions,
    HourlyRequests,
    PolicyStateRow,
    RecordingRow,
    RequestRow,
    TraceRow,
    to_microseconds,
)
from autospec.telemetry.store import STATE_KEY, Store, read_state

PRUNE_ROWS = 5_000
YOUNGEST_SECONDS = 86_400
"""Requests younger than a day are not pruned: one that still waits in a spool would not be taken any more."""

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

    So goes what policies had learned by then, in processes that have saved nothing since, and what a device had cost
    by then, if it was measured again.

    Args:
        store: the database.
        before: an aware datetime at least a day ago.
        hours: delete the sums by the hour of that time, too, and what engines had counted; without it the report by
            hours stays what it was.
        progress: called with the number of requests deleted in each transaction.

    Returns:
        How many requests were deleted.

    Raises:
        ConfigurationError: the time has no zone or is too recent.
        StoreError: the database cannot be used; what was deleted before stays deleted.
    """
    _check_age(before)
    total, last = 0, 0
    with store.writing() as connection:
        horizon = connection.scalar(select(HorizonRow.pruned_before))
        if horizon is None:
            connection.execute(insert(HorizonRow), {"id": 1, "pruned_before": before})
        elif horizon < before:
            connection.execute(update(HorizonRow).values(pruned_before=before))
    while True:
        oldest = (
            select(RequestRow.id, RequestRow.request_id)
            .where(RequestRow.started_at < before, RequestRow.id > last)
            .order_by(RequestRow.id)
            .limit(PRUNE_ROWS)
        )
        with store.reading() as connection:
            found = connection.execute(oldest).all()
        if not found:
            break
        last = found[-1].id
        names = [row.request_id for row in found]
        with store.writing() as connection:
            for row_type, column in (
                (ComparisonRow, ComparisonRow.request_id),
                (ComparisonRow, ComparisonRow.control_request_id),
                (TraceRow, TraceRow.request_id),
                (RecordingRow, RecordingRow.request_id),
            ):
                connection.execute(delete(row_type).where(column.in_(names)))
            connection.execute(delete(RequestRow).where(RequestRow.id.in_([row.id for row in found])))
        total += len(found)
        if progress is not None:
            progress(len(found))
    newer = aliased(CalibrationRow)
    is_replaced = exists().where(
        newer.deployment_id == CalibrationRow.deployment_id,
        newer.source == CalibrationRow.source,
        newer.measured_at > CalibrationRow.measured_at,
    )
    with store.writing() as connection:
        connection.execute(delete(PolicyStateRow).where(PolicyStateRow.updated_at < before))
        connection.execute(delete(CalibrationRow).where(CalibrationRow.measured_at < before, is_replaced))
    if hours:
        hour = hour_of(before.astimezone(UTC))
        with store.writing() as connection:
            for table in (HourlyRequests, HourlyActions, HourlyPositions):
                connection.execute(delete(table).where(table.hour < hour))
            engines.prune(connection, hour)
    return total


def vacuum(store: Store) -> None:
    """Gives room that is not used any more back to the disk, and refreshes what the query planner knows."""
    commands = {
        "sqlite": ["VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA optimize"],
        "postgresql": ["VACUUM ANALYZE"],
    }
    store.execute_alone(commands[store.kind])


def check(store: Store) -> list[Problem]:
    """What is wrong with a database; nothing is changed.

    Looked at are the file itself (SQLite), keys that point nowhere, the tables' columns and indexes, whether the
    sums by the hour are those of the requests, for hours after the last that was pruned, and whether what policies have
    learned can be read.
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
        wrong_tables = _check_tables(connection)
        problems += wrong_tables or [*_check_hours(connection), *_check_states(connection)]
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
    """Hours of which no request was pruned, and whose sums are not those of their requests."""
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
    horizon = connection.scalar(select(HorizonRow.pruned_before))
    first = 0 if horizon is None else to_microseconds(horizon)
    keys = [key for key in wanted.keys() | found.keys() if key[0] >= first]
    wrong = [key for key in keys if key not in found or key not in wanted or not _agree(wanted[key], found[key])]
    if not wrong:
        return []
    return [
        Problem(
            f"in {len(wrong)} of {len(keys)} hours and segments the sums are not those of the requests",
            "was something else writing to the database? export it and import it into a new one",
        )
    ]


def _check_states(connection: Connection) -> list[Problem]:
    count = num_damaged = 0
    for key in connection.execute(select(*STATE_KEY)).all():
        count += 1
        try:
            with Session(connection) as session:
                read_state(session, key)
        except ValueError:
            num_damaged += 1
    if not num_damaged:
        return []
    return [
        Problem(
            f"{num_damaged} of {count} learned states of policies cannot be read",
            "models that are wrapped begin without them; autospec db prune deletes them once they are old",
        )
    ]


def _agree(requests: Any, summed: Any) -> bool:
    return (
        int(summed.requests) == int(requests.requests)
        and int(summed.output_tokens) == int(requests.output_tokens)
        and abs(summed.total_seconds - requests.total_seconds) <= TOLERANCE * abs(requests.total_seconds)
    )
