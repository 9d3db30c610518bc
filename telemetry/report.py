"""The report: what speculation did to each group of requests, measured against its control."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from itertools import zip_longest

import numpy as np

from autospec.errors import ConfigurationError
from autospec.telemetry.bootstrap import Sums, paired_interval, unpaired_interval
from autospec.telemetry.labels import visible
from autospec.telemetry.render_html import to_html
from autospec.telemetry.render_json import to_dict
from autospec.telemetry.render_text import to_text
from autospec.telemetry.rows import (
    FEWEST_REQUESTS,
    NO_OUTPUT_TOKENS,
    TOO_LITTLE_DATA,
    UNEQUAL_CONTROL,
    Prediction,
    Report,
    SegmentRow,
)
from autospec.types import Comparison, Deployment, PhaseSeconds, RequestRecord

__all__ = ["GROUP_KEYS", "Report", "SegmentRow", "build_report", "to_dict", "to_html", "to_text"]

GROUP_KEYS: Mapping[str, Callable[[RequestRecord], str]] = {
    "segment": lambda record: record.segment,
    "decoding": lambda record: "sampled" if record.do_sample else "greedy",
    "policy": lambda record: record.policy,
    "device": lambda record: record.deployment.device if record.deployment else UNKNOWN,
    "day": lambda record: f"{record.started_at.astimezone(UTC):%Y-%m-%d}",
    "source": lambda record: record.usual_source,
}

ONLY_TREATED = frozenset(["policy", "source"])
"""A control request belongs to every value of these."""

UNKNOWN = "unknown"
MOST_VALUES = 6
MEASURED_COLUMNS = 80

Pairs = Mapping[str, RequestRecord]  # request_id -> its control
Group = tuple[str, ...]


def build_report(
    requests: Iterable[RequestRecord],
    comparisons: Iterable[Comparison],
    *,
    group_by: Sequence[str] = ("segment",),
    resamples: int = 2_000,
    seed: int = 0,
) -> Report:
    """Summarises requests by group.

    Sums are formed first and divided last, over failed and slow requests too. When every request of a group was also
    decoded as a control (a comparison exists), the interval of the speed-up resamples prompts with both their sides;
    otherwise it resamples requests and control requests separately. A control belongs to every policy and draft source
    of its group.

    Args:
        requests: requests and control requests.
        comparisons: which request is to be compared with which control.
        group_by: any of `segment`, `decoding` (greedy or sampled), `policy`, `device`, `day` (UTC), `source` (the draft
            source of most blocks); none: everything in one row.
        resamples: bootstrap resamples for each interval.
        seed: seed of each interval; one report is always the same.

    Returns:
        One row per group, sorted by its keys, and one over everything.

    Raises:
        ConfigurationError: a key of `group_by` is unknown or repeated, or `resamples` is below 1.
    """
    unknown = [key for key in group_by if key not in GROUP_KEYS]
    if unknown or len(set(group_by)) < len(group_by):
        raise ConfigurationError(f"group_by={list(group_by)!r}: give each of {', '.join(GROUP_KEYS)} at most once")
    if resamples < 1:
        raise ConfigurationError(f"resamples={resamples!r} must be at least 1")

    records = {record.request_id: record for record in sorted(requests, key=lambda record: record.request_id)}
    ordered = sorted(comparisons, key=lambda item: (item.request_id, item.control_request_id))
    matched = [item for item in ordered if _is_matched(item, records)]
    pairs: dict[str, RequestRecord] = {}
    for item in matched:
        pairs.setdefault(item.request_id, records[item.control_request_id])
    by_request: dict[str, list[Comparison]] = defaultdict(list)
    for item in matched:
        by_request[item.request_id].append(item)

    def row(group: Mapping[str, str], treated: list[RequestRecord], controls: list[RequestRecord]) -> SegmentRow:
        compared = [item for record in treated for item in by_request[record.request_id]]
        return _row(group, treated, controls, pairs, compared, resamples, seed)

    rows = [
        row(dict(zip(group_by, group, strict=True)), treated, controls)
        for group, treated, controls in _groups(records.values(), group_by)
    ]
    total = row(
        {},
        [record for record in records.values() if not record.is_control],
        [record for record in records.values() if record.is_control],
    )
    if total.note is None and len(rows) > 1 and total.paired_requests < total.requests:
        total = replace(total, note=UNEQUAL_CONTROL, speed_up_low=None, speed_up_high=None, interval_method=None)
    return Report(
        group_by=tuple(group_by),
        segments=tuple(rows),
        all=total,
        resamples=resamples,
        seed=seed,
        measured=_measured(list(records.values())),
        unmatched_comparisons=len(ordered) - len(matched),
    )


def _measured(records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """What the requests have in common, or the few things each differs in."""

    def several(values: Iterable[str | None]) -> str:
        found = sorted({visible(value, MEASURED_COLUMNS) for value in values if value is not None})
        more = [f"and {len(found) - MOST_VALUES} more"] if len(found) > MOST_VALUES else []
        return ", ".join(found[:MOST_VALUES] + more) or "unknown"

    if not records:
        return ()
    places = _places(records)
    times = [record.started_at for record in records]
    labelled = any(record.run is not None for record in records)
    versions = several(f"{name} {number}" for place in places for name, number in place.versions.items())
    return (
        f"target: {several(f'{place.target} ({place.dtype})' for place in places)}; "
        f"drafts: {several(', '.join(place.drafts) or 'none' for place in places)}; "
        f"policy: {several(record.policy for record in records if not record.is_control)}",
        f"device: {several(place.device for place in places)}; {versions}",
        f"requests from {min(times):%Y-%m-%d %H:%M} to {max(times):%Y-%m-%d %H:%M} UTC; "
        f"run: {several(record.run for record in records if record.run is not None) if labelled else 'no label'}",
    )


def _is_matched(comparison: Comparison, records: Mapping[str, RequestRecord]) -> bool:
    control, treated = records.get(comparison.control_request_id), records.get(comparison.request_id)
    return control is not None and control.is_control and treated is not None and not treated.is_control


def _groups(
    records: Iterable[RequestRecord], group_by: Sequence[str]
) -> list[tuple[Group, list[RequestRecord], list[RequestRecord]]]:
    """Each group's requests and control requests. Controls are matched on every key but policy and source."""
    shared = [key for key in group_by if key not in ONLY_TREATED]
    treated: dict[Group, list[RequestRecord]] = defaultdict(list)
    controls: dict[Group, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.is_control:
            controls[tuple(GROUP_KEYS[key](record) for key in shared)].append(record)
        else:
            treated[tuple(GROUP_KEYS[key](record) for key in group_by)].append(record)

    def of_control(group: Group) -> Group:
        return tuple(value for key, value in zip(group_by, group, strict=True) if key not in ONLY_TREATED)

    groups = [(group, members, controls.get(of_control(group), [])) for group, members in treated.items()]
    covered = {of_control(group) for group in treated}
    alone: dict[Group, list[RequestRecord]] = defaultdict(list)
    for record in (record for group, members in controls.items() if group not in covered for record in members):
        alone[tuple(GROUP_KEYS[key](record) for key in group_by)].append(record)
    groups.extend((group, [], members) for group, members in alone.items())
    return sorted(groups, key=lambda item: item[0])


def _row(
    group: Mapping[str, str],
    treated: list[RequestRecord],
    controls: list[RequestRecord],
    pairs: Pairs,
    compared: list[Comparison],
    resamples: int,
    seed: int,
) -> SegmentRow:
    paired = [record for record in treated if record.request_id in pairs]
    is_paired = bool(treated) and len(paired) == len(treated)
    control_side = [pairs[record.request_id] for record in paired] if is_paired else controls
    control_requests = len({record.request_id for record in control_side})

    interval, method, note = None, None, None
    fewest = min(len(treated), control_requests)
    if fewest < 2:
        note = TOO_LITTLE_DATA
    elif min(*_seconds_and_tokens(treated).sum(axis=0), *_seconds_and_tokens(control_side).sum(axis=0)) <= 0:
        note = NO_OUTPUT_TOKENS
    elif fewest >= FEWEST_REQUESTS:
        how = f"{resamples} resamples, seed {seed}"
        if is_paired:
            sums = _by_prompt(treated, pairs)
            interval = paired_interval(*sums, resamples=resamples, seed=seed)
            method = f"paired bootstrap over {len(sums[0])} control requests, each with its requests, {how}"
        else:
            sums = _seconds_and_tokens(controls), _seconds_and_tokens(treated)
            interval = unpaired_interval(*sums, resamples=resamples, seed=seed)
            method = f"unpaired bootstrap over {len(treated)} requests and {len(controls)} control requests, {how}"
        if interval is None:
            note, method = NO_OUTPUT_TOKENS, None
    low, high = interval or (None, None)

    drafting = [record for record in treated if record.blocks > 0]
    is_sampled = {record.request_id: record.do_sample for record in treated}
    judged = [item for item in compared if item.is_identical is not None]
    greedy = [item for item in judged if not is_sampled[item.request_id]]
    sampled = [item for item in judged if is_sampled[item.request_id]]
    actions: Counter[str] = Counter()
    for record in treated:
        actions.update(record.actions)
    return SegmentRow(
        group=group,
        requests=len(treated),
        control_requests=control_requests,
        failed_requests=sum(record.error is not None for record in treated),
        fallback_requests=sum(record.fallback_reason is not None for record in treated),
        output_tokens=sum(record.output_tokens for record in treated),
        control_output_tokens=sum(record.output_tokens for record in control_side),
        seconds=_sum_seconds(treated),
        control_seconds=_sum_seconds(control_side),
        speed_up_low=low,
        speed_up_high=high,
        interval_method=method,
        note=note,
        paired_requests=len(paired),
        slower_requests=sum(_is_slower(record, pairs[record.request_id]) for record in paired),
        blocks=sum(record.blocks for record in drafting),
        block_tokens=sum(record.block_tokens for record in drafting),
        num_draft_tokens=sum(record.num_draft_tokens for record in treated),
        num_judged_tokens=sum(record.num_judged_tokens for record in treated),
        num_accepted_tokens=sum(record.num_accepted_tokens for record in treated),
        at_risk=_sum_positions(record.at_risk for record in treated),
        accepted=_sum_positions(_padded(record.accepted, len(record.at_risk)) for record in treated),
        actions=dict(sorted(actions.items())),
        greedy_compared=len(greedy),
        greedy_identical=sum(item.is_identical is True for item in greedy),
        greedy_ties=sum(item.is_identical is False and item.is_tie is True for item in greedy),
        greedy_different=sum(item.is_identical is False and item.is_tie is not True for item in greedy),
        sampled_compared=len(sampled),
        sampled_identical=sum(item.is_identical is True for item in sampled),
        prediction=_prediction(treated),
        peak_memory_bytes=max((record.peak_memory_bytes or 0 for record in treated), default=0) or None,
        model_bytes=max((place.model_bytes or 0 for place in _places(treated)), default=0) or None,
    )


def _prediction(treated: Sequence[RequestRecord]) -> Prediction:
    found = [
        (record.predicted_control_seconds, record.total_seconds)
        for record in treated
        if record.predicted_control_seconds is not None
    ]
    gains = [control - seconds for control, seconds in found]
    return Prediction(
        requests=len(found),
        control_seconds=sum(control for control, _ in found),
        seconds=sum(seconds for _, seconds in found),
        slower_requests=sum(gain < 0 for gain in gains),
        saved_seconds=sum(gain for gain in gains if gain > 0),
        lost_seconds=-sum(gain for gain in gains if gain < 0),
    )


def _places(records: Iterable[RequestRecord]) -> list[Deployment]:
    return [record.deployment for record in records if record.deployment is not None]


def _seconds_and_tokens(records: Sequence[RequestRecord]) -> Sums:
    """[records, 2]"""
    values = [(record.total_seconds, record.output_tokens) for record in records]
    return np.array(values, dtype=np.float64).reshape(-1, 2)


def _by_prompt(treated: Sequence[RequestRecord], pairs: Pairs) -> tuple[Sums, Sums]:
    """Sums of each prompt's controls and requests: [prompts, 2] twice. Requests that share a control share a prompt."""
    prompts: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in treated:
        prompts[pairs[record.request_id].request_id].append(record)
    members = prompts.values()
    control = [_seconds_and_tokens([pairs[record.request_id] for record in records]).sum(axis=0) for records in members]
    return np.stack(control), np.stack([_seconds_and_tokens(records).sum(axis=0) for records in members])


def _is_slower(record: RequestRecord, control: RequestRecord) -> bool:
    """Compares seconds per output token without dividing: a request without output tokens is slower than any with."""
    return record.total_seconds * control.output_tokens > control.total_seconds * record.output_tokens


def _sum_seconds(records: Sequence[RequestRecord]) -> PhaseSeconds:
    return PhaseSeconds(
        prefill=sum(record.seconds.prefill for record in records),
        draft=sum(record.seconds.draft for record in records),
        verify=sum(record.seconds.verify for record in records),
        correction=sum(record.seconds.correction for record in records),
        emission=sum(record.seconds.emission for record in records),
        other=sum(record.seconds.other for record in records),
    )


def _sum_positions(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def _padded(counts: Sequence[int], length: int) -> tuple[int, ...]:
    return (*counts[:length], *[0] * (length - len(counts)))
