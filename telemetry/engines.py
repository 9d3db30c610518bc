"""Engines that are known by their own counters alone: written as they were scraped, summed as differences.

Counters say nothing of single requests, and no request is made of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, delete, exists, func, select, text, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import aliased

from autospec.telemetry.codec import clean_text
from autospec.telemetry.rollups import hour_of
from autospec.telemetry.rows import ratio
from autospec.telemetry.schema import EngineRow, from_microseconds

if TYPE_CHECKING:
    from autospec.telemetry.store import Store

SOONEST_RESTART = timedelta(seconds=5)
"""An engine that says not when it began cannot have been started anew so soon after it was seen: such a scrape is one
that was overtaken by another scraper's."""

LONGEST_GAP = timedelta(hours=1)
"""Between the beginning of a stretch of time and the scrape before it, so that the two are taken as one."""

COUNTS = (
    "requests",
    "prompt_tokens",
    "output_tokens",
    "request_tokens",
    "request_seconds",
    "steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)
_LIFE = ("engine", "target", "began_at")
_TIMES = ("began_at", "hour", "scraped_at")

Life = tuple[str, str, datetime]


@dataclass(frozen=True, slots=True)
class EngineSums:
    """What an engine counted in a stretch of time, over restarts. None: it does not say."""

    engine: str
    target: str
    device: str
    source: str
    first: datetime  # counted from then on
    last: datetime  # and until then
    requests: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    request_tokens: int | None
    request_seconds: float | None
    steps: int | None
    num_drafts: int | None
    num_draft_tokens: int | None
    num_accepted_tokens: int | None
    accepted: tuple[int, ...]  # [j] drafts of which at least j + 1 tokens were accepted

    @property
    def group(self) -> Mapping[str, str]:
        return {"engine": self.engine, "target": self.target}

    @property
    def tokens_per_second(self) -> float | None:
        """Of requests that have ended, while they ran."""
        return ratio(self.request_tokens or 0, self.request_seconds or 0.0)

    @property
    def tokens_per_step(self) -> float | None:
        """Of all requests together."""
        return ratio(self.output_tokens or 0, self.steps or 0)

    @property
    def mean_acceptance_length(self) -> float | None:
        """+1 included; of steps with drafts alone."""
        drafts = self.num_drafts or 0
        return ratio(drafts + (self.num_accepted_tokens or 0), drafts)

    @property
    def share_accepted(self) -> tuple[float | None, ...]:
        """[j] share of the drafts of which at least j + 1 tokens were accepted."""
        return tuple(ratio(count, self.num_drafts or 0) for count in self.accepted)


def insert(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes scrapes, as `codec.to_entry` makes them, within a transaction. The latest one of an hour stays."""
    if not rows:
        return
    if any(row["began_at"] is None for row in rows) and connection.dialect.name == "postgresql":
        # the row before it must not change meanwhile; SQLite lets one write at a time anyway
        connection.execute(text("LOCK TABLE engine_counters IN SHARE ROW EXCLUSIVE MODE"))
    for row in sorted(rows, key=lambda row: (row["engine"], row["target"], row["scraped_at"])):
        values = {**row, **{name: from_microseconds(row[name]) for name in _TIMES if row[name] is not None}}
        if (began_at := _beginning(connection, values)) is not None:
            _upsert(connection, {**values, "began_at": began_at})


def engine_sums(
    store: Store,
    since: datetime | None = None,
    until: datetime | None = None,
    *,
    target: str | None = None,
    device: str | None = None,
) -> tuple[EngineSums, ...]:
    """What engines counted between two times, by engine and target.

    What was counted between two scrapes belongs to the hour of the second. Where the one before `since` is more than an
    hour older, or the engine had begun by then and was not looked at, counting begins with the first scrape after it.

    Args:
        store: the database.
        since: from this hour on; an aware datetime.
        until: before this hour; an aware datetime.
        target: only engines with this one.
        device: the same.

    Raises:
        StoreError: the database cannot be read.
    """
    begin, end = (None if time is None else hour_of(time.astimezone(UTC)) for time in (since, until))
    with store.reading() as connection:
        now = _rows(connection, func.max, None, end, target, device)
        before = {} if begin is None else _rows(connection, func.max, None, begin, target, device)
        opening = {} if begin is None else _rows(connection, func.min, begin, end, target, device)
    found: dict[tuple[str, str], list[tuple[Any, Any, datetime]]] = defaultdict(list)
    for life, row in now.items():
        earlier = before.get(life)
        first = row.began_at if earlier is None else earlier.scraped_at
        if begin is not None and first < begin - LONGEST_GAP:
            if (earlier := opening.get(life)) is None:
                continue
            first = earlier.scraped_at
        if earlier is None or earlier.scraped_at < row.scraped_at:
            found[life[:2]].append((row, earlier, first))
    return tuple(_sums(parts) for _, parts in sorted(found.items()))


def prune(connection: Connection, before: datetime) -> None:
    """Deletes rows of hours before a time, but for those that later ones are to be compared with."""
    later, newer = aliased(EngineRow), aliased(EngineRow)
    goes_on = exists().where(*_alike(later), later.hour >= before)
    is_overtaken = exists().where(*_alike(newer), newer.hour > EngineRow.hour, newer.hour < before)
    connection.execute(delete(EngineRow).where(EngineRow.hour < before, ~goes_on | is_overtaken))


def _alike(other: Any) -> list[Any]:
    return [getattr(other, name) == getattr(EngineRow, name) for name in _LIFE]


def _beginning(connection: Connection, values: Mapping[str, Any]) -> datetime | None:
    """When the engine began to count. None: the scrape comes too late, or its time is wrong, and says nothing new.

    Where it does not say, it is as before, or now if a count fell.
    """
    began_at: datetime | None = values["began_at"]
    scraped_at: datetime = values["scraped_at"]
    query = (
        select(EngineRow.__table__)
        .where(EngineRow.engine == values["engine"], EngineRow.target == values["target"])
        .order_by(EngineRow.scraped_at.desc())
        .limit(1)
    )
    if began_at is not None:
        query = query.where(EngineRow.began_at == began_at, EngineRow.scraped_at <= scraped_at)
    last = connection.execute(query).one_or_none()
    if last is None:
        return began_at or scraped_at
    has_fallen = any(_fell(getattr(last, name), values[name]) for name in COUNTS)
    if began_at is not None:
        return None if has_fallen else began_at
    if scraped_at < last.scraped_at or (has_fallen and scraped_at < last.scraped_at + SOONEST_RESTART):
        return None
    known: datetime = last.began_at
    return scraped_at if has_fallen else known


def _fell(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now < before


def _upsert(connection: Connection, values: Mapping[str, Any]) -> None:
    table = EngineRow.__table__
    assert isinstance(table, Table)
    is_postgres = connection.dialect.name == "postgresql"
    statement: Any = postgresql.insert(table) if is_postgres else sqlite.insert(table)
    key = [column.name for column in table.primary_key]
    changes = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in key}
    is_later = table.c.scraped_at < statement.excluded.scraped_at
    statement = statement.on_conflict_do_update(index_elements=key, set_=changes, where=is_later)
    connection.execute(statement, dict(values))


def _rows(
    connection: Connection,
    pick: Any,
    begin: datetime | None,
    end: datetime | None,
    target: str | None,
    device: str | None,
) -> dict[Life, Any]:
    """Of each life the first or last row (`func.min`, `func.max`) of the hours between two."""
    life = [getattr(EngineRow, name) for name in _LIFE]
    picked = select(*life, pick(EngineRow.hour)).group_by(*life)
    if begin is not None:
        picked = picked.where(EngineRow.hour >= begin)
    if end is not None:
        picked = picked.where(EngineRow.hour < end)
    if target is not None:
        picked = picked.where(EngineRow.target == clean_text(target))
    query = select(EngineRow.__table__).where(tuple_(*life, EngineRow.hour).in_(picked))
    if device is not None:
        query = query.where(EngineRow.device == clean_text(device))
    return {(row.engine, row.target, row.began_at): row for row in connection.execute(query)}


def _sums(parts: Sequence[tuple[Any, Any, datetime]]) -> EngineSums:
    newest = max((row for row, _, _ in parts), key=lambda row: row.scraped_at)
    counts = {name: _sum(_difference(name, row, earlier) for row, earlier, _ in parts) for name in COUNTS}
    accepted: list[int] = []
    for row, earlier, _ in parts:
        old = [] if earlier is None else earlier.accepted
        gained = [int(now) - int(then) for now, then in zip_longest(row.accepted, old, fillvalue=0)]
        accepted = [so_far + more for so_far, more in zip_longest(accepted, gained, fillvalue=0)]
    return EngineSums(
        engine=newest.engine,
        target=newest.target,
        device=newest.device,
        source=newest.source,
        first=min(first for _, _, first in parts),
        last=newest.scraped_at,
        accepted=tuple(accepted),
        **counts,
    )


def _difference(name: str, row: Any, earlier: Any) -> Any:
    now, then = getattr(row, name), None if earlier is None else getattr(earlier, name)
    return now if now is None or then is None else now - then


def _sum(values: Any) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
