"""Each arm as often as it is likely to be the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autospec.policies.base import CostEstimates, check_range
from autospec.policies.evidence import Evidence
from autospec.policies.reading import check_whole, reading_state, restored_random
from autospec.policies.scale import Scale
from autospec.types import OFF, Action, BlockContext, BlockOutcome


class Thompson:
    """Draws a goodput for each arm from what is believed of it, and plays the arm whose draw is largest.

    Beliefs are Gaussian: the goodput so far (tokens and seconds summed over blocks, then divided), and as deviation the
    usual distance of a single block from what was expected of its arm, divided by the root of the arm's blocks.

    Args:
        costs: the block lengths to choose between, and seconds of a plain step.
        width: standard deviations are taken this many times as large; 0 plays what was best so far.
        discount: weight that old evidence of a segment keeps at each new block of it.
        strength: blocks of evidence that the same arm in other segments counts for.
        seed: of the draws.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: Thompson 1933; Gaussian version of Agrawal and Goyal 2013.
    """

    name = "thompson"

    def __init__(
        self,
        costs: CostEstimates,
        *,
        width: float = 0.7,
        discount: float = 0.998,
        strength: float = 4.0,
        seed: int = 0,
    ) -> None:
        check_range("width", width, 0.0, 100.0)
        check_whole("seed", seed, 0)
        self._width = width
        self._evidence = Evidence(costs, discount=discount, strength=strength)
        self._scale = Scale()
        self._random = np.random.default_rng(seed)
        self.settings: dict[str, object] = {"width": width, "discount": discount, "strength": strength, "seed": seed}

    def choose(self, context: BlockContext) -> Action:
        arms = self._evidence.arms.usable(context)
        if len(arms) == 1:
            return OFF
        known = self._evidence.beliefs(context.segment, arms)
        if (untried := known.untried) is not None:
            return self._evidence.action(known, untried, "explore")
        deviations = self._width * self._scale.value / np.sqrt(known.blocks)
        chosen = int((known.goodput + deviations * self._random.standard_normal(len(arms))).argmax())
        kind = "best" if chosen == int(known.goodput.argmax()) else "explore"
        return self._evidence.action(known, chosen, kind)

    def observe(self, outcome: BlockOutcome) -> None:
        learned = self._evidence.learn(outcome)
        if learned is not None and learned.surprise is not None:
            self._scale.add(learned.surprise)

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {
            "evidence": self._evidence.state(),
            "scale": self._scale.state(),
            "random": self._random.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        with reading_state(self.name, state, ("evidence", "scale", "random")):
            evidence, scale = self._evidence.restored(state["evidence"]), Scale.restored(state["scale"])
            random = restored_random(state["random"])
        self._evidence, self._scale, self._random = evidence, scale, random
