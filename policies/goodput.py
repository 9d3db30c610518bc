"""Model-based choice: the action with the most predicted goodput, plain decoding always among the candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autospec.policies.acceptance import AcceptanceModel
from autospec.policies.base import MAX_SEGMENTS, CostEstimates, check_range
from autospec.types import OFF, Action, BlockContext, BlockOutcome


class _Prediction(NamedTuple):
    goodput: float  # committed tokens per second, blocks without a proposal included
    goodput_on_hit: float  # of the blocks that have a proposal
    source: str
    block_length: int


@dataclass(slots=True)
class _SegmentState:
    """What was done last in a segment."""

    action: Action = OFF
    blocks_off: int = 0  # since a draft source was last tried


class Goodput:
    """Chooses the block with the most committed tokens per predicted second.

    The maximum is taken over all sources and block lengths at once: device cost is a staircase, so a walk from one
    length to the next would stop too early.

    Args:
        costs: seconds of drafting and verifying on this device.
        acceptance: what is learned of the sources; a fresh model if None.
        minimum_gain: predicted gain over plain decoding below which it is not left.
        hysteresis: predicted gain over the current action below which it is kept.
        probe_every: after so many plain blocks of a segment one block tries the best source again, so that acceptance
            that returns is found; this bounds the price of looking to about one block in so many.

    Source: goodput as in TurboSpec (Liu et al. 2024).
    """

    name = "auto"

    def __init__(
        self,
        costs: CostEstimates,
        *,
        acceptance: AcceptanceModel | None = None,
        minimum_gain: float = 0.02,
        hysteresis: float = 0.03,
        probe_every: int = 48,
    ) -> None:
        check_range("minimum_gain", minimum_gain, 0.0, 10.0)
        check_range("hysteresis", hysteresis, 0.0, 10.0)
        check_range("probe_every", probe_every, 1, 1_000_000)
        self._costs = costs
        self._acceptance = acceptance if acceptance is not None else AcceptanceModel()
        self._minimum_gain = minimum_gain
        self._hysteresis = hysteresis
        self._probe_every = probe_every
        self._segments: dict[str, _SegmentState] = {}

    @property
    def settings(self) -> dict[str, object]:
        """As it was made, in plain values; what is learned is no setting."""
        return {
            "block_lengths": list(self._costs.block_lengths),
            "minimum_gain": self._minimum_gain,
            "hysteresis": self._hysteresis,
            "probe_every": self._probe_every,
        }

    def choose(self, context: BlockContext) -> Action:
        state = self._state(context.segment)
        candidates = self._candidates(context)
        if not candidates:
            return OFF
        plain = 1.0 / self._costs.verify_seconds(1, context.context_tokens)
        best = max(candidates)
        words = f"{best.source}:{best.block_length} predicts {best.goodput / plain:.2f}x plain"
        if not self._pays(best, plain):
            if state.blocks_off >= self._probe_every:
                reason = f"probe after {state.blocks_off} plain blocks"
                return self._remember(state, Action(best.source, best.block_length, reason))
            return self._remember(state, Action(reason=f"off: best is {words}"))
        last = (state.action.source, state.action.block_length)
        kept = next((c for c in candidates if (c.source, c.block_length) == last), None)
        if kept and self._pays(kept, plain) and best.goodput < kept.goodput * (1.0 + self._hysteresis):
            return self._remember(state, Action(kept.source, kept.block_length, f"kept: {words}"))
        return self._remember(state, Action(best.source, best.block_length, f"best: {words}"))

    def observe(self, outcome: BlockOutcome) -> None:
        if outcome.action.block_length:
            self._acceptance.add(outcome)

    def _state(self, segment: str) -> _SegmentState:
        state = self._segments.pop(segment, None) or _SegmentState()
        self._segments[segment] = state  # the newest last
        if len(self._segments) > MAX_SEGMENTS:
            del self._segments[next(iter(self._segments))]
        return state

    def _candidates(self, context: BlockContext) -> list[_Prediction]:
        """Everything but plain decoding."""
        lengths = [k for k in self._costs.block_lengths if k < context.tokens_left]
        if not lengths:
            return []
        verify = {k: self._costs.verify_seconds(k + 1, context.context_tokens) for k in (0, *lengths)}
        return [p for source in context.sources for p in self._predict(context, source, lengths, verify)]

    def _pays(self, prediction: _Prediction, plain: float) -> bool:
        """Is it worth leaving plain decoding? A block without a proposal is a plain step, so blocks with one decide."""
        return prediction.goodput > plain and prediction.goodput_on_hit >= plain * (1.0 + self._minimum_gain)

    def _predict(
        self, context: BlockContext, source: str, lengths: list[int], verify: dict[int, float]
    ) -> Iterator[_Prediction]:
        """One source at each block length. Args: verify: block length -> seconds of its verification."""
        hit_rate = self._acceptance.hit_rate(context.segment, source)
        committed = 1.0 + np.cumsum(self._acceptance.survival(context.segment, source, lengths[-1]))
        for block_length in lengths:
            draft = self._costs.draft_seconds(source, block_length, context.context_tokens)
            if draft == math.inf:
                continue
            hit_tokens = float(committed[block_length - 1])
            hit_seconds = draft + verify[block_length]
            tokens = hit_rate * hit_tokens + (1.0 - hit_rate)
            seconds = hit_rate * hit_seconds + (1.0 - hit_rate) * (draft + verify[0])
            yield _Prediction(tokens / seconds, hit_tokens / hit_seconds, source, block_length)

    @staticmethod
    def _remember(state: _SegmentState, action: Action) -> Action:
        state.blocks_off = 0 if action.block_length else state.blocks_off + 1
        state.action = action
        return action
