"""What is counted of one draft source in one segment: plain numbers, as they are read and changed in every block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import mul
from typing import Any

from autospec.policies.confidence import NUM_FEATURES
from autospec.policies.reading import check_numbers

MAX_POSITIONS = 16
"""Positions that are told apart; what lies beyond is taken to fare as the last."""

_LATE_KEPT = 0.85  # of the latest blocks, at each new one
_LATE_LEAST = 2.0  # draft tokens
_MOST_FEATURE = 100.0  # in size; they are made to be some units
_DEVIATIONS = 3.5  # that the latest blocks must differ by


@dataclass(slots=True)
class Counts:
    """Discounted counts of blocks and draft tokens, and what the offers were like.

    `at_risk[j]` counts blocks in which position j + 1 was judged, `accepted[j]` those in which it was accepted.
    """

    at_risk: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    asked: float = 0.0  # blocks in which a proposal was asked for
    proposed: float = 0.0  # of those, blocks with at least one draft token
    features: list[float] = field(default_factory=lambda: [0.0] * NUM_FEATURES)  # their mean
    score: float = 0.0  # mean of the scores' logits
    seen: float = 0.0  # weight of these means
    late_judged: float = 0.0  # draft tokens of the latest blocks
    late_accepted: float = 0.0
    judged_tokens: float = 0.0  # sums over the positions
    accepted_tokens: float = 0.0
    changes: int = 0  # so far, to see whether what was reckoned from them still stands

    def add(
        self, num_draft: int, num_judged: int, num_accepted: int, discount: float, expected_next: float | None = None
    ) -> None:
        """One block.

        Args:
            expected_next: acceptance expected of the position after the last one, where the block was ended for what
                was thought of it, and all before it were accepted. It counts as at risk, and as accepted by that share:
                else the positions that were judged would be the promising ones alone, and say too much of the others.
        """
        self.changes += 1
        self.at_risk = [*map(mul, self.at_risk, repeat(discount))]
        self.accepted = [*map(mul, self.accepted, repeat(discount))]
        num_judged, num_accepted = min(num_judged, MAX_POSITIONS), min(num_accepted, MAX_POSITIONS)
        for position in range(num_judged):
            self.at_risk[position] += 1.0
        for position in range(num_accepted):
            self.accepted[position] += 1.0
        self.judged_tokens = discount * self.judged_tokens + num_judged
        self.accepted_tokens = discount * self.accepted_tokens + num_accepted
        if expected_next is not None and num_judged < MAX_POSITIONS:
            self.at_risk[num_judged] += 1.0
            self.accepted[num_judged] += expected_next
            self.judged_tokens += 1.0
            self.accepted_tokens += expected_next
        self.asked = self.asked * discount + 1.0
        self.proposed = self.proposed * discount + (num_draft > 0)

    def notice_change(self, num_judged: int, num_accepted: int) -> None:
        """Go on from the latest blocks alone, where they contradict the others."""
        self.late_judged = _LATE_KEPT * self.late_judged + num_judged
        self.late_accepted = _LATE_KEPT * self.late_accepted + num_accepted
        judged, late = self.judged_tokens, self.late_judged
        if late < _LATE_LEAST or judged <= late:
            return
        rate = min(max(self.accepted_tokens / judged, 0.02), 0.98)
        late_rate = self.late_accepted / late
        if abs(late_rate - rate) > _DEVIATIONS * math.sqrt(rate * (1.0 - rate) / late):
            share = late / judged
            self.at_risk = [share * count for count in self.at_risk]
            self.accepted = [late_rate * count for count in self.at_risk]
            self.judged_tokens *= share
            self.accepted_tokens = late_rate * self.judged_tokens
            self.asked *= share
            self.proposed *= share

    def add_features(self, values: Sequence[float], scores: Sequence[float] | None, discount: float) -> None:
        """Of an offer that was judged."""
        self.seen = self.seen * discount + 1.0
        self.features = [mean + (value - mean) / self.seen for mean, value in zip(self.features, values, strict=True)]
        if scores is not None:
            self.score += (sum(scores) / len(scores) - self.score) / self.seen

    def state(self) -> dict[str, Any]:
        """As plain JSON values."""
        used = max((position + 1 for position, count in enumerate(self.at_risk) if count), default=0)
        return {
            "at_risk": self.at_risk[:used],
            "accepted": self.accepted[:used],
            "asked": self.asked,
            "proposed": self.proposed,
            "features": list(self.features),
            "score": self.score,
            "seen": self.seen,
            "late": [self.late_judged, self.late_accepted],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Counts:
        """Raises: ValueError, TypeError, LookupError, OverflowError: this is no such state."""
        check_numbers([*state["at_risk"], state["asked"], state["proposed"], state["seen"], *state["late"]], low=0.0)
        check_numbers([*state["features"], state["score"]], low=-_MOST_FEATURE, high=_MOST_FEATURE)
        counts = cls(
            asked=float(state["asked"]),
            proposed=float(state["proposed"]),
            features=[float(value) for value in state["features"]],
            score=float(state["score"]),
            seen=float(state["seen"]),
            late_judged=float(state["late"][0]),
            late_accepted=float(state["late"][1]),
        )
        pairs = list(zip(state["at_risk"], state["accepted"], strict=True))
        if len(counts.features) != NUM_FEATURES or len(pairs) > MAX_POSITIONS:
            raise ValueError("counts of another shape")
        if not all(0.0 <= accepted <= 1.000001 * judged + 1e-9 for judged, accepted in (*pairs, state["late"])):
            raise ValueError("counts that contradict each other")
        for position, (at_risk, accepted) in enumerate(pairs):
            counts.at_risk[position], counts.accepted[position] = float(at_risk), min(float(accepted), float(at_risk))
        counts.judged_tokens, counts.accepted_tokens = sum(counts.at_risk), sum(counts.accepted)
        return counts
