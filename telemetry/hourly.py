"""The report from sums by the hour: as fast over a billion requests as over a thousand, and it outlives the requests.

What it cannot say is said by leaving it out: pairs of a request and its own control are not known here, nor is
acceptance by position for a policy, a device or a way to decode.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, Row, Select, func, select, type_coerce

from autospec.errors import ConfigurationError
from autospec.telemetry.bootstrap import normal_interval
from autospec.telemetry.labels import visible
from autospec.telemetry.rollups import hour_of
from autospec.telemetry.rows import (
    FEWEST_SUMMED,
    NO_OUTPUT_TOKENS,
    TOO_LITTLE_DATA,
    UNEQUAL_CONTROL,
    Prediction,
    Report,
    SegmentRow,
)
from autospec.telemetry.schema import EPOCH, DeploymentRow, HourlyActions, HourlyPositions, HourlyRequests
from autospec.telemetry.store import Store
from autospec.types import NONE, Action, PhaseSeconds

KEYS = ("segment", "decoding", "policy", "device", "day")
OF_BLOCKS = frozenset(["segment", "day"])
"""Keys by which blocks are summed, too."""

PHASES = ("prefill", "draft", "verify", "correction", "emission", "other")
_NUMBERS = [
    column.name
    for column in HourlyRequests.__table__.columns
    if not column.primary_key and column.name not in ("most_memory_bytes", "prompt_tokens")
]
_DAY = timedelta(days=1) // timedelta(microseconds=1)

Group = tuple[str, ...]
Narrow = Callable[[Select[Any], type[Any]], Select[Any]]
"""Restricts a query over one of the tables of sums."""

Sums = dict[str, Any]


def build_hourly_report(
    store: Store,
    *,
    group_by: Sequence[str] = ("segment",),
    since: datetime | None = None,
    until: datetime | None = None,
    narrow: Narrow | None = None,
    resamples: int = 2_000,
    seed: int = 0,
) -> Report:
    """The report over all requests that started in the hours between two times.

    Args:
        store: the database.
        group_by: any of `segment`, `decoding`, `policy`, `device`, `day`.
        since: from this full hour on; an aware datetime.
        until: before this full hour; an aware datetime.
        narrow: leaves only a part of the sums to be read.
        resamples: bootstrap resamples for each interval.
        seed: seed of each interval.

    Raises:
        ConfigurationError: a key is unknown or repeated, or a time has no time zone or is no full hour.
        StoreError: the database cannot be read.
    """
    if unknown := [key for key in group_by if key not in KEYS]:
        raise ConfigurationError(f"{', '.join(unknown)}: sums by the hour are kept by {', '.join(KEYS)}")
    if len(set(group_by)) < len(group_by):
        raise ConfigurationError(f"group_by={list(group_by)!r}: give each key at most once")
    for name, time in (("since", since), ("until", until)):
        if time is not None and time.tzinfo is None:
            raise ConfigurationError(f"{name}={time!r} has no time zone: give an aware datetime")
        if not is_full_hour(time):
            raise ConfigurationError(f"{name}={time:%Y-%m-%d %H:%M:%S}: sums by the hour know full hours alone")
    blocks = _Blocks(group_by)
    narrow = narrow or _everything
    queries = [
        select(DeploymentRow.__table__),
        narrow(_sums(group_by, since, until), HourlyRequests),
        narrow(blocks.query(HourlyActions, ["blocks"], since, until), HourlyActions),
        narrow(blocks.query(HourlyPositions, ["at_risk", "accepted"], since, until), HourlyPositions),
    ]
    with ThreadPoolExecutor(len(queries)) as threads:  # each scans a table; databases do that side by side
        deployments, found, actions, positions = threads.map(partial(_fetch, store), queries)
    places = {row.id: row for row in deployments}
    blocks.add(actions, positions)
    treated: dict[Group, Sums] = defaultdict(_nothing)
    controls: dict[Group, Sums] = defaultdict(_nothing)
    for row in found:
        side = controls if row.is_control else treated
        keys = [key for key in group_by if key != "policy"] if row.is_control else group_by
        _add(side[tuple(_value(row, key, places) for key in keys)], row, places)

    def of_control(group: Group) -> Group:
        return tuple(value for key, value in zip(group_by, group, strict=True) if key != "policy")

    groups: dict[Group, tuple[Sums, Sums]] = {
        group: (sums, controls.get(of_control(group), _nothing())) for group, sums in treated.items()
    }
    covered = {of_control(group) for group in treated}
    for group, sums in controls.items():
        if group not in covered:
            rest = iter(group)
            groups[tuple("off" if key == "policy" else next(rest) for key in group_by)] = (_nothing(), sums)
    rows = [
        _row(dict(zip(group_by, group, strict=True)), *groups[group], blocks.of(group), resamples, seed)
        for group in sorted(groups)
    ]
    everything = _total(treated.values()), _total(controls.values())
    total = _row({}, *everything, blocks.all, resamples, seed, is_mixed=len(rows) > 1)
    return Report(
        group_by=tuple(group_by),
        segments=tuple(rows),
        all=total,
        resamples=resamples,
        seed=seed,
        measured=_measured(found, places),
        basis="hours",
    )


def is_full_hour(time: datetime | None) -> bool:
    """Whether sums by the hour can begin or end there; None: no bound."""
    return time is None or hour_of(time.astimezone(UTC)) == time


def num_requests(
    store: Store,
    since: datetime | None = None,
    until: datetime | None = None,
    narrow: Narrow | None = None,
    enough: int | None = None,
) -> int:
    """How many requests are summed, those under control and pruned ones included.

    Args:
        store: the database.
        since: from this full hour on.
        until: before this full hour.
        narrow: as for `build_hourly_report`.
        enough: beyond so many the count may be too low. It is then quick, however many there are.
    """
    query = _between(select(HourlyRequests.requests), HourlyRequests.hour, since, until)
    query = (narrow or _everything)(query, HourlyRequests)
    if enough is not None:
        query = query.limit(enough + 1)  # each row counts one request at least
    with store.reading() as connection:
        return int(connection.scalar(select(func.sum(query.subquery().c.requests))) or 0)


def _everything(query: Select[Any], table: type[Any]) -> Select[Any]:
    return query


def _between(query: Select[Any], hour: Any, since: datetime | None, until: datetime | None) -> Select[Any]:
    if since is not None:
        query = query.where(hour >= since)
    return query if until is None else query.where(hour < until)


def _sums(group_by: Sequence[str], since: datetime | None, until: datetime | None) -> Select[Any]:
    table = HourlyRequests
    keys: list[Any] = [table.segment] if "segment" in group_by else []
    keys += [table.policy, table.deployment_id, table.is_control]
    if "decoding" in group_by:
        keys.append(table.do_sample)
    if "day" in group_by:
        keys.append(_days(table.hour))
    query = select(
        *keys,
        *(func.sum(getattr(table, name)).label(name) for name in _NUMBERS),
        func.max(table.most_memory_bytes).label("most_memory_bytes"),
        func.min(table.hour).label("first"),
        func.max(table.hour).label("last"),
    )
    return _between(query, table.hour, since, until).group_by(*keys)


def _days(hour: Any) -> Any:
    """Whole days since 1970, in SQL."""
    number = type_coerce(hour, BigInteger)
    return ((number - number % _DAY) / _DAY).label("day")


def _value(row: Row[Any], key: str, places: Mapping[int, Any]) -> str:
    match key:
        case "decoding":
            return "sampled" if row.do_sample else "greedy"
        case "device":
            return places[row.deployment_id].device if row.deployment_id in places else "unknown"
        case "day":
            return _day_name(row.day)
    return str(getattr(row, key))


def _day_name(day: Any) -> str:
    return f"{EPOCH + timedelta(days=int(day)):%Y-%m-%d}"


def _nothing() -> Sums:
    return {**dict.fromkeys(_NUMBERS, 0), "most_memory_bytes": 0, "model_bytes": 0}


def _add(sums: Sums, row: Row[Any], places: Mapping[int, Any]) -> None:
    for name in _NUMBERS:
        value = getattr(row, name)
        sums[name] += value if isinstance(value, float) else int(value)  # PostgreSQL sums whole numbers as decimals
    sums["most_memory_bytes"] = max(sums["most_memory_bytes"], row.most_memory_bytes)
    place = places.get(row.deployment_id)
    sums["model_bytes"] = max(sums["model_bytes"], (place.model_bytes or 0) if place is not None else 0)


def _total(parts: Any) -> Sums:
    total = _nothing()
    for part in parts:
        for name, value in part.items():
            total[name] = (
                max(total[name], value) if name in ("most_memory_bytes", "model_bytes") else total[name] + value
            )
    return total


class _Blocks:
    """Actions and draft positions by group, where the groups allow it."""

    def __init__(self, group_by: Sequence[str]) -> None:
        self._is_known = set(group_by) <= OF_BLOCKS
        self._group_by = group_by
        self._actions: dict[Group, Counter[str]] = defaultdict(Counter)
        self._positions: dict[Group, dict[int, list[int]]] = defaultdict(dict)
        self.all: tuple[Counter[str], dict[int, list[int]]] = (Counter(), {})

    def query(self, table: Any, numbers: Sequence[str], since: datetime | None, until: datetime | None) -> Select[Any]:
        """Sums over the hours of actions or of positions."""
        keys = [table.segment, table.source, table.block_length]  # as they lie
        keys += [table.position] if table is HourlyPositions else []
        keys += [_days(table.hour)] if self._is_known and "day" in self._group_by else []
        query = select(*keys, *(func.sum(getattr(table, name)).label(name) for name in numbers))
        return _between(query, table.hour, since, until).group_by(*keys)

    def add(self, actions: Sequence[Row[Any]], positions: Sequence[Row[Any]]) -> None:
        """What the queries found."""
        for row in actions:
            label = Action(row.source, row.block_length).label if row.block_length else NONE
            for counter in (self._actions[self._group(row)], self.all[0]):
                counter[label] += int(row.blocks)
        for row in positions:
            for found in (self._positions[self._group(row)], self.all[1]):
                counts = found.setdefault(row.position, [0, 0])
                counts[0] += int(row.at_risk)
                counts[1] += int(row.accepted)

    def of(self, group: Group) -> tuple[Counter[str], dict[int, list[int]]]:
        if not self._is_known:
            return Counter(), {}
        return self._actions[group], self._positions[group]

    def _group(self, row: Row[Any]) -> Group:
        if not self._is_known:
            return ()
        return tuple(_day_name(row.day) if key == "day" else row.segment for key in self._group_by)


def _fetch(store: Store, query: Select[Any]) -> Sequence[Row[Any]]:
    with store.reading() as connection:
        return connection.execute(query).all()


def _row(
    group: Mapping[str, str],
    treated: Sums,
    control: Sums,
    blocks: tuple[Counter[str], dict[int, list[int]]],
    resamples: int,
    seed: int,
    *,
    is_mixed: bool = False,
) -> SegmentRow:
    interval, method, note = None, None, None
    if is_mixed:
        note = UNEQUAL_CONTROL
    elif min(treated["requests"], control["requests"]) < FEWEST_SUMMED:
        note = TOO_LITTLE_DATA
    else:
        interval = normal_interval(_moments(control), _moments(treated), resamples=resamples, seed=seed)
        method = (
            f"parametric bootstrap (normal means of seconds and tokens) over {treated['requests']} requests and "
            f"{control['requests']} control requests, {resamples} resamples, seed {seed}"
        )
        if interval is None:
            note, method = NO_OUTPUT_TOKENS, None
    low, high = interval or (None, None)
    actions, positions = blocks
    length = max(positions, default=0)
    at_risk, accepted = ([positions.get(j, (0, 0))[side] for j in range(1, length + 1)] for side in (0, 1))
    return SegmentRow(
        group=group,
        requests=treated["requests"],
        control_requests=control["requests"],
        failed_requests=treated["failed"],
        fallback_requests=treated["fallbacks"],
        output_tokens=int(treated["output_tokens"]),
        control_output_tokens=int(control["output_tokens"]),
        seconds=_seconds(treated),
        control_seconds=_seconds(control),
        speed_up_low=low,
        speed_up_high=high,
        interval_method=method,
        note=note,
        paired_requests=0,
        slower_requests=0,
        blocks=int(treated["blocks"]),
        block_tokens=int(treated["block_tokens"]),
        num_draft_tokens=int(treated["num_draft_tokens"]),
        num_judged_tokens=int(treated["num_judged_tokens"]),
        num_accepted_tokens=int(treated["num_accepted_tokens"]),
        at_risk=tuple(at_risk),
        accepted=tuple(accepted),
        actions=dict(sorted(actions.items())),
        greedy_compared=0,
        greedy_identical=0,
        greedy_ties=0,
        greedy_different=0,
        sampled_compared=0,
        sampled_identical=0,
        prediction=Prediction(
            requests=treated["predicted"],
            control_seconds=treated["predicted_control_seconds"],
            seconds=treated["predicted_seconds"],
            slower_requests=treated["predicted_slower"],
            saved_seconds=treated["saved_seconds"],
            lost_seconds=treated["lost_seconds"],
        ),
        peak_memory_bytes=treated["most_memory_bytes"] or None,
        model_bytes=treated["model_bytes"] or None,
    )


def _seconds(sums: Sums) -> PhaseSeconds:
    return PhaseSeconds(**{phase: sums[f"{phase}_seconds"] for phase in PHASES})


def _moments(sums: Sums) -> tuple[int, Any, Any]:
    """Requests, means of seconds and tokens, and their covariance."""
    count = sums["requests"]
    mean = np.array([sums["total_seconds"], sums["output_tokens"]]) / count
    products = np.array(
        [
            [sums["squared_seconds"], sums["seconds_times_tokens"]],
            [sums["seconds_times_tokens"], sums["squared_tokens"]],
        ]
    )
    return count, mean, (products / count - np.outer(mean, mean)) * count / max(1, count - 1)


def _measured(found: Sequence[Row[Any]], places: Mapping[int, Any]) -> tuple[str, ...]:
    if not found:
        return ()
    used = [places[number] for number in sorted({row.deployment_id for row in found}) if number in places]

    def several(values: Sequence[str]) -> str:
        names = sorted({visible(value, 80) for value in values})
        return ", ".join(names[:6] + ([f"and {len(names) - 6} more"] if len(names) > 6 else [])) or "unknown"

    first, last = min(row.first for row in found), max(row.last for row in found)
    return (
        f"target: {several([f'{place.target} ({place.dtype})' for place in used])}; "
        f"policy: {several([row.policy for row in found if not row.is_control])}",
        f"device: {several([place.device for place in used])}",
        f"sums by the hour, {_time(first)} to {_time(last)} UTC",
    )


def _time(value: Any) -> str:
    time = value if isinstance(value, datetime) else EPOCH + timedelta(microseconds=int(value))
    return f"{time:%Y-%m-%d %H:%M}"
