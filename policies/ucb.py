"""The arm that might be best: what it has brought, and more the less is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autospec.policies.base import CostEstimates, check_range
from autospec.policies.evidence import Evidence
from autospec.policies.reading import reading_state
from autospec.policies.scale import Scale
from autospec.types import OFF, Action, BlockContext, BlockOutcome


class UCB:
    """Plays the arm with the largest upper bound on its goodput.

    The bound is goodput + width x scale x sqrt(log(blocks) / blocks of the arm). The scale is a high quantile of how
    far single blocks lie from what was expected of their arm: one stall does not move it, while a bound scaled by the
    largest reward so far would after one stall look the same for every arm. Old evidence fades, so that the bound of
    an arm long unused grows until it is tried again.

    Args:
        costs: the block lengths to choose between, and seconds of a plain step.
        width: how wide the bound is; 0 plays what was best so far.
        discount: weight that old evidence of a segment keeps at each new block of it.
        strength: blocks of evidence that the same arm in other segments counts for.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: UCB1 of Auer, Cesa-Bianchi and Fischer 2002; fading as in discounted UCB, Garivier and Moulines 2008.
    """

    name = "ucb"

    def __init__(
        self, costs: CostEstimates, *, width: float = 0.7, discount: float = 0.998, strength: float = 4.0
    ) -> None:
        check_range("width", width, 0.0, 100.0)
        self._width = width
        self._evidence = Evidence(costs, discount=discount, strength=strength)
        self._scale = Scale()
        self.settings: dict[str, object] = {"width": width, "discount": discount, "strength": strength}

    def choose(self, context: BlockContext) -> Action:
        arms = self._evidence.arms.usable(context)
        if len(arms) == 1:
            return OFF
        known = self._evidence.beliefs(context.segment, arms)
        if (untried := known.untried) is not None:
            return self._evidence.action(known, untried, "explore")
        spread = np.sqrt(np.log(1.0 + known.blocks.sum()) / known.blocks)
        chosen = int((known.goodput + self._width * self._scale.value * spread).argmax())
        kind = "best" if chosen == int(known.goodput.argmax()) else "explore"
        return self._evidence.action(known, chosen, kind)

    def observe(self, outcome: BlockOutcome) -> None:
        learned = self._evidence.learn(outcome)
        if learned is not None and learned.surprise is not None:
            self._scale.add(learned.surprise)

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {"evidence": self._evidence.state(), "scale": self._scale.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        with reading_state(self.name, state, ("evidence", "scale")):
            evidence, scale = self._evidence.restored(state["evidence"]), Scale.restored(state["scale"])
        self._evidence, self._scale = evidence, scale
