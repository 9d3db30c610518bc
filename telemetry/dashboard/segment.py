"""What the page of one segment shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from sqlalchemy import func, select

from autospec.costs.batches import SAMPLED
from autospec.telemetry.dashboard.buckets import Times, action_label, load_traffic
from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.reports import load_report, newest_requests
from autospec.telemetry.dashboard.slices import Slice, deployments
from autospec.telemetry.rows import Report, ratio
from autospec.telemetry.schema import (
    CalibrationRow,
    HourlyActions,
    HourlyPositions,
    HourlyRequests,
    PolicyVersionRow,
)
from autospec.telemetry.store import Store
from autospec.types import NONE, RequestRecord

TARGET = "target"
"""The source of calibration samples that are the target's own forwards; of engines, greedy steps."""

SLOWEST = 10
MOST_CHANGES = 40


@dataclass(frozen=True, slots=True)
class Change:
    """A policy began to be used in the segment, or new settings of one were stored."""

    at: datetime
    policy: str
    version: str | None  # None: the first hour in which the policy decoded requests of the segment


@dataclass(frozen=True, slots=True)
class Position:
    """One draft position of one source, over all its block lengths."""

    position: int  # from 1
    at_risk: int
    accepted: int
    survival: float | None  # product of accepted / judged up to here: no draft before it was rejected


