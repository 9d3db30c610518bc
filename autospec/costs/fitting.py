"""From timed samples to a curve: monotone in context, as measured in tokens."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from autospec.costs.table import Curve

SMALL_FALL = 0.02
SMALL_FALL_SECONDS = 50e-6

MOMENT = 8
"""Timings in a row that are taken to be of one pace of the machine: a third of a second of a small model's forwards."""
SHORTEST_SECONDS = 2e-4
"""Shorter timings say nothing of the pace: a lookup varies by a third from one call to the next."""
SWEEPS = 8

Point = tuple[int, int]  # context, tokens
Samples = Mapping[Point, Sequence[float]]  # seconds of each repeat


def fit(samples: Samples) -> Curve:
    """The median of each point, made monotone in context for each number of tokens.

    Not every width is measured in every context. Those that were are its anchors; what a context adds to the first
    context's seconds is taken as linear between them, since the steps of a device come from the width alone (the
    matrices of all layers), and what grows with context is attention and the copy of the cache.

    Args:
        samples: of each (context, tokens); the first context has all numbers of tokens, every other one at least one.
    """
    contexts = sorted({context for context, _ in samples})
    tokens = sorted({number for _, number in samples})
    medians = {point: typical(found) for point, found in samples.items()}
    for number in tokens:
        column = [context for context in contexts if (context, number) in samples]
        weights = [len(samples[context, number]) for context in column]
        rising = monotone([medians[context, number] for context in column], weights)
        medians.update({(context, number): value for context, value in zip(column, rising, strict=True)})
    first = contexts[0]
    for context in contexts[1:]:
        anchors = [number for number in tokens if (context, number) in samples]
        added = [medians[context, number] - medians[first, number] for number in anchors]
        cheapest = min(medians[context, number] for number in anchors)
        for number in tokens:
            if (context, number) not in samples:
                composed = medians[first, number] + float(np.interp(number, anchors, added))
                # of what takes microseconds, chance alone may seem to fall by more than all of it
                medians[context, number] = max(composed, min(cheapest, medians[first, number]))
    return Curve(
        tuple(contexts),
        tuple(tokens),
        tuple(tuple(medians[context, number] for number in tokens) for context in contexts),
        frozenset((context, number) for context in contexts for number in tokens if (context, number) not in samples),
    )


def steadied(timings: Sequence[tuple[Hashable, float]]) -> list[float]:
    """Timings as they would be at the machine's usual pace.

    A neighbour on the machine slows all that is timed meanwhile, and a point that is timed in that moment alone would
    be taken for a slow one. So each timing is taken for the product of what its point takes and of the moment's pace,
    and both are found by taking medians in turn; the usual pace is 1.

    Args:
        timings: of each, which point and its seconds, in the order in which they were made.

    Source: median polish, Tukey 1977.
    """
    used = [(index // MOMENT, point, math.log(s)) for index, (point, s) in enumerate(timings) if s >= SHORTEST_SECONDS]
    seen = defaultdict(set)
    for moment, point, _ in used:
        seen[point].add(moment)
    used = [each for each in used if len(seen[each[1]]) > 1]  # others know no pace but the one
    if not used:
        return [seconds for _, seconds in timings]
    pace = dict.fromkeys((moment for moment, _, _ in used), 0.0)
    for _ in range(SWEEPS):
        of_point = _medians((point, value - pace[moment]) for moment, point, value in used)
        pace = _medians((moment, value - of_point[point]) for moment, point, value in used)
        usual = statistics.median(pace.values())
        pace = {moment: value - usual for moment, value in pace.items()}
    return [
        seconds * math.exp(-pace.get(index // MOMENT, 0.0)) if seconds >= SHORTEST_SECONDS else seconds
        for index, (_, seconds) in enumerate(timings)
    ]


def _medians(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    groups: defaultdict[Any, list[float]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: statistics.median(values) for key, values in groups.items()}


def typical(seconds: Sequence[float]) -> float:
    """The median, of two the lower one: disturbances and first calls are slow, never fast."""
    return statistics.median_low(seconds)


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence (weighted least squares) that nowhere falls; falls that decide nothing are left."""
    if all(high >= low - max(SMALL_FALL * low, SMALL_FALL_SECONDS) for low, high in pairwise(values)):
        return list(values)
    from sklearn.isotonic import IsotonicRegression  # heavy: takes a second to load, a quarter of a calibration

    fitted = IsotonicRegression().fit_transform(np.arange(len(values)), np.asarray(values), sample_weight=weights)
    return [float(value) for value in fitted]


def spread(samples: Samples) -> float:
    """How far repeats lie from what stands for their point, as a share of it: the median over all other repeats.

    1 where nothing was repeated: nothing is known then.
    """
    distances = []
    for found in samples.values():
        middle = typical(found)
        distances += sorted(abs(seconds / middle - 1.0) for seconds in found)[1:]  # the first is the middle itself
    return statistics.median(distances) if distances else 1.0
