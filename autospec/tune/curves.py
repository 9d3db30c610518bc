"""What each draft source brings by block length, as if one action were taken in every block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autospec.scores.scored import ScoredRequest
from autospec.scores.walk import Walked
from autospec.tune.candidates import OFF, Part
from autospec.tune.evaluation import Setting, walks
from autospec.tune.intervals import Interval, interval_of

ALL = ""
"""All traffic, among segments: a label is never empty."""


@dataclass(frozen=True, slots=True)
class Point:
    """One block length of one source."""

    block_length: int  # 0: off
    speed_up: Interval  # over plain decoding
    num_committed_tokens: int  # +1 of each block included
    blocks: int

    @property
    def mean_accepted(self) -> float:
        """Tokens committed by a block, +1 included."""
        return self.num_committed_tokens / self.blocks if self.blocks else 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """One source."""

    source: str
    points: Sequence[Point]  # by block length, ascending; the first is off, and 1 exactly

    @property
    def best(self) -> Point:
        """The fastest; off where no block length is above 1."""
        return max(self.points, key=lambda point: point.speed_up.ratio)


def curves(requests: Sequence[ScoredRequest], setting: Setting, block_lengths: Sequence[int]) -> dict[str, list[Curve]]:
    """Predicted speed-up of each source at each block length, for all traffic (`ALL`) and for each segment.

    Each action is walked once, along all requests. A source has no curve where it could not be timed, and in segments
    that it was not scored in.

    Args:
        requests: in order of arrival.
        setting: costs and luck.
        block_lengths: in any order; 0 is always there.
    """
    lengths = sorted({length for length in block_lengths if length > 0})
    groups: dict[str, list[int]] = {ALL: list(range(len(requests)))}
    for segment in sorted({request.segment for request in requests} - {ALL}):
        groups[segment] = [place for place, request in enumerate(requests) if request.segment == segment]
    found: dict[str, list[Curve]] = {segment: [] for segment in groups}
    for source in dict.fromkeys(source for request in requests for source in request.sources):
        if math.isinf(setting.costs.draft_seconds(source, 1, 1)):
            continue
        points = {
            segment: [_off([requests[place] for place in places])]
            for segment, places in groups.items()
            if any(source in requests[place].sources for place in places)
        }
        for length in lengths:
            walked = list(walks({"source": source, "block_length": length}, requests, setting))
            for segment, made in points.items():
                made.append(_point(length, [walked[place] for place in groups[segment]]))
        for segment, made in points.items():
            found[segment].append(Curve(source, made))
    return found


def best_fixed(curves: Mapping[str, Sequence[Curve]], setting: Setting) -> dict[str, Part]:
    """The fastest fixed action of each segment and of all traffic; plain decoding where none is above 1.

    Segments with too few requests for an interval have none, and sources that take too much memory are none.

    Args:
        curves: over the requests to choose by.
        setting: with the limit of memory.
    """
    found: dict[str, Part] = {}
    for segment, group in curves.items():
        if not all(point.speed_up.is_sure for curve in group for point in curve.points):
            continue
        usable = [curve for curve in group if setting.excess({curve.source}) <= 0.0]
        fastest = max(usable, key=lambda curve: curve.best.speed_up.ratio, default=None)
        if fastest is None or not fastest.best.block_length:
            found[segment] = dict(OFF)
        else:
            found[segment] = {"source": fastest.source, "block_length": fastest.best.block_length}
    return found


def _off(requests: Sequence[ScoredRequest]) -> Point:
    steps = sum(max(request.output_tokens - 1, 0) for request in requests)  # the first token is the prompt's
    return Point(0, Interval(1.0, 1.0, 1.0), steps, steps)


def _point(block_length: int, walked: Sequence[Walked]) -> Point:
    committed = sum(tokens * blocks for each in walked for tokens, blocks in each.acceptance_lengths.items())
    return Point(block_length, interval_of(walked), committed, sum(each.blocks for each in walked))
