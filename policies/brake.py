"""Does speculation lose against plain steps? A test that may be looked at after every block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autospec.policies.reading import check_numbers

_MOST_OF_BOUND = 0.5  # of the largest stake that cannot lose everything
_KEPT = 0.98
_LEARNED = ("log_wealth", "seen", "mean", "square")  # the others are settings


@dataclass(slots=True)
class Brake:
    """Bets, block by block, that the mean gain is below zero; wealth that grows a hundredfold is evidence.

    While the mean gain is at least zero, no way of betting makes the wealth ever reach 1 / error_rate with more than
    that probability, however often one looks. A new test begins after `blocks` blocks, so that a past in which
    speculation won does not hide that it loses now.

    Args:
        error_rate: probability of a false alarm in one test.
        blocks: length of a test.

    Source: Waudby-Smith and Ramdas 2024, estimating means of bounded random variables by betting.
    """

    error_rate: float = 0.01
    blocks: int = 256
    log_wealth: float = 0.0
    seen: int = 0
    mean: float = -0.1  # of the gains so far, discounted; what the stake is set by
    square: float = 0.5

    def add(self, gain: float, most: float) -> bool:
        """One block gained so much; True when it is time to stop.

        Args:
            gain: plain steps saved, negative when lost.
            most: what it could have been at best, known before the block.
        """
        stake = min(max(-self.mean / max(self.square, 1e-9), 0.0), _MOST_OF_BOUND / most)
        self.log_wealth += math.log1p(-stake * min(gain, most))
        self.mean = _KEPT * self.mean + (1.0 - _KEPT) * gain
        self.square = _KEPT * self.square + (1.0 - _KEPT) * gain * gain
        self.seen += 1
        if self.log_wealth >= -math.log(self.error_rate):
            self.log_wealth, self.seen = 0.0, 0
            return True
        if self.seen >= self.blocks:
            self.log_wealth, self.seen = 0.0, 0
        return False

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {name: getattr(self, name) for name in _LEARNED}

    @classmethod
    def restored(cls, state: Mapping[str, Any], error_rate: float = 0.01) -> Brake:
        """Raises: LookupError, TypeError, ValueError, OverflowError: this is no such state."""
        learned = {name: state[name] for name in _LEARNED}
        check_numbers(learned.values())
        check_numbers([learned["seen"], learned["square"]], low=0.0)
        return cls(error_rate, **learned)
