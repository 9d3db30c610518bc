"""How sure a speed-up is: the same requests under both, resampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.scores.walk import Walked

RESAMPLES = 2_000
CONFIDENCE = 0.95
LEAST_REQUESTS = 8
"""To resample: of fewer, an interval lies on one side of the truth much oftener than it says."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of sums of seconds, and where 95 % of resampled ones lie."""

    ratio: float
    low: float
    high: float
    requests: int | None = None  # that were resampled; None where nothing was

    @property
    def is_sure(self) -> bool:
        """Are there enough requests for the interval to say what it says? Of a few, resampling knows too little."""
        return self.requests is None or self.requests >= LEAST_REQUESTS


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
    return Interval(float(off / on), float(low), float(high), pairs.shape[1])


def interval_of(walked: Sequence[Walked]) -> Interval:
    """What walks came to over plain decoding; prefill, where known, counts on both sides."""
    return speed_up([each.whole_off_seconds for each in walked], [each.whole_seconds for each in walked])


def said(interval: Interval | None) -> str:
    """A speed-up with its interval, or with the number of requests where these are too few for one."""
    if interval is None:
        return "-"
    if not interval.is_sure:
        return f"{interval.ratio:.2f}x (of {interval.requests})"
    return f"{interval.ratio:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
