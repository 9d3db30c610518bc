"""Sums by stretches of time, from sums by the hour: whole hours or days of UTC, and cut here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from sqlalchemy import BigInteger, func, select, type_coerce

from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.slices import Slice, between
from autospec.telemetry.dashboard_queries import Hour
from autospec.telemetry.rows import ratio
from autospec.telemetry.schema import HourlyActions, HourlyRequests, from_microseconds, to_microseconds
from autospec.telemetry.store import Store
from autospec.types import NONE, Action

MOST_BUCKETS = 60
STEPS_IN_HOURS = (1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 672)
FRESH = timedelta(days=7)
"""A control request older than this, before the newest request, is no fresh one."""

_MICROSECOND = timedelta(microseconds=1)
_HOUR = timedelta(hours=1)


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


def span_of(store: Store, filters: Filters, segment: str | None = None, latest: timedelta | None = None) -> Span | None:
    """The hours with requests, between the filters' times, in at most MOST_BUCKETS stretches; or the latest of them."""
    query = between(select(func.min(HourlyRequests.hour), func.max(HourlyRequests.hour)), HourlyRequests.hour, filters)
    with Slice(store, filters, segment).reading() as connection:
        first, last = connection.execute(query).one()
    if first is None:
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
    store: Store, filters: Filters, segment: str | None = None, latest: timedelta | None = None
) -> Traffic:
    """Requests, tokens and seconds by segment and stretch, those of both sides.

    Args:
        store: the database.
        filters: which requests.
        segment: only this one.
        latest: how much of the end of the time range is read; None: all.

    Raises:
        StoreError: the database cannot be read.
    """
    span = span_of(store, filters, segment, latest)
    if span is None:
        return Traffic(None, {}, 0, 0, None)
    table = HourlyRequests
    keys = [table.segment, _number(table.hour, span), table.is_control]
    names = ["requests", "output_tokens", "total_seconds", "blocks", "block_tokens"]
    query = select(
        *keys, *(func.sum(getattr(table, name)).label(name) for name in names), func.max(table.hour).label("last")
    ).group_by(*keys)
    if latest is not None:
        query = query.where(table.hour >= span.first)
    found: dict[str, dict[int, dict[bool, Any]]] = {}
    lasts: dict[tuple[str, bool], datetime] = {}
    with Slice(store, filters, segment).reading() as connection:
        for row in connection.execute(between(query, table.hour, filters)):
            found.setdefault(row.segment, {}).setdefault(int(row.bucket), {})[row.is_control] = row
            key = row.segment, row.is_control
            lasts[key] = max(lasts.get(key, row.last), row.last)
    newest = max(lasts.values())
    base = to_microseconds(span.first) // (span.step // _MICROSECOND)
    times = {
        name: _times(name, {bucket - base: sides for bucket, sides in buckets.items()}, span)
        for name, buckets in found.items()
    }
    requests = {name: sum(each.requests for each in times[name].sums.values()) for name in times}
    stale = [name for name in times if (name, True) not in lasts or newest - lasts[name, True] > FRESH]
    return Traffic(span, times, sum(requests[name] for name in stale), sum(requests.values()), newest)


def _times(segment: str, buckets: Mapping[int, Mapping[bool, Any]], span: Span) -> Times:
    sums = {}
    for number, sides in buckets.items():
        treated, control = sides.get(False), sides.get(True)
        sums[number] = Hour(
            hour=span.first + number * span.step,
            segment=segment,
            requests=int(_of(treated, "requests")),
            output_tokens=int(_of(treated, "output_tokens")),
            seconds=float(_of(treated, "total_seconds")),
            control_requests=int(_of(control, "requests")),
            control_output_tokens=int(_of(control, "output_tokens")),
            control_seconds=float(_of(control, "total_seconds")),
            blocks=int(_of(treated, "blocks")),
            block_tokens=int(_of(treated, "block_tokens")),
        )
    return Times(span, sums)


def merged(traffic: Traffic) -> Times | None:
    """All segments together: sums first. Speed-up over them would compare unlike traffic, and is for one segment."""
    if traffic.span is None:
        return None
    parts: dict[int, list[Hour]] = {}
    for times in traffic.by_segment.values():
        for number, each in times.sums.items():
            parts.setdefault(number, []).append(each)
    return Times(traffic.span, {number: _sum(found) for number, found in parts.items()})


def load_actions(store: Store, filters: Filters, segment: str | None = None) -> ActionTimes:
    """Blocks by action and stretch; none where the filters ask for more than a time range."""
    span = span_of(store, filters, segment)
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
    with Slice(store, filters, segment).reading() as connection:
        for row in connection.execute(between(query, table.hour, filters)):
            label, number = action_label(row.source, row.block_length), int(row.bucket) - base
            counts = blocks.setdefault(label, {})
            counts[number] = counts.get(number, 0) + int(row.blocks)
            if label == NONE and row.seconds > 0:
                plain[number] = float(row.seconds) / int(row.blocks)
    return ActionTimes(span, blocks, plain)


def action_label(source: str, block_length: int) -> str:
    return Action(source, block_length).label if block_length else NONE


def gaps(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Runs of values with their places: a line is drawn within each, and none across a gap."""
    runs: list[list[tuple[int, float]]] = []
    there = [(place, value) for place, value in enumerate(values) if value is not None]
    for before, now in pairwise([(-2, 0.0), *there]):
        if now[0] - before[0] > 1:
            runs.append([])
        runs[-1].append(now)
    return runs


def _sum(parts: Sequence[Hour]) -> Hour:
    counts = ("requests", "output_tokens", "seconds", "control_requests", "control_output_tokens", "control_seconds")
    names = (*counts, "blocks", "block_tokens")
    return Hour(hour=parts[0].hour, segment="", **{name: sum(getattr(each, name) for each in parts) for name in names})


def _number(hour: Any, span: Span) -> Any:
    """Stretches since 1970, in SQL."""
    time, step = type_coerce(hour, BigInteger), span.step // _MICROSECOND
    return ((time - time % step) // step).label("bucket")


def _of(row: Any, name: str) -> Any:
    return 0 if row is None else getattr(row, name) or 0
