"""From what was tried to a policy for each segment, and what it is worth on requests that had no part in the search."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.registry import build_policy
from autospec.policies.tuned import FORMAT, VERSION, Tuned, make_tuned
from autospec.scores.scored import ScoredRequest
from autospec.scores.walk import Walked
from autospec.tune.candidates import OFF, Part, sources_in
from autospec.tune.evaluation import Setting, walk_policy, walks
from autospec.tune.intervals import LEAST_REQUESTS as LEAST_JUDGED
from autospec.tune.intervals import Interval, interval_of, said, speed_up
from autospec.tune.search import Tried
from autospec.tune.variants import draft_table

LEAST_REQUESTS = 8
"""A segment with fewer requests to choose by has no policy of its own."""

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

    @property
    def sources(self) -> frozenset[str]:
        """Draft sources that any of the policies uses."""
        return sources_in(self.default).union(*(sources_in(each.part) for each in self.segments))

    def contents(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Of a tuned policy's file. Args: made: how it came about, as plain values."""
        own = {
            each.segment: shipped(each.part)
            for each in self.segments
            if each.part != self.default and can_be_named(each.segment)
        }
        default = shipped(self.default)
        drafts = draft_table(set(self.sources))
        contents = {"format": FORMAT, "version": VERSION, "default": default, "segments": own, "drafts": drafts}
        return {**contents, "made": dict(made)}


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

    A segment has a candidate of its own where that was surely faster in training there than the one that was fastest
    over all, and faster held out; the others are merged, and have that one. A candidate holds where, on the held-out
    requests of the segment, the lower end of its speed-up's interval is above 1. The default, for segments that are
    not known or too small, is the candidate that was fastest over all, judged in the same way.

    Args:
        tried: the best over all first.
        train, held_out: as they were split, in order of arrival.
        setting: costs, luck and memory: draft sources of all segments together stay within its limit.
        least_requests: to choose by, for a policy of a segment's own.

    Raises:
        ConfigurationError: nothing was tried that may be used.
    """
    without: frozenset[str] = frozenset()
    while True:
        usable = [each for each in tried if not sources_in(each.part) & without]
        usable = [each for each in usable if setting.excess(sources_in(each.part)) <= 0.0]
        if not usable:
            raise ConfigurationError(
                "no policy was walked to the end that may be used: give more trials, a larger budget, or more memory"
            )
        choice = _choose(usable, train, held_out, setting, least_requests)
        used = choice.sources
        if setting.excess(used) <= 0.0:
            return choice
        without |= {max(used, key=lambda name: setting.memory.get(name, 0))}


def _choose(
    tried: Sequence[Tried],
    train: Sequence[ScoredRequest],
    held_out: Sequence[ScoredRequest],
    setting: Setting,
    least_requests: int,
) -> Choice:
    counts = _counts(train)
    late = {request.request_id for request in held_out}

    def held(part: Part, segments: Collection[str]) -> Sequence[Walked]:
        """As it will serve: a policy sees the segments that have it alone."""
        both = [each for each in (*train, *held_out) if each.segment in segments]
        return [each for each in walks(part, both, setting) if each.request.request_id in late]

    known_walks: dict[str, dict[str, Walked]] = {}

    def of_all(part: Part) -> Mapping[str, Walked]:
        """By request, along all of them, as it was tried."""
        key = json.dumps(part, sort_keys=True)
        if key not in known_walks:
            found = walks(part, [*train, *held_out], setting)
            known_walks[key] = {each.request.request_id: each for each in found}
        return known_walks[key]

    def gain(part: Part, over: Part, requests: Sequence[ScoredRequest]) -> Interval:
        ids = [request.request_id for request in requests]
        before, after = of_all(over), of_all(part)
        return speed_up([before[each].whole_seconds for each in ids], [after[each].whole_seconds for each in ids])

    best = tried[0].part
    default = best if _holds(interval_of([of_all(best)[request.request_id] for request in held_out])) else OFF
    parts: dict[str, tuple[Part, str]] = {}
    wanted: dict[str, tuple[Part, str]] = {}
    for segment in sorted({*counts, *_counts(held_out)}):
        if not can_be_named(segment):
            parts[segment] = default, "its name is no text that a file can hold: as all others"
        elif counts.get(segment, 0) < least_requests:
            parts[segment] = (
                default,
                f"{counts.get(segment, 0)} requests to choose by, {least_requests} are needed: as all others",
            )
        else:
            known = [each for each in tried if segment in each.seconds]
            fastest = min(known, key=lambda each: each.seconds[segment][0] / each.seconds[segment][1]).part
            here, others = ([each for each in part if each.segment == segment] for part in (train, held_out))
            wanted[segment] = best, "fastest over all, and nothing is surely faster here"
            if fastest == best or not others or (found := gain(fastest, best, here)).low <= 1.0:
                continue
            if gain(fastest, best, others).ratio > 1.0:  # the fastest of many is flattered by having been chosen
                why = f"fastest of {len(known)} here, {said(found)} over the fastest over all, and faster held out"
                wanted[segment] = fastest, why
            else:
                wanted[segment] = best, "fastest over all; what was surely faster here in training was not, held out"
    parts |= _judged(wanted, held, default)
    parts |= _losing(parts, default, [of_all(default)[request.request_id] for request in held_out])
    tuned = _tuned(default, {segment: part for segment, (part, _) in parts.items()}, setting)
    chosen_by = {request.request_id for request in train}
    final = list(walk_policy(tuned, [*train, *held_out], setting))
    first, last = (
        _by_segment([each for each in final if (each.request.request_id in chosen_by) == is_early])
        for is_early in (True, False)
    )
    return Choice(
        default,
        [
            SegmentChoice(
                segment,
                part,
                why,
                counts.get(segment, 0),
                len(last.get(segment, ())),
                interval_of(first[segment]) if segment in first else None,
                interval_of(last[segment]) if segment in last else None,
            )
            for segment, (part, why) in sorted(parts.items())
        ],
        interval_of([each for group in first.values() for each in group]),
        interval_of([each for group in last.values() for each in group]),
    )


def _judged(
    wanted: Mapping[str, tuple[Part, str]],
    held: Callable[[Part, Collection[str]], Sequence[Walked]],
    default: Part,
) -> dict[str, tuple[Part, str]]:
    """For each segment what was wanted, or plain decoding where it does not hold, and why.

    Segments with equal policies are merged: one policy learns from all of them. Where it does not hold in one of
    them, that one gets plain decoding, and the others are judged again without it. A segment with too few requests to
    judge by has what all others have, unless it is slower on these.
    """
    parts: dict[str, tuple[Part, str]] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    for segment, (part, _) in wanted.items():
        groups[json.dumps(part, sort_keys=True)].append(segment)
    for segments in groups.values():
        part = wanted[segments[0]][0]
        while segments:
            walked = _by_segment(held(part, segments))
            failed: dict[str, tuple[Part, str]] = {}
            for segment in segments:
                judged = walked.get(segment, [])
                found = interval_of(judged) if judged else None
                if found is None or (not found.is_sure and found.ratio > 1.0):
                    why = f"{len(judged)} held-out requests to judge by, {LEAST_JUDGED} are needed: as all others"
                    failed[segment] = default, why
                elif not _holds(found):
                    why = f"what was fastest in training is {said(found)} held out: not surely above 1"
                    failed[segment] = OFF, why
            parts |= failed
            if not failed:
                break
            segments = [segment for segment in segments if segment not in failed]
        for segment in segments:
            parts[segment] = wanted[segment]
    return parts


def _losing(
    parts: Mapping[str, tuple[Part, str]], default: Part, walked: Sequence[Walked]
) -> dict[str, tuple[Part, str]]:
    """Of the segments that have what all others have, those that lose with it held out: plain decoding."""
    found = {}
    for segment, group in _by_segment(walked).items():
        part, why = parts[segment]
        if part == default and part != OFF and can_be_named(segment) and (shown := interval_of(group)).ratio < 1.0:
            found[segment] = (
                OFF,
                f"{why.partition(':')[0]}, and slower with what all others have: {said(shown)} held out",
            )
    return found


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


def _holds(found: Interval) -> bool:
    return found.is_sure and found.low > 1.0
