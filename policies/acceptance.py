"""How many draft tokens are likely to be accepted, by segment and source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autospec.policies.base import MAX_SEGMENTS, check_range
from autospec.types import BlockOutcome

MAX_POSITIONS = 32

_T = TypeVar("_T", float, NDArray[np.float64])


@dataclass(slots=True)
class _Counts:
    """Discounted counts of one (segment, source)."""

    at_risk: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_POSITIONS))
    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_POSITIONS))
    asked: float = 0.0  # blocks in which a proposal was asked for
    proposed: float = 0.0  # of those, blocks with at least one draft token

    def add(self, outcome: BlockOutcome, discount: float) -> None:
        self.at_risk *= discount
        self.accepted *= discount
        self.at_risk[: outcome.num_judged_tokens] += 1.0
        self.accepted[: outcome.num_accepted_tokens] += 1.0
        self.asked = self.asked * discount + 1.0
        self.proposed = self.proposed * discount + (outcome.num_draft_tokens > 0)


class AcceptanceModel:
    """Beta estimates of acceptance from at-risk counts.

    Position j is at risk only in blocks that proposed at least j tokens and accepted j - 1 of them, so blocks cut short
    by a policy, by EOS or by the length limit do not bias it. A segment's estimate is shrunk towards the source's
    over all segments, and that one towards the prior.

    Args:
        discount: weight kept by old evidence at each new block of the same segment and source.
        prior_acceptance: acceptance expected of a source never tried; optimistic, so that it is tried.
        strength: blocks of evidence that the broader estimate counts for.
    """

    def __init__(self, *, discount: float = 0.98, prior_acceptance: float = 0.8, strength: float = 4.0) -> None:
        check_range("discount", discount, 0.0, 1.0)
        check_range("prior_acceptance", prior_acceptance, 0.0, 1.0)
        check_range("strength", strength, 1e-6, 1e6)
        self._discount = discount
        self._prior = prior_acceptance
        self._strength = strength
        self._by_segment: dict[tuple[str, str], _Counts] = {}
        self._by_source: dict[str, _Counts] = {}

    def add(self, outcome: BlockOutcome) -> None:
        """Learn from one block that asked a source for drafts."""
        source = outcome.action.source
        own = self._by_segment.pop((outcome.segment, source), None) or _Counts()
        self._by_segment[outcome.segment, source] = own  # the newest last
        if len(self._by_segment) > MAX_SEGMENTS:
            del self._by_segment[next(iter(self._by_segment))]
        for counts in (own, self._by_source.setdefault(source, _Counts())):
            counts.add(outcome, self._discount)

    def blocks(self, segment: str, source: str) -> float:
        """Discounted number of blocks in which `source` was asked for drafts in this segment."""
        counts = self._by_segment.get((segment, source))
        return counts.asked if counts else 0.0

    def survival(self, segment: str, source: str, block_length: int) -> NDArray[np.float64]:
        """[block_length], probability that at least j + 1 draft tokens are accepted in a block that has them."""
        none = _Counts()
        broad = self._by_source.get(source, none)
        own = self._by_segment.get((segment, source), none)
        # every position leans on the rate pooled over positions, which leans on the broader estimate
        broad_rate = _shrunk(float(broad.accepted.sum()), float(broad.at_risk.sum()), self._prior, self._strength)
        own_rate = _shrunk(float(own.accepted.sum()), float(own.at_risk.sum()), broad_rate, self._strength)
        rates = _shrunk(own.accepted, own.at_risk, own_rate, self._strength)
        positions = np.minimum(np.arange(block_length), MAX_POSITIONS - 1)
        return np.cumprod(rates[positions]).astype(np.float64)

    def hit_rate(self, segment: str, source: str) -> float:
        """Probability that the source has anything to propose."""
        none = _Counts()
        broad = self._by_source.get(source, none)
        own = self._by_segment.get((segment, source), none)
        broad_rate = _shrunk(broad.proposed, broad.asked, 1.0, self._strength)
        return _shrunk(own.proposed, own.asked, broad_rate, self._strength)


def _shrunk(successes: _T, trials: _T, mean: float, weight: float) -> _T:
    """Posterior mean of a Beta whose prior has this mean and counts for `weight` trials."""
    return (successes + weight * mean) / (trials + weight)
