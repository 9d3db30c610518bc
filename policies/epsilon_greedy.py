"""Mostly the arm that has brought most, now and then any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autospec.policies.base import CostEstimates, check_range
from autospec.policies.evidence import Evidence
from autospec.policies.reading import check_whole, reading_state, restored_random
from autospec.types import OFF, Action, BlockContext, BlockOutcome


class EpsilonGreedy:
    """Plays the arm with the most goodput so far, and in a fixed share of blocks an arm drawn at random.

    An arm is every usable draft source with every block length, and the plain step. What it brought is tokens and
    seconds summed over the blocks of the segment, then divided.

    Args:
        costs: the block lengths to choose between, and seconds of a plain step.
        epsilon: share of blocks in which an arm is drawn at random.
        discount: weight that old evidence of a segment keeps at each new block of it.
        strength: blocks of evidence that the same arm in other segments counts for.
        seed: of the draws.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: Sutton and Barto 1998, section 2.2.
    """

    name = "epsilon_greedy"

    def __init__(
        self,
        costs: CostEstimates,
        *,
        epsilon: float = 0.05,
        discount: float = 0.998,
        strength: float = 4.0,
        seed: int = 0,
    ) -> None:
        check_range("epsilon", epsilon, 0.0, 1.0)
        check_whole("seed", seed, 0)
        self._epsilon = epsilon
        self._evidence = Evidence(costs, discount=discount, strength=strength)
        self.settings: dict[str, object] = {
            "epsilon": epsilon,
            "discount": discount,
            "strength": strength,
            "seed": seed,
        }
        self._random = np.random.default_rng(seed)

    def choose(self, context: BlockContext) -> Action:
        arms = self._evidence.arms.usable(context)
        if len(arms) == 1:
            return OFF
        known = self._evidence.beliefs(context.segment, arms)
        if (untried := known.untried) is not None:
            return self._evidence.action(known, untried, "explore")
        if self._random.random() < self._epsilon:
            return self._evidence.action(known, int(self._random.integers(len(arms))), "explore")
        return self._evidence.action(known, int(known.goodput.argmax()), "best")

    def observe(self, outcome: BlockOutcome) -> None:
        self._evidence.learn(outcome)

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {"evidence": self._evidence.state(), "random": self._random.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        with reading_state(self.name, state, ("evidence", "random")):
            evidence, random = self._evidence.restored(state["evidence"]), restored_random(state["random"])
        self._evidence, self._random = evidence, random
