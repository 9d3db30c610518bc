"""Sums by stretches of time, from sums by the hour: whole hours or days of UTC, and cut here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, func, literal, select, type_coerce

from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.slices import Slice
from autospec.telemetry.dashboard_queries import Hour
from autospec.telemetry.rows import ratio
from autospec.telemetry.schema import HourlyActions, HourlyRequests, from_microseconds, to_microseconds
from autospec.telemetry.store import Store
from autospec.types import NONE, Action

MOST_BUCKETS = 60
STEPS_IN_HOURS = (1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 672)
ALL = ""
FRESH = timedelta(days=7)
"""A control request older than this, before the newest request, is no fresh one."""

_MICROSECOND = timedelta(microseconds=1)
_HOUR = timedelta(hours=1)

Sums = Sequence[Any]
"""Requests, output tokens, seconds, blocks and their tokens: numbers of the database's kinds."""

_NO_SUMS = (0, 0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """The hours that there are sums of, cut into equal stretches."""

    first: datetime  # beginning of the first stretch
    step: timedelta
    count: int

    @property
    def starts(self) -> list[datetime]:
        return [self.first + number * self.step for number in range(self.count)]

    @property
    def step_words(self) -> str:
        hours = self.step // _HOUR
        number, unit = (hours // 24, "day") if hours % 24 == 0 else (hours, "hour")
        return unit if number == 1 else f"{number} {unit}s"


@dataclass(frozen=True, slots=True)
class Times:
    """What happened in each stretch of a span."""

    span: Span
    sums: Mapping[int, Hour]  # by number of the stretch; one without requests is not there

    @property
    def speed_ups(self) -> list[float | None]:
        return [None if (found := self.sums.get(number)) is None else found.speed_up for number in self.numbers]

    @property
    def numbers(self) -> range:
        return range(self.span.count)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Times of each segment, and what follows from them."""

    span: Span | None  # None: nothing is there
    by_segment: Mapping[str, Times]
    stale_requests: int  # of segments without a fresh control
    requests: int  # under a policy
    newest: datetime | None  # hour of the newest request, control or not

    @property
    def stale_share(self) -> float | None:
        return ratio(self.stale_requests, self.requests)


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """Blocks by action and stretch."""

    span: Span | None
    blocks: Mapping[str, Mapping[int, int]]  # Action.label -> number of the stretch -> blocks
    plain_seconds: Mapping[int, float]  # by stretch, of a plain target step


def span_of(part: Slice, latest: timedelta | None = None) -> Span | None:
    """The hours with requests, between the filters' times, in at most MOST_BUCKETS stretches; or the latest of them."""
    ends = []
    for end in (func.min, func.max):  # each by itself is found at once by the index
        ((found,),) = part.rows(select(end(HourlyRequests.hour)), HourlyRequests)
        ends.append(found)
    first, last = ends
    if first is None or last is None:
        return None
    if latest is not None:
        first = max(first, last + _HOUR - latest)
    hours = (last - first) // _HOUR + 1
    step = next((step for step in STEPS_IN_HOURS if hours <= step * (MOST_BUCKETS - 1)), STEPS_IN_HOURS[-1])
    while hours > step * (MOST_BUCKETS - 1):
        step *= 2
    length = step * _HOUR
    start = from_microseconds(to_microseconds(first) - to_microseconds(first) % (length // _MICROSECOND))
    return Span(start, length, (last - start) // length + 1)


def load_traffic(
    store: Store,
    filters: Filters,
    segment: str | None = None,
    latest: timedelta | None = None,
    *,
    together: bool = False,
) -> Traffic:
    """Requests, tokens and seconds by segment and stretch, those of both sides.

    Args:
        store: the database.
        filters: which requests.
        segment: only this one.
        latest: how much of the end of the time range is read; None: all.
        together: sum all segments up, under the name ALL. A speed-up over them would compare unlike traffic.

    Raises:
        StoreError: the database cannot be read.
    """
    part = Slice(store, filters, segment)
    span = span_of(part, latest)
    if span is None:
        return Traffic(None, {}, 0, 0, None)
    table = HourlyRequests
    name: Any = literal(ALL) if together else table.segment
    keys = [name.label("name"), _number(table.hour, span), table.is_control]
    numbers = [table.requests, table.output_tokens, table.total_seconds, table.blocks, table.block_tokens]
    last = func.max(type_coerce(table.hour, BigInteger))
    query = select(*keys, last, *map(func.sum, numbers)).group_by(*keys[together:])
    if latest is not None:
        query = query.where(table.hour >= span.first)
    base = to_microseconds(span.first) // (span.step // _MICROSECOND)
    found: dict[str, dict[int, dict[bool, Sums]]] = {}
    lasts: dict[tuple[str, bool], int] = {}  # microseconds since 1970
    for name, bucket, is_control, hour, *sums in part.rows(query, table):
        found.setdefault(name, {}).setdefault(int(bucket) - base, {})[is_control] = sums
        lasts[name, is_control] = max(lasts.get((name, is_control), hour), hour)
    newest, fresh = max(lasts.values()), FRESH // _MICROSECOND
    times = {name: _times(name, buckets, span) for name, buckets in found.items()}
    requests = {name: sum(each.requests for each in times[name].sums.values()) for name in times}
    stale = [name for name in times if newest - lasts.get((name, True), newest - fresh - 1) > fresh]
    return Traffic(
        span, times, sum(requests[name] for name in stale), sum(requests.values()), from_microseconds(newest)
    )


def _times(segment: str, buckets: Mapping[int, Mapping[bool, Sums]], span: Span) -> Times:
    found = {}
    for number, sides in buckets.items():
        requests, tokens, seconds, blocks, block_tokens = sides.get(False, _NO_SUMS)
        control_requests, control_tokens, control_seconds, *_ = sides.get(True, _NO_SUMS)
        found[number] = Hour(
            hour=span.first + number * span.step,
            segment=segment,
            requests=int(requests),
            output_tokens=int(tokens),
            seconds=float(seconds),
            control_requests=int(control_requests),
            control_output_tokens=int(control_tokens),
            control_seconds=float(control_seconds),
            blocks=int(blocks),
            block_tokens=int(block_tokens),
        )
    return Times(span, found)


def load_actions(store: Store, filters: Filters, segment: str | None = None) -> ActionTimes:
    """Blocks by action and stretch; none where the filters ask for more than a time range."""
    part = Slice(store, filters, segment)
    span = span_of(part)
    if span is None:
        return ActionTimes(None, {}, {})
    table = HourlyActions
    keys = [table.source, table.block_length, _number(table.hour, span)]
    query = select(
        *keys, func.sum(table.blocks).label("blocks"), func.sum(table.verify_seconds).label("seconds")
    ).group_by(*keys)
    base = to_microseconds(span.first) // (span.step // _MICROSECOND)
    blocks: dict[str, dict[int, int]] = {}
    plain: dict[int, float] = {}
    for row in part.rows(query, table):
        label, number = action_label(row.source, row.block_length), int(row.bucket) - base
        counts = blocks.setdefault(label, {})
        counts[number] = counts.get(number, 0) + int(row.blocks)
        if label == NONE and row.seconds > 0:
            plain[number] = float(row.seconds) / int(row.blocks)
    return ActionTimes(span, blocks, plain)


def action_label(source: str, block_length: int) -> str:
    return Action(source, block_length).label if block_length else NONE


def _number(hour: Any, span: Span) -> Any:
    """Stretches since 1970, in SQL."""
    time, step = type_coerce(hour, BigInteger), span.step // _MICROSECOND
    return ((time - time % step) // step).label("bucket")
