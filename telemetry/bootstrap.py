"""Percentile bootstrap intervals of the speed-up. Pure functions of arrays and a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]

LOW, HIGH = 2.5, 97.5
CHUNK = 1_000_000  # numbers held at a time


def paired_interval(
    control: Sums,  # [prompts, 2], seconds and output tokens of the control of each prompt
    treated: Sums,  # [prompts, 2], the same of the requests compared with it
    *,
    resamples: int,
    seed: int,
) -> tuple[float, float] | None:
    """The 95 % interval of the speed-up when prompts are resampled, each with both of its sides.

    Returns:
        Low and high end, or None if hardly any resample has a speed-up (no output tokens).
    """
    sums = _resampled_sums(np.hstack([control, treated]), resamples, np.random.default_rng(seed))
    return _percentiles(sums[:, :2], sums[:, 2:])


def unpaired_interval(
    control: Sums,  # [control requests, 2], seconds and output tokens
    treated: Sums,  # [requests, 2]
    *,
    resamples: int,
    seed: int,
) -> tuple[float, float] | None:
    """The 95 % interval of the speed-up when each side is resampled on its own.

    Returns:
        Low and high end, or None if hardly any resample has a speed-up (no output tokens).
    """
    generator = np.random.default_rng(seed)
    control_sums = _resampled_sums(control, resamples, generator)
    return _percentiles(control_sums, _resampled_sums(treated, resamples, generator))


def normal_interval(
    control: tuple[int, Sums, Sums],  # requests, means of seconds and output tokens [2], their covariance [2, 2]
    treated: tuple[int, Sums, Sums],
    *,
    resamples: int,
    seed: int,
) -> tuple[float, float] | None:
    """The 95 % interval of the speed-up when the means of both sides are drawn from their normal approximation.

    For many requests the bootstrap's means are normal anyway; this needs their first and second moments alone.

    Returns:
        Low and high end, or None if hardly any resample has a speed-up (no output tokens).
    """
    generator = np.random.default_rng(seed)
    sides = []
    for count, mean, covariance in (control, treated):
        values, vectors = np.linalg.eigh(covariance)
        spread = vectors * np.sqrt(np.maximum(values, 0.0) / count)
        sides.append(mean + generator.standard_normal((resamples, 2)) @ spread.T)
    return _percentiles(*sides)


def _resampled_sums(values: Sums, resamples: int, generator: np.random.Generator) -> Sums:
    """Column sums of `resamples` draws with replacement: [resamples, columns]."""
    count = len(values)
    rows = max(1, CHUNK // count)
    parts = []
    for start in range(0, resamples, rows):
        drawn = generator.integers(count, size=(min(rows, resamples - start), count))
        parts.append(np.stack([column[drawn].sum(axis=1) for column in values.T], axis=1))
    return np.concatenate(parts)


def _percentiles(control: Sums, treated: Sums) -> tuple[float, float] | None:
    defined = (control[:, 1] > 0) & (treated[:, 0] > 0)
    if defined.mean() < 0.5:
        return None
    control, treated = control[defined], treated[defined]
    speed_ups = control[:, 0] / control[:, 1] * treated[:, 1] / treated[:, 0]
    low, high = np.percentile(speed_ups, [LOW, HIGH])
    return float(low), float(high)
