"""How far what is measured in service lies from what calibration promised: a factor for all widths and one for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

WINDOW = 64
"""Last measurements of all widths together, from which the common factor follows."""
WIDTH_WINDOW = 32
"""The same of one width."""
LEAST = 5
"""Fewer measurements say nothing: the first ones may hold allocations."""
CALIBRATION_WEIGHT = 4.0
"""Measurements that calibration counts for, however much was seen since."""
WIDTH_WEIGHT = 8.0
"""Measurements that the common factor counts for at each width."""
STALE_AFTER = 256
"""After so many measurements at other widths, what was learnt at one has lost two thirds of its weight."""
LEAST_CHANGE = 0.005
"""Factors that would move by a smaller share stay as they are."""


class Correction:
    """Ratios measured / calibrated of verification, or of one draft source.

    A width's own factor is drawn to the common one, and the common one to 1, by a fixed weight. So a policy that always
    uses one width moves all widths alike: the shape of the curve stays calibration's until other widths are seen again.
    A width not seen for long follows the others. Means are of values winsorised at both ends (an eighth each), so that
    a stalled block weighs as much as the slowest of the usual ones, while draft sources whose blocks differ (a blend)
    keep their mean.
    """

    def __init__(self) -> None:
        self._all: deque[float] = deque(maxlen=WINDOW)
        self._by_width: dict[int, deque[float]] = {}
        self._last_seen: dict[int, int] = {}
        self._num_seen = 0
        self._common = 1.0
        self._factors: dict[int, float] = {}

    @property
    def num_seen(self) -> int:
        """Measurements so far."""
        return self._num_seen

    def add(self, width: int, ratio: float) -> None:
        """One measurement. Args: ratio: measured seconds over calibrated ones, positive."""
        self._num_seen += 1
        self._all.append(ratio)
        self._by_width.setdefault(width, deque(maxlen=WIDTH_WINDOW)).append(ratio)
        self._last_seen[width] = self._num_seen

    def factor(self, width: int) -> float:
        """What calibrated seconds are to be multiplied by, as of the last `settle`."""
        return self._factors.get(width, self._common)

    @property
    def common(self) -> float:
        """The factor of widths that were not seen."""
        return self._common

    def settle(self) -> bool:
        """Take in what was added, if it moves a factor by more than `LEAST_CHANGE`. Returns: did it?"""
        common = _towards(1.0, CALIBRATION_WEIGHT, self._all)
        factors = {
            width: _towards(common, WIDTH_WEIGHT * self._age(width), ratios)
            for width, ratios in self._by_width.items()
            if len(ratios) >= LEAST
        }
        moves = [abs(factor / self.factor(width) - 1.0) for width, factor in factors.items()]
        if max([abs(common / self._common - 1.0), *moves]) <= LEAST_CHANGE:
            return False
        self._common, self._factors = common, factors
        return True

    def median(self) -> float | None:
        """Of the last measurements; None when there are too few to say."""
        return sorted(self._all)[len(self._all) // 2] if len(self._all) >= WINDOW // 2 else None

    def _age(self, width: int) -> float:
        """How much more the common factor counts for the time in which the width was not seen; 1 for none."""
        unseen = self._num_seen - self._last_seen[width]
        return float(3.0 ** min(unseen / STALE_AFTER, 20.0))


def winsorised_mean(values: Iterable[float]) -> float:
    """The mean once the least and the greatest eighth (at least one of each) are set to the nearest of the others."""
    ordered = sorted(values)
    cut = max(1, len(ordered) // 8)
    if len(ordered) <= 2 * cut:
        return ordered[len(ordered) // 2]
    kept = ordered[cut:-cut]
    return (sum(kept) + cut * (kept[0] + kept[-1])) / len(ordered)


def _towards(prior: float, weight: float, ratios: deque[float]) -> float:
    if len(ratios) < LEAST:
        return prior
    return (weight * prior + len(ratios) * winsorised_mean(ratios)) / (weight + len(ratios))
