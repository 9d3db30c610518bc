"""From timed samples to a curve: monotone in context, as measured in tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from autospec.costs.table import Curve

SMALL_FALL = 0.02
SMALL_FALL_SECONDS = 50e-6

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
        for number in tokens:
            if (context, number) not in samples:
                medians[context, number] = medians[first, number] + float(np.interp(number, anchors, added))
    return Curve(
        tuple(contexts),
        tuple(tokens),
        tuple(tuple(medians[context, number] for number in tokens) for context in contexts),
        frozenset((context, number) for context in contexts for number in tokens if (context, number) not in samples),
    )


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
