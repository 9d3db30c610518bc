"""What each arm has brought, by segment, and how far a single block is trusted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from autospec.policies.arms import Arms, BySegment, PlainSteps
from autospec.policies.base import CostEstimates, check_range
from autospec.policies.reading import Floats, Indices, finite
from autospec.types import Action, BlockOutcome

WINDOW = 5
"""Blocks of an arm whose median says what is usual for it."""
STALL = 6.0
"""A block that took this many times what is usual for its arm met a stall of the machine: it counts as a usual one."""
TRIES = 2
"""Blocks of an arm, over all segments, before anything is concluded: one alone may have been a stall."""
_MOST_GAIN = 1e9
_MOST_SUM = 1e24
_TOKENS, _SECONDS, _WEIGHT, _COUNT, _OLDER, _RECENT = range(6)
_ROWS = _RECENT + 2 * WINDOW


class Sums:
    """Discounted tokens and seconds of each arm: summed over blocks, to be divided only then.

    Seconds of the last blocks are kept one by one, and all are held against their lower median. A stall is thus found
    out as soon as the next block of its arm has been seen, even when it was the arm's first block.
    """

    __slots__ = ("gain", "rows")

    def __init__(self) -> None:
        self.gain = 1.0  # new evidence is added with this weight, which grows: the same as old evidence fading
        self.rows = np.zeros((_ROWS, 1))

    def add(self, arm: int, tokens: float, seconds: float, discount: float) -> float:
        """One block. Returns its seconds as far as they are believed."""
        self._grow(arm + 1)
        self.gain /= discount
        if self.gain > _MOST_GAIN:
            faded = [row for row in range(_ROWS) if row != _COUNT and not _RECENT <= row < _RECENT + WINDOW]
            self.rows[faded] /= self.gain
            self.gain = 1.0
        column = self.rows[:, arm].tolist()
        recent, weights = column[_RECENT : _RECENT + WINDOW], column[_RECENT + WINDOW :]
        usual = sorted([seconds, *(r for r, w in zip(recent[:-1], weights[:-1], strict=True) if w)])
        middle = usual[(len(usual) - 1) // 2]
        column[_TOKENS] += self.gain * tokens
        column[_WEIGHT] += self.gain
        column[_COUNT] += 1.0
        column[_OLDER] += weights[-1] * _believed(recent[-1], middle)
        recent, weights = [seconds, *recent[:-1]], [self.gain, *weights[:-1]]
        column[_SECONDS] = column[_OLDER] + sum(w * _believed(r, middle) for r, w in zip(recent, weights, strict=True))
        self.rows[:, arm] = [*column[:_RECENT], *recent, *weights]
        return _believed(seconds, middle)

    def read(self, arms: Indices, num_arms: int) -> Floats:
        """What the arms have brought. Args: num_arms: how many there are.

        Returns:
            [4, n]: tokens, seconds (plain steps) and blocks, all discounted, and blocks as they are.
        """
        self._grow(num_arms)
        return self.rows[:_OLDER].take(arms, axis=1)

    def tries(self, arms: Indices, num_arms: int) -> Floats:
        """[n], blocks of the arms, as they are."""
        self._grow(num_arms)
        tries: Floats = self.rows[_COUNT].take(arms)
        return tries

    def total(self) -> tuple[float, float]:
        """Tokens and seconds over all arms, discounted."""
        tokens, seconds = self.rows[:_WEIGHT].sum(axis=1).tolist()
        return tokens / self.gain, seconds / self.gain

    def _grow(self, num_arms: int) -> None:
        missing = num_arms - self.rows.shape[1]
        if missing > 0:
            self.rows = np.concatenate([self.rows, np.zeros((_ROWS, missing))], axis=1)

    def state(self) -> dict[str, Any]:
        used = np.nonzero(self.rows[_COUNT])[0].tolist()
        return {"gain": self.gain, "arms": [[arm, self.rows[:, arm].tolist()] for arm in used]}

    @classmethod
    def restored(cls, state: Any, num_arms: int) -> Sums:
        sums = cls()
        sums.gain = float(finite(state["gain"], (), 1.0, _MOST_GAIN))
        sums._grow(num_arms)
        for arm, column in state["arms"]:
            if type(arm) is not int or not 0 <= arm < num_arms:
                raise ValueError(f"arm {arm!r} of {num_arms}")
            sums.rows[:, arm] = finite(column, (_ROWS,), 0.0, _MOST_SUM)
        return sums


def _believed(seconds: float, usual: float) -> float:
    return seconds if seconds <= STALL * usual else usual


class Beliefs(NamedTuple):
    """What is known of arms in a segment; arrays are [n]."""

    arms: Indices
    goodput: Floats  # tokens per plain step's time
    blocks: Floats  # that this rests on, discounted, those of the prior included
    tokens: Floats  # per block
    seconds: Floats  # per block, in plain steps
    tries: Floats  # blocks over all segments

    @property
    def untried(self) -> int | None:
        """Position of an arm that nothing can be concluded of yet; None when there is none."""
        first = int(self.tries.argmin())
        return first if self.tries[first] < TRIES else None


class Learned(NamedTuple):
    """What a block taught."""

    arm: int
    tokens: float
    seconds: float  # plain steps, as far as they are believed
    surprise: float | None  # goodput by which it differed from what was expected of its arm; None: nothing was


class Evidence:
    """Sums by segment, each arm's leaning on the same arm's over all segments.

    A segment that is new, or an arm that is new in it, thus starts from what the arm did elsewhere.

    Args:
        costs: seconds of a plain step, and the block lengths to choose between.
        discount: weight that old evidence of a segment keeps at each new block of it.
        strength: blocks of evidence that the other segments count for.
    """

    def __init__(self, costs: CostEstimates, *, discount: float, strength: float) -> None:
        check_range("discount", discount, 0.5, 1.0)
        check_range("strength", strength, 1e-6, 1e6)
        self.arms = Arms(costs)
        self.steps = PlainSteps(costs)
        self._costs = costs
        self._discount = discount
        self._pool_discount = 1.0 - 0.1 * (1.0 - discount)  # many segments add to it
        self._strength = strength
        self._pool = Sums()
        self._segments = BySegment(Sums)

    def beliefs(self, segment: str, arms: Indices) -> Beliefs:
        """What is known of these arms."""
        own = self._segments.seen(segment)
        mine = own.read(arms, len(self.arms))
        pool = self._pool.read(arms, len(self.arms))
        tokens, seconds, blocks = mine[:3] / own.gain
        # a stored sum of an arm long unused may have faded to nothing
        pooled = np.maximum(pool[_WEIGHT], 1e-300)
        lent = np.minimum(pool[_WEIGHT] / self._pool.gain, self._strength)
        per_block = lent / pooled
        tokens = tokens + per_block * pool[_TOKENS]
        seconds = seconds + per_block * pool[_SECONDS]
        blocks = np.maximum(blocks + lent, 1e-9)
        return Beliefs(
            arms, tokens / np.maximum(seconds, 1e-12), blocks, tokens / blocks, seconds / blocks, pool[_COUNT]
        )

    def action(self, known: Beliefs, place: int, kind: str) -> Action:
        """The action of the arm at this position, `best` becoming `off` where that is the plain step."""
        plain = float(known.goodput[0])
        gain = float(known.goodput[place]) / plain if plain > 0.0 else 0.0
        return self.arms.action(int(known.arms[place]), kind, gain, len(known.arms))

    def rate(self, segment: str) -> float:
        """Goodput of a segment's blocks so far, whatever was played: what a second is worth, in plain steps."""
        tokens, seconds = self._segments.seen(segment).total()
        pooled_tokens, pooled_seconds = self._pool.total()
        if pooled_seconds > 0.0:
            lent = self._strength / max(pooled_seconds, self._strength)
            tokens, seconds = tokens + lent * pooled_tokens, seconds + lent * pooled_seconds
        return tokens / seconds if seconds > 0.0 else 1.0

    def learn(self, outcome: BlockOutcome) -> Learned | None:
        """Add one block; None where it says nothing of an arm's goodput, as without seconds."""
        arm = self.arms.of(outcome.action)
        seconds = outcome.seconds / self.steps.unit(outcome.context_tokens)
        if arm is None or not 0.0 < seconds < math.inf:
            return None
        tokens = float(outcome.num_committed_tokens)
        known = self.beliefs(outcome.segment, np.array([arm], dtype=np.intp))
        surprise = None
        if known.untried is None:
            surprise = (tokens - float(known.goodput[0]) * seconds) / max(float(known.seconds[0]), 1e-9)
        believed = self._segments.seen(outcome.segment).add(arm, tokens, seconds, self._discount)
        believed = min(believed, self._pool.add(arm, tokens, seconds, self._pool_discount))
        return Learned(arm, tokens, believed, surprise)

    def state(self) -> dict[str, Any]:
        return {
            "arms": self.arms.state(),
            "pool": self._pool.state(),
            "segments": self._segments.state(lambda sums: sums.state()),
        }

    def restored(self, state: Any) -> Evidence:
        """Evidence with these settings, that goes on from what another one had learned."""
        evidence = Evidence(self._costs, discount=self._discount, strength=self._strength)
        evidence.arms = self.arms.restored(state["arms"])
        num_arms = len(evidence.arms)
        evidence._pool = Sums.restored(state["pool"], num_arms)
        evidence._segments = self._segments.restored(state["segments"], lambda each: Sums.restored(each, num_arms))
        return evidence
