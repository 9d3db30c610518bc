"""From what was tried to a policy for each segment, and what it is worth on requests that had no part in the search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.registry import build_policy
from autospec.policies.tuned import FORMAT, VERSION, Tuned, make_tuned
from autospec.scores.scored import ScoredRequest
from autospec.scores.walk import Walked
from autospec.tune.candidates import OFF, Part
from autospec.tune.evaluation import Setting, walk_policy, walks
from autospec.tune.intervals import Interval, speed_up
from autospec.tune.search import Tried

LEAST_REQUESTS = 8
"""A segment with fewer requests to choose by has no policy of its own."""
LEAST_JUDGED = 3
"""Held-out requests of a segment; resampling fewer says nothing."""


CONTROL_SHARE = 0.02
"""Of the requests, in service: without them a speed-up cannot be measured."""


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """What a segment got, and why."""

    segment: str
    part: Part
    why: str
    train_requests: int
    held_out_requests: int
    train: Interval | None  # speed-up over plain decoding, where it was chosen
    held_out: Interval | None  # and where it was not; None where there was nothing to judge by


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy for all traffic."""

    default: Part
    segments: Sequence[SegmentChoice]
    train: Interval
    held_out: Interval

    def contents(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Of a tuned policy's file. Args: made: how it came about, as plain values."""
        own = {
            each.segment: shipped(each.part)
            for each in self.segments
            if each.part != self.default and can_be_named(each.segment)
        }
        default = shipped(self.default)
        return {"format": FORMAT, "version": VERSION, "default": default, "segments": own, "made": dict(made)}


def can_be_named(segment: str) -> bool:
    """Can a file hold the segment's name? Half a surrogate pair, it cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in segment)


def shipped(part: Part) -> dict[str, Any]:
    """A candidate as it is to serve: with controls, which walks do without."""
    if part.get("policy") != "guard":
        return dict(part)
    return {**part, "settings": {**part["settings"], "control_share": CONTROL_SHARE}}


def choose(
    tried: Sequence[Tried],
    train: Sequence[ScoredRequest],
    held_out: Sequence[ScoredRequest],
    setting: Setting,
    *,
    least_requests: int = LEAST_REQUESTS,
) -> Choice:
    """For each segment the candidate that was fastest in training, and plain decoding where it does not hold.

    A candidate holds where, on the held-out requests of the segment, the lower end of its speed-up's interval is above
    1. The default, for segments that are not known or too small, is the candidate that was fastest over all, judged in
    the same way.

    Args:
        tried: the best over all first.
        train, held_out: as they were split, in order of arrival.
        setting: costs and luck.
        least_requests: to choose by, for a policy of a segment's own.

    Raises:
        ConfigurationError: nothing was tried.
    """
    counts = _counts(train)
    late = {request.request_id for request in held_out}

    def held(part: Part, segment: str | None = None) -> Sequence[Walked]:
        """As it will serve: a segment's own policy sees that segment alone."""
        both = [each for each in (*train, *held_out) if segment is None or each.segment == segment]
        return [each for each in walks(part, both, setting) if each.request.request_id in late]

    if not tried:
        raise ConfigurationError("no policy was walked to the end: give more trials, or a larger budget")
    best = tried[0].part
    default = best if _interval(held(best)).low > 1.0 else OFF
    choices = []
    for segment in sorted({*counts, *_counts(held_out)}):
        if not can_be_named(segment):
            choices.append((segment, default, "its name is no text that a file can hold: as all others"))
            continue
        if counts.get(segment, 0) < least_requests:
            why = f"{counts.get(segment, 0)} requests to choose by, {least_requests} are needed: as all others"
            choices.append((segment, default, why))
            continue
        known = [each for each in tried if segment in each.seconds]
        fastest = min(known, key=lambda each: each.seconds[segment][0] / each.seconds[segment][1])
        walked = held(fastest.part, segment)
        if len(walked) < LEAST_JUDGED:
            choices.append((segment, OFF, f"{len(walked)} held-out requests to judge by, {LEAST_JUDGED} are needed"))
            continue
        found = _interval(walked)
        if found.low > 1.0:
            choices.append((segment, fastest.part, f"fastest of {len(known)} in training"))
        else:
            choices.append((segment, OFF, f"the fastest in training is {_said(found)} held out: not surely above 1"))
    tuned = _tuned(default, {segment: part for segment, part, _ in choices}, setting)
    early = {request.request_id for request in train}
    final = list(walk_policy(tuned, [*train, *held_out], setting))
    parts = (
        _by_segment([each for each in final if each.request.request_id in early]),
        _by_segment([each for each in final if each.request.request_id not in early]),
    )
    return Choice(
        default,
        [
            SegmentChoice(
                segment,
                part,
                why,
                counts.get(segment, 0),
                len(parts[1].get(segment, ())),
                _interval(parts[0][segment]) if segment in parts[0] else None,
                _interval(parts[1][segment]) if segment in parts[1] else None,
            )
            for segment, part, why in choices
        ],
        _interval([each for group in parts[0].values() for each in group]),
        _interval([each for group in parts[1].values() for each in group]),
    )


def _tuned(default: Part, segments: Mapping[str, Part], setting: Setting) -> Tuned:
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "default": dict(default),
        "segments": {name: dict(part) for name, part in segments.items()},
    }
    return make_tuned(contents, lambda name, settings: build_policy(name, settings, lambda: setting.costs))


def _counts(requests: Sequence[ScoredRequest]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for request in requests:
        counts[request.segment] += 1
    return dict(counts)


def _by_segment(walked: Sequence[Walked]) -> dict[str, list[Walked]]:
    groups: dict[str, list[Walked]] = defaultdict(list)
    for each in walked:
        groups[each.request.segment].append(each)
    return dict(groups)


def _interval(walked: Sequence[Walked]) -> Interval:
    prefill = [each.request.prefill_seconds or 0.0 for each in walked]
    off = [each.off_seconds + more for each, more in zip(walked, prefill, strict=True)]
    on = [each.seconds + more for each, more in zip(walked, prefill, strict=True)]
    return speed_up(off, on)


def _said(found: Interval) -> str:
    return f"{found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f})"
