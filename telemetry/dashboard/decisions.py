"""What the page of decisions and drift shows: what policies did over time, and how good their predictions were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from autospec.telemetry.dashboard.buckets import ALL, ActionTimes, Times, load_actions, load_traffic
from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.reports import LoadReport, load_segments, newest
from autospec.telemetry.rows import Report, ratio
from autospec.telemetry.schema import PolicyStateRow, RequestRow
from autospec.telemetry.store import STATE_KEY, Store, read_state
from autospec.types import PolicyState

EXPLORING = frozenset(["explore", "probe"])
"""Kinds of reasons of blocks that were chosen to learn something."""

MOST_STATES = 32


@dataclass(frozen=True, slots=True)
class Trip:
    """Speculation was stopped in a segment because it was losing, as a saved policy remembers it."""

    segment: str
    policy: str
    process: str
    trips: int
    blocks: int  # of the segment, in all
    plain_blocks_to_go: int  # 0: speculation is allowed
    log_wealth: float  # of the test under way; evidence that it loses
    saved_at: datetime


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided in one request."""

    decisions: Mapping[str, int]  # as in RequestRecord
    fallback_reason: str | None


@dataclass(frozen=True, slots=True)
class Decisions:
    report: Report  # by segment
    traffic: Times | None  # all segments together: counts only
    actions: ActionTimes
    trips: tuple[Trip, ...]
    damaged_states: int
    newest: tuple[Decided, ...]  # at most reports.NEWEST, control requests included

    @property
    def is_empty(self) -> bool:
        return self.report.is_empty

    @property
    def control_share(self) -> float | None:
        """Control requests / all requests."""
        if self.traffic is None:
            return None
        controls = sum(each.control_requests for each in self.traffic.sums.values())
        return ratio(controls, controls + sum(each.requests for each in self.traffic.sums.values()))

    @property
    def kinds(self) -> Counter[str]:
        """Blocks by kind of reason, of the newest requests."""
        found: Counter[str] = Counter()
        for record in self.newest:
            for key, blocks in record.decisions.items():
                found[key.rpartition(" ")[2]] += blocks
        return found

    @property
    def exploration_share(self) -> float | None:
        """Blocks chosen to learn something / blocks, of the newest requests."""
        kinds = self.kinds
        return ratio(sum(count for kind, count in kinds.items() if kind in EXPLORING), sum(kinds.values()))

    @property
    def fallbacks(self) -> Counter[str]:
        """Newest requests left to the original `generate`, by reason."""
        return Counter(record.fallback_reason for record in self.newest if record.fallback_reason is not None)


def load_decisions(store: Store, filters: Filters, load: LoadReport = load_segments) -> Decisions:
    """Actions, shares, guard trips and calibration.

    Args:
        store: the database.
        filters: which requests.
        load: reads the report.

    Raises:
        ConfigurationError: the filters ask for too many requests one by one.
        StoreError: the database cannot be read.
    """
    with ThreadPoolExecutor(3) as threads:  # each reads for itself, and databases do that side by side
        report = threads.submit(load, store, filters)
        traffic = threads.submit(load_traffic, store, filters, together=True)
        actions = threads.submit(load_actions, store, filters)
        trips, damaged = load_trips(store)
        decided = _load_newest(store, filters)
    return Decisions(
        report=report.result(),
        traffic=traffic.result().by_segment.get(ALL),
        actions=actions.result(),
        trips=tuple(trips),
        damaged_states=damaged,
        newest=tuple(decided),
    )


def _load_newest(store: Store, filters: Filters) -> list[Decided]:
    query = newest(store, filters).with_only_columns(RequestRow.decisions, RequestRow.fallback_reason)
    with store.reading() as connection:
        return [Decided(row.decisions or {}, row.fallback_reason) for row in connection.execute(query)]


def load_trips(store: Store) -> tuple[list[Trip], int]:
    """Guard trips by segment in the policies saved last, most trips first; and how many of these are damaged."""
    keys = select(*STATE_KEY).order_by(PolicyStateRow.updated_at.desc(), PolicyStateRow.process).limit(MOST_STATES)
    found: list[Trip] = []
    damaged = 0
    with store.reading() as connection, Session(connection) as session:
        for key in session.execute(keys).all():
            try:
                found += _trips(read_state(session, key))
            except ValueError:
                damaged += 1
    return sorted(found, key=lambda trip: (-trip.trips, trip.segment, trip.process)), damaged


def _trips(state: PolicyState) -> list[Trip]:
    """Raises: ValueError: what a guard had learned is damaged."""
    segments = state.state.get("segments")
    if not isinstance(segments, Mapping):
        return []  # a policy without a guard
    try:
        return [
            Trip(
                segment=str(name),
                policy=state.policy,
                process=state.process,
                trips=int(values["trips"]),
                blocks=int(values["blocks"]),
                plain_blocks_to_go=max(0, int(values["paused_until"]) - int(values["blocks"])),
                log_wealth=float(values["brake"]["log_wealth"]),
                saved_at=state.updated_at,
            )
            for name, values in segments.items()
            if isinstance(values, Mapping) and values.get("trips")
        ]
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
