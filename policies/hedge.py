"""Full information: every retrieval action is judged in every block, whether it was played or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.policies.arms import Arms, BySegment, PlainSteps
from autospec.policies.base import CostEstimates, check_range
from autospec.policies.reading import Floats, Indices, check_whole, finite, reading_state, restored_random
from autospec.policies.scale import Scale
from autospec.types import OFF, Action, BlockContext, BlockOutcome, OfferOutcome

_PRIOR_STEPS = 10.0  # plain steps that a segment's rate starts from
_MOST = 2.0  # usual gains that a single block may count for
_LENT = 0.5  # share of the log-weights over all segments that a new segment starts with


class _Weights:
    """What one segment, or all of them together, has learned. Arrays are [arms]."""

    __slots__ = ("blocks", "log", "seconds", "tokens", "tokens_of")

    def __init__(self, num_arms: int = 1) -> None:
        self.log: Floats = np.zeros(num_arms)  # relative to plain steps, whose own stays 0
        self.tokens = _PRIOR_STEPS  # of the blocks played, discounted
        self.seconds = _PRIOR_STEPS  # predicted, in plain steps
        self.tokens_of: Floats = np.zeros(num_arms)  # of blocks of arms that make no offers, discounted
        self.blocks: Floats = np.zeros(num_arms)

    @property
    def rate(self) -> float:
        """Tokens that the time of a plain step brings; plain decoding is always to be had."""
        return max(1.0, self.tokens / self.seconds)

    def grow(self, num_arms: int) -> None:
        missing = num_arms - len(self.log)
        if missing > 0:
            none = np.zeros(missing)
            self.log = np.concatenate([self.log, none])
            self.tokens_of = np.concatenate([self.tokens_of, none])
            self.blocks = np.concatenate([self.blocks, none])

    def lent(self) -> _Weights:
        """What a new segment starts from."""
        new = _Weights(len(self.log))
        new.log = _LENT * self.log
        new.blocks = np.minimum(self.blocks, 1.0)
        new.tokens_of = self.tokens_of * new.blocks / np.maximum(self.blocks, 1.0)
        return new

    def state(self) -> list[Any]:
        return [self.tokens, self.seconds, self.log.tolist(), self.tokens_of.tolist(), self.blocks.tolist()]

    @classmethod
    def restored(cls, state: Any) -> _Weights:
        tokens, seconds, log, tokens_of, blocks = state
        new, shape = cls(), (len(log),)
        new.tokens, new.seconds = float(finite(tokens, (), 0.0)), float(finite(seconds, (), 1e-9))
        new.log, new.tokens_of, new.blocks = (
            finite(log, shape),
            finite(tokens_of, shape, 0.0),
            finite(blocks, shape, 0.0),
        )
        return new


class Hedge:
    """Multiplicative weights over every retrieval action and the plain step.

    Once a block is committed it is known what each source's offer would have come to, and so for each of its
    block lengths the tokens; the cost model says the seconds. The gain of an action is its tokens less what its seconds
    are worth at the segment's rate so far, compared with a plain step: what maximises tokens per second over many
    blocks that differ. Log-weights grow by the gain, divided by a high quantile of the sizes of gains and bounded, and
    fade, so that drift is followed. A source without an offer sleeps in that block and keeps its weight.

    Sources that make no offers (model drafts) are bandit arms: tried once, then at random in a small share of blocks,
    and weighed in every block by the gain that their own blocks so far let expect.

    Args:
        costs: seconds of drafting and verifying, and the block lengths to choose between.
        rate: how fast weights grow.
        discount: share that log-weights keep at each new block of the segment.
        explore: share of blocks in which a source that makes no offers is tried.
        seed: of the draws.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: Freund and Schapire 1997; sleeping experts of Freund, Schapire, Singer and Warmuth 1997; full information
    for drafts as in HedgeSpec.
    """

    name = "hedge"
    wants_offers = True

    def __init__(
        self,
        costs: CostEstimates,
        *,
        rate: float = 0.5,
        discount: float = 0.99,
        explore: float = 0.02,
        seed: int = 0,
    ) -> None:
        check_range("rate", rate, 0.0, 100.0)
        check_range("discount", discount, 0.0, 1.0)
        check_range("explore", explore, 0.0, 1.0)
        check_whole("seed", seed, 0)
        self.settings: dict[str, object] = {"rate": rate, "discount": discount, "explore": explore, "seed": seed}
        self._costs = costs
        self._rate = rate
        self._discount = discount
        self._explore = explore
        self._arms = Arms(costs)
        self._steps = PlainSteps(costs)
        self._scale = Scale()
        self._random = np.random.default_rng(seed)
        self._pool = _Weights()
        self._segments = BySegment(lambda: self._pool.lent())
        self._offering: set[str] = set()

    def choose(self, context: BlockContext) -> Action:
        self._offering.update(context.offers)
        arms = self._awake(context)
        if len(arms) == 1:
            return OFF
        own = self._segments.seen(context.segment)
        own.grow(len(self._arms))
        log = own.log[arms]
        likely = np.exp(log - log.max())
        likely /= likely.sum()
        others = [place for place, arm in enumerate(arms.tolist()) if self._needs_trying(arm)]
        if others:
            self._pool.grow(len(self._arms))
            untried = [place for place in others if not self._pool.blocks[arms[place]]]
            if untried:
                return self._said(arms, untried[0], likely, "explore")
            if self._random.random() < self._explore:
                return self._said(arms, others[int(self._random.integers(len(others)))], likely, "explore")
        chosen = min(int(likely.cumsum().searchsorted(self._random.random(), side="right")), len(arms) - 1)
        return self._said(arms, chosen, likely, "best" if chosen == int(log.argmax()) else "explore")

    def observe(self, outcome: BlockOutcome) -> None:
        own = self._segments.seen(outcome.segment)
        for settled in outcome.offers:
            self._offering.add(settled.source)
        self._count(outcome, own)
        gains = self._gains(outcome, own)
        for each in (own, self._pool):
            each.log *= self._discount
            for arms, found in gains:
                each.log[arms] += self._rate * found

    def _count(self, outcome: BlockOutcome, own: _Weights) -> None:
        """What the block that was played brought."""
        action, tokens = outcome.action, outcome.num_committed_tokens
        arm = self._arms.of(action)
        seconds = self._steps.of(action.source, action.block_length, outcome.num_draft_tokens, outcome.context_tokens)
        for each in (own, self._pool):
            each.grow(len(self._arms))
            if seconds < math.inf:
                each.tokens = self._discount * each.tokens + tokens
                each.seconds = self._discount * each.seconds + seconds
            if arm is not None and self._needs_trying(arm):
                each.tokens_of[arm] = self._discount * each.tokens_of[arm] + tokens
                each.blocks[arm] = self._discount * each.blocks[arm] + 1.0

    def _gains(self, outcome: BlockOutcome, own: _Weights) -> list[tuple[Indices, Floats]]:
        """Arms, and what each would have gained over a plain step, in units of what is usual."""
        rate, context = own.rate, outcome.context_tokens
        lengths = np.array(self._costs.block_lengths)
        gains: list[tuple[Indices, Floats]] = []
        for settled in outcome.offers:
            proposed = np.minimum(lengths, settled.offer.num_tokens)
            seconds = self._steps.row(settled.source, settled.offer.num_tokens, context)
            known = _is_known(settled, proposed) & np.isfinite(seconds)
            if known.any():
                accepted = np.minimum(proposed, settled.num_accepted_tokens)[known]
                found = accepted - rate * (seconds[known] - 1.0)
                self._scale.add(float(np.abs(found).max()))
                gains.append((self._arms.of_source(settled.source)[known], found))
        others = dict.fromkeys(name for name, _ in self._arms.names[1:] if name not in self._offering)
        arms_of = {source: self._arms.of_source(source) for source in others}
        for each in (own, self._pool):
            each.grow(len(self._arms))
        for source, arms in arms_of.items():
            seconds = self._steps.row(source, None, context)
            known = (own.blocks[arms] > 0.0) & np.isfinite(seconds)
            arms = arms[known]
            tokens = own.tokens_of[arms] / own.blocks[arms]
            gains.append((arms, tokens - 1.0 - rate * (seconds[known] - 1.0)))
        usual = self._scale.value
        return [(arms, np.clip(found / usual, -_MOST, _MOST)) for arms, found in gains]

    def _awake(self, context: BlockContext) -> Indices:
        arms = self._arms.usable(context)
        misses = {source for source, offer in context.offers.items() if not offer.num_tokens}
        if not misses:
            return arms
        names = self._arms.names
        return arms[[names[arm][0] not in misses for arm in arms.tolist()]]

    def _needs_trying(self, arm: int) -> bool:
        return arm > 0 and self._arms.names[arm][0] not in self._offering

    def _said(self, arms: Indices, place: int, likely: Floats, kind: str) -> Action:
        source, block_length = self._arms.names[int(arms[place])]
        kind = "off" if kind == "best" and block_length == 0 else kind
        action = Action(source, block_length)
        share = float(likely[place])
        return Action(source, block_length, f"{kind}: {action.label} has {share:.2f} of the weight of {len(arms)} arms")

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {
            "arms": self._arms.state(),
            "scale": self._scale.state(),
            "random": self._random.bit_generator.state,
            "pool": self._pool.state(),
            "segments": self._segments.state(lambda each: each.state()),
            "offering": sorted(self._offering),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        with reading_state(self.name, state, ("arms", "scale", "random", "pool", "segments", "offering")):
            arms, scale = self._arms.restored(state["arms"]), Scale.restored(state["scale"])
            random, pool = restored_random(state["random"]), _Weights.restored(state["pool"])
            segments = self._segments.restored(state["segments"], _Weights.restored)
            offering = state["offering"]
            if not isinstance(offering, list) or not all(isinstance(source, str) for source in offering):
                raise TypeError(f"offering: names of sources are needed, not {offering!r:.40}")
        self._arms, self._scale, self._random = arms, scale, random
        self._pool, self._segments, self._offering = pool, segments, set(offering)


def _is_known(settled: OfferOutcome, proposed: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[block lengths], is the fate of all its tokens known? Not where the answer ended before. A miss is no loss."""
    judged, accepted = settled.num_judged_tokens, settled.num_accepted_tokens
    return (proposed > 0) & ((accepted < judged) | (proposed <= judged))
