"""What steps cost by the tokens that they verify: from what was seen to what the store keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from autospec.observations import TARGET
from autospec.types import CalibrationSample, Deployment

LEAST_STEPS = 5
"""Steps of a width before it is believed."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Steps over so many tokens, of all requests together."""

    tokens: int
    seconds: float  # the median
    num_steps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What an engine's steps cost."""

    deployment: Deployment
    points: tuple[StepPoint, ...]  # by tokens, ascending

    def samples(self, measured_at: datetime) -> list[CalibrationSample]:
        """For the store, where exports and proposers look for them."""
        return [
            CalibrationSample(self.deployment, measured_at, TARGET, point.tokens, 0, point.seconds)
            for point in self.points
        ]


def points_of(steps: Iterable[tuple[int, float]]) -> tuple[StepPoint, ...]:
    """The widths that were seen often enough, ascending. Args: steps: tokens and seconds of each."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for tokens, each in steps:
        seconds[tokens].append(each)
    return tuple(
        StepPoint(tokens, median(found), len(found))
        for tokens, found in sorted(seconds.items())
        if len(found) >= LEAST_STEPS
    )


def sizes_up_to(most: int) -> Sequence[int]:
    """Numbers of requests to measure with: powers of two, and the most."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
