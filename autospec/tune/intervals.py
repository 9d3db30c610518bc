"""How sure a speed-up is: the same requests under both, resampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.scores.walk import Walked

RESAMPLES = 2_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of sums of seconds, and where 95 % of resampled ones lie."""

    ratio: float
    low: float
    high: float


def speed_up(off_seconds: Sequence[float], seconds: Sequence[float], *, seed: int = 0) -> Interval:
    """Paired bootstrap over requests.

    Args:
        off_seconds: [n], of each request decoded plainly.
        seconds: [n], of the same ones under the policy.
        seed: of the resampling.
    """
    pairs = np.array([off_seconds, seconds], dtype=float)
    picks = np.random.default_rng(seed).integers(0, pairs.shape[1], (RESAMPLES, pairs.shape[1]))
    sums = pairs[:, picks].sum(axis=2)
    low, high = np.quantile(sums[0] / sums[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    off, on = pairs.sum(axis=1)
    return Interval(float(off / on), float(low), float(high))


def interval_of(walked: Sequence[Walked]) -> Interval:
    """What walks came to over plain decoding; prefill, where known, counts on both sides."""
    prefill = [each.request.prefill_seconds or 0.0 for each in walked]
    off = [each.off_seconds + more for each, more in zip(walked, prefill, strict=True)]
    on = [each.seconds + more for each, more in zip(walked, prefill, strict=True)]
    return speed_up(off, on)
