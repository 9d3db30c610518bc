"""When a model draft ends its block: where no further position is worth the seconds that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_NEGLIGIBLE = 0.01


class ConfidenceStop:
    """Ends every block before the first position at which the draft is not as sure as it has to be.

    Args:
        least_margin: of its two largest probabilities, the difference; less than this ends the block.
        most_entropy: nats; more than this ends it. None: any will do.
    """

    __slots__ = ("_least_margin", "_most_entropy")

    def __init__(self, least_margin: float, most_entropy: float | None) -> None:
        self._least_margin = least_margin
        self._most_entropy = math.inf if most_entropy is None else most_entropy

    def wants_more(self) -> bool:
        return True

    def ends(self, margin: float, entropy: float) -> bool:
        return margin < self._least_margin or entropy > self._most_entropy


class MarginalStop:
    """Of one block. Asked in turn whether the draft is to look at a position, and whether the block ends before it.

    A position is worth what it adds to the expected tokens, less what its seconds bring at the segment's rate. As a
    device's cost is a staircase, all longer blocks are looked at, not the next position alone. Positions not yet looked
    at are taken to fare as they usually do; of those looked at, the draft's own confidence is known.

    What is asked depends on q at this position and on positions before it, never on the token drawn there.

    Args:
        rates: [n], acceptance of each position, given those before it.
        confident: acceptance at a position, from its index, margin and entropy.
        draft: [n + 1], seconds of drafting so many tokens.
        verify: [n + 1], seconds of verifying so many draft tokens.
        rate: tokens per second that time brings elsewhere; 0 never ends a block.

    Source: Huang et al. 2024 (SpecDec++) for stopping by an estimate; Howard 1963 for the value of time.
    """

    __slots__ = ("_confident", "_draft", "_position", "_rate", "_rates", "_survival", "_verify")

    def __init__(
        self,
        rates: Sequence[float],
        confident: Callable[[int, float, float], float],
        draft: Sequence[float],
        verify: Sequence[float],
        rate: float,
    ) -> None:
        self._rates, self._confident = rates, confident
        self._draft, self._verify, self._rate = draft, verify, rate
        self._position = 0  # tokens drafted
        self._survival = 1.0  # probability that all of them are accepted

    def wants_more(self) -> bool:
        position = self._position
        return position < len(self._rates) and self._pays(position, self._rates[position], self._draft[position])

    def ends(self, margin: float, entropy: float) -> bool:
        position = self._position
        if position >= len(self._rates):
            return True
        accepted = self._confident(position, margin, entropy)
        if not self._pays(position, accepted, self._draft[position + 1]):  # looking at it is paid for
            return True
        self._survival *= accepted
        self._position = position + 1
        return False

    def _pays(self, position: int, accepted: float, paid: float) -> bool:
        """Is a block worth while that goes on with this position?

        Args:
            accepted: acceptance there.
            paid: seconds of drafting that are spent in any case.
        """
        if not self._rate:
            return True
        survival, tokens = self._survival * accepted, 0.0
        paid += self._verify[position]
        for length in range(position + 1, len(self._verify)):
            tokens += survival
            if tokens > self._rate * (self._draft[length] + self._verify[length] - paid):
                return True
            if survival < _NEGLIGIBLE or length >= len(self._rates):
                return False
            survival *= self._rates[length]
        return False
