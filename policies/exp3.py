"""Weights that multiply: no assumption that an arm stays what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autospec.policies.arms import BySegment, Pending
from autospec.policies.base import CostEstimates, check_range
from autospec.policies.evidence import TRIES, Beliefs, Evidence
from autospec.policies.reading import Floats, check_whole, finite, reading_state, restored_random
from autospec.policies.scale import Scale
from autospec.types import OFF, Action, BlockContext, BlockOutcome

_LENT = 3.0
"""Largest log-weight that a segment starts an arm with, from what the arm did elsewhere."""


class Exp3:
    """Draws an arm with the probability of its weight, which grows with what the arm gains whenever it is played.

    The gain of a block is its tokens less what its seconds are worth at the segment's goodput so far. Its expectation
    is largest, and zero, for the arm with the most goodput once that is what is played. Gains are divided by a high
    quantile of their sizes and cut off there, so that a stall counts as no more than a bad block; and by the
    probability of the arm, so that arms seldom played are not forgotten. Weights fade towards equal ones.

    Args:
        costs: the block lengths to choose between, and seconds of a plain step.
        rate: how fast weights grow.
        mixing: share of blocks in which an arm is drawn at random.
        discount: share that log-weights, and evidence of a segment, keep at each new block of it.
        strength: blocks of evidence that the same arm in other segments counts for.
        seed: of the draws.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: Exp3 and Exp3.S of Auer, Cesa-Bianchi, Freund and Schapire 2002; bounded importance weights as in Neu 2015;
    a ratio maximised by differences as in Dinkelbach 1967.
    """

    name = "exp3"

    def __init__(
        self,
        costs: CostEstimates,
        *,
        rate: float = 0.15,
        mixing: float = 0.05,
        discount: float = 0.995,
        strength: float = 4.0,
        seed: int = 0,
    ) -> None:
        check_range("rate", rate, 0.0, 10.0)
        check_range("mixing", mixing, 1e-3, 1.0)
        check_whole("seed", seed, 0)
        self._rate = rate
        self._mixing = mixing
        self._discount = discount
        self._evidence = Evidence(costs, discount=discount, strength=strength)
        self._scale = Scale()
        self._random = np.random.default_rng(seed)
        self._weights: BySegment[Floats] = BySegment(lambda: np.full(1, np.nan))  # logarithms; nan: not yet begun
        self._played: Pending[tuple[int, float]] = Pending()  # arm, and the probability that it had
        self.settings: dict[str, object] = {
            "rate": rate,
            "mixing": mixing,
            "discount": discount,
            "strength": strength,
            "seed": seed,
        }

    def choose(self, context: BlockContext) -> Action:
        arms = self._evidence.arms.usable(context)
        if len(arms) == 1:
            return OFF
        known = self._evidence.beliefs(context.segment, arms)
        log = self._logs(context.segment, known)
        probabilities = np.exp(log - log.max())
        probabilities *= (1.0 - self._mixing) / probabilities.sum()
        probabilities += self._mixing / len(arms)
        ends = probabilities.cumsum()
        chosen = min(int(ends.searchsorted(self._random.random() * ends[-1], side="right")), len(arms) - 1)
        self._played.note(context, (int(arms[chosen]), float(probabilities[chosen])))
        kind = "best" if chosen == int(log.argmax()) else "explore"
        return self._evidence.action(known, chosen, kind)

    def observe(self, outcome: BlockOutcome) -> None:
        learned = self._evidence.learn(outcome)
        arm, probability = self._played.take(outcome) or (None, 1.0)
        log = self._weights.seen(outcome.segment)
        if learned is None or learned.arm != arm or arm >= len(log):
            return
        gain = learned.tokens - self._evidence.rate(outcome.segment) * learned.seconds
        self._scale.add(gain)
        bounded = min(max(gain / self._scale.value, -1.0), 1.0)
        log *= self._discount
        log[arm] += self._rate * bounded / (probability + self._mixing / 2.0)

    def _logs(self, segment: str, known: Beliefs) -> Floats:
        """[n], log-weights; an arm new to the segment starts from what is believed of it."""
        log = self._weights.seen(segment)
        missing = len(self._evidence.arms) - len(log)
        if missing > 0:
            log = np.concatenate([log, np.full(missing, np.nan)])
            self._weights.put(segment, log)
        new = np.isnan(log[known.arms])
        if new.any():
            gains = (known.tokens - self._evidence.rate(segment) * known.seconds) / self._scale.value
            gains = np.where(known.tries < TRIES, 0.0, np.clip(gains, -1.0, 1.0))
            log[known.arms[new]] = _LENT * gains[new]
        return log[known.arms]

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {
            "evidence": self._evidence.state(),
            "scale": self._scale.state(),
            "random": self._random.bit_generator.state,
            "weights": self._weights.state(lambda log: [None if np.isnan(each) else each for each in log.tolist()]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        with reading_state(self.name, state, ("evidence", "scale", "random", "weights")):
            evidence, scale = self._evidence.restored(state["evidence"]), Scale.restored(state["scale"])
            random = restored_random(state["random"])
            weights = self._weights.restored(state["weights"], _read_weights)
        self._evidence, self._scale, self._random, self._weights = evidence, scale, random, weights
        self._played = Pending()


def _read_weights(state: Any) -> Floats:
    missing = np.array([each is None for each in state])
    log = finite([0.0 if each is None else each for each in state], (max(1, len(state)),))
    log[missing] = np.nan
    return log