@dataclass(frozen=True, slots=True)
class ActionSums:
    """All blocks of one action."""

    source: str
    block_length: int
    blocks: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    draft_seconds: float
    verify_seconds: float
    host_seconds: float  # correction and emission

    @property
    def label(self) -> str:
        return action_label(self.source, self.block_length)

    @property
    def goodput(self) -> float | None:
        """Tokens per second in the blocks."""
        return ratio(self.num_committed_tokens, self.draft_seconds + self.verify_seconds + self.host_seconds)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Goodput of one source at one block length, from survival and the measured points of the cost model."""

    source: str
    block_length: int
    goodput: float


@dataclass(frozen=True, slots=True)
class Segment:
    name: str
    report: Report
    times: Times | None
    changes: tuple[Change, ...]
    survival: Mapping[str, tuple[Position, ...]]
    actions: tuple[ActionSums, ...]
    predicted: tuple[Predicted, ...]
    newest: tuple[RequestRecord, ...]  # at most reports.NEWEST, control requests included

    @property
    def is_empty(self) -> bool:
        return self.report.is_empty

    @property
    def acceptance_lengths(self) -> Counter[int]:
        """Acceptance length (+1 included) -> blocks, of the newest requests under a policy."""
        found: Counter[int] = Counter()
        for record in self.newest:
            if not record.is_control:
                found.update(record.acceptance_lengths)
        return found

    @property
    def slowest(self) -> list[RequestRecord]:
        """Of the newest under a policy, those with the most seconds per output token; without one first."""
        treated = [record for record in self.newest if not record.is_control]
        return sorted(treated, key=_seconds_per_token, reverse=True)[:SLOWEST]


def load_segment(store: Store, filters: Filters, name: str) -> Segment:
    """Everything about one segment.

    Raises:
        ConfigurationError: the filters ask for too many requests one by one.
        StoreError: the database cannot be read.
    """
    part = Slice(store, filters, name)
    actions = _load_actions(part)
    survival = _load_survival(part)
    return Segment(
        name=name,
        report=load_report(store, filters, segment=name),
        times=load_traffic(store, filters, name).by_segment.get(name),
        changes=tuple(_load_changes(part)),
        survival=survival,
        actions=tuple(actions),
        predicted=tuple(_predict(survival, actions, _costs(store, filters))),
        newest=tuple(newest_requests(store, filters, name)),
    )


def survive(counts: Sequence[tuple[int, int]]) -> list[float | None]:
    """[j] chance that the first j + 1 draft tokens of a block are accepted; None from where none was judged.

    Args:
        counts: [j] judged and accepted at draft position j + 1.

    Source: Kaplan and Meier 1958: blocks that end early for another reason leave the count, and do not bend it.
    """
    found: list[float | None] = []
    product = 1.0
    for at_risk, accepted in counts:
        if at_risk <= 0 or (found and found[-1] is None):
            found.append(None)
            continue
        product *= accepted / at_risk
        found.append(product)
    return found


def interpolate(points: Mapping[int, float], tokens: int) -> float | None:
    """Seconds between two measured numbers of tokens; None outside of what was measured."""
    if tokens in points:
        return points[tokens]
    for low, high in pairwise(sorted(points)):
        if low < tokens < high:
            return points[low] + (points[high] - points[low]) * (tokens - low) / (high - low)
    return None


def _load_survival(part: Slice) -> dict[str, tuple[Position, ...]]:
    table = HourlyPositions
    keys = [table.source, table.position]
    query = select(*keys, func.sum(table.at_risk).label("at_risk"), func.sum(table.accepted).label("accepted"))
    counts: dict[str, dict[int, tuple[int, int]]] = {}
    for row in part.rows(query.group_by(*keys), table):
        counts.setdefault(row.source, {})[row.position] = int(row.at_risk), int(row.accepted)
    found = {}
    for source, by_position in sorted(counts.items()):
        columns = [by_position.get(position, (0, 0)) for position in range(1, max(by_position) + 1)]
        survived = survive(columns)
        found[source] = tuple(
            Position(number, *column, survived[number - 1]) for number, column in enumerate(columns, 1)
        )
    return found


def _load_actions(part: Slice) -> list[ActionSums]:
    table = HourlyActions
    keys = [table.source, table.block_length]
    names = ["blocks", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens"]
    names += ["draft_seconds", "verify_seconds", "correction_seconds", "emission_seconds"]
    query = select(*keys, *(func.sum(getattr(table, name)).label(name) for name in names))
    return [
        ActionSums(
            source=row.source,
            block_length=row.block_length,
            blocks=int(row.blocks),
            num_draft_tokens=int(row.num_draft_tokens),
            num_accepted_tokens=int(row.num_accepted_tokens),
            num_committed_tokens=int(row.num_committed_tokens),
            draft_seconds=float(row.draft_seconds),
            verify_seconds=float(row.verify_seconds),
            host_seconds=float(row.correction_seconds + row.emission_seconds),
        )
        for row in part.rows(query.group_by(*keys).order_by(*keys), table)
    ]


def _load_changes(part: Slice) -> list[Change]:
    """The first hour of each policy in the segment, and when settings of these policies were stored in the range."""
    table, filters = HourlyRequests, part.filters
    query = select(table.policy, func.min(table.hour).label("first")).where(~table.is_control).group_by(table.policy)
    first = {row.policy: row.first for row in part.rows(query, table)}
    found = [Change(hour, policy, None) for policy, hour in first.items()]
    made = select(PolicyVersionRow).where(PolicyVersionRow.name.in_(list(first)))
    with part.store.reading() as connection:
        for row in connection.execute(made.order_by(PolicyVersionRow.made_at.desc()).limit(MOST_CHANGES)):
            after = filters.since is None or row.made_at >= filters.since
            if after and (filters.until is None or row.made_at < filters.until):
                found.append(Change(row.made_at, row.name, row.version))
    return sorted(found, key=lambda change: (change.at, change.policy))


def _costs(store: Store, filters: Filters) -> dict[str, dict[int, float]]:
    """Seconds by source and tokens: the newest measurement, at the context with the most points."""
    places = deployments(store, filters)
    query = select(CalibrationRow).order_by(CalibrationRow.measured_at.desc()).limit(5_000)
    if places is not None:
        query = query.where(CalibrationRow.deployment_id.in_(places))
    with store.reading() as connection:
        rows = connection.execute(query).all()
    rows = [row for row in rows if (row.deployment_id, row.measured_at) == (rows[0].deployment_id, rows[0].measured_at)]
    by_source: dict[str, dict[int, dict[int, float]]] = {}
    for row in rows:
        by_source.setdefault(row.source, {}).setdefault(row.context_tokens, {})[row.tokens] = row.seconds
    return {
        source: contexts[max(contexts, key=lambda context: (len(contexts[context]), -context))]
        for source, contexts in by_source.items()
    }


def _predict(
    survival: Mapping[str, Sequence[Position]], actions: Sequence[ActionSums], costs: Mapping[str, Mapping[int, float]]
) -> list[Predicted]:
    """Goodput by block length: tokens expected of a block / seconds that it should take."""
    blocks = sum(each.blocks for each in actions)
    target = costs.get(TARGET) or costs.get(SAMPLED)
    if not target or not blocks:
        return []
    host = sum(each.host_seconds for each in actions) / blocks
    found = []
    for source, positions in survival.items():
        expected = 1.0
        for each in positions:
            if each.survival is None:
                break
            expected += each.survival
            verify = interpolate(target, each.position + 1)
            draft = interpolate(costs.get(source, {}), each.position)
            if verify is not None and draft is not None:
                found.append(Predicted(source, each.position, expected / (draft + verify + host)))
    plain = interpolate(target, 1)
    if plain is not None:
        found.append(Predicted(NONE, 0, 1.0 / (plain + host)))
    return found


def _seconds_per_token(record: RequestRecord) -> float:
    value = ratio(record.total_seconds, record.output_tokens)
    return float("inf") if value is None else value
