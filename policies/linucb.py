"""A linear model of each arm over what is known before a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from autospec.policies.arms import Arms, BySegment, Pending, PlainSteps
from autospec.policies.base import CostEstimates, check_range
from autospec.policies.evidence import Sums
from autospec.policies.reading import Floats, Indices, check_precision, finite, reading_state
from autospec.policies.scale import Scale
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome

FEATURES = (
    "one",
    "temperature",
    "sampled or not",
    "context tokens",
    "output tokens",
    "offers or not",
    "offered tokens",
    "match length",
    "last score",
)
_SIZE = len(FEATURES)
_ROW, _COLUMN = np.triu_indices(_SIZE)
_TIMES = np.where(_ROW == _COLUMN, 1.0, 2.0)
_TYPICAL_CONTEXT = 256
_MAX_CACHED = 20_000
_OFFSETS = 5  # rows
_UNTAUGHT = 2  # first blocks of an arm, which teach nothing but what is usual
_LEAST_SPREAD = 0.5  # tokens; a few rejections in a row are no certainty
_LEAST_SECONDS = 0.5  # plain steps that a block is thought to take at least


class _Shape(NamedTuple):
    """What choices among the same arms share; arrays are [n]."""

    which: Indices  # 0 for the plain step, 1 for arms of the first source, and so on
    most_tokens: Floats
    prior_seconds: Floats


class LinUCB:
    """Predicts tokens and seconds of every arm from features, and plays the arm whose goodput might be largest.

    Each arm has its own ridge regressions over temperature, sampling, lengths of context and output, and length,
    match and last score of its source's offer. They are shared by all segments, since features explain what changes
    within a segment, and a matrix for each arm and segment would take hundreds of megabytes; a segment adds an offset
    to each arm's two predictions, shrunk by the number of its blocks. A stall of the machine counts as a usual block.

    Args:
        costs: the block lengths to choose between, and seconds: of a plain step, and of each block to begin with.
        width: standard deviations of its tokens that an arm is hoped to be better; 0 plays what is thought best.
        ridge: blocks of evidence that the prior (nothing is accepted, seconds as predicted by costs) counts for.
        discount: weight that an arm's old evidence keeps at each new block of it.
        strength: blocks after which a segment's own offset counts half.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: disjoint LinUCB of Li, Chu, Langford and Schapire 2010.
    """

    name = "linucb"
    wants_offers = True

    def __init__(
        self,
        costs: CostEstimates,
        *,
        width: float = 1.0,
        ridge: float = 1.0,
        discount: float = 0.999,
        strength: float = 8.0,
    ) -> None:
        check_range("width", width, 0.0, 100.0)
        check_range("ridge", ridge, 1e-6, 1e6)
        check_range("discount", discount, 0.5, 1.0)
        check_range("strength", strength, 1e-6, 1e6)
        self.settings: dict[str, object] = {
            "width": width,
            "ridge": ridge,
            "discount": discount,
            "strength": strength,
        }
        self._width = width
        self._ridge = ridge
        self._discount = discount
        self._strength = strength
        self._arms = Arms(costs)
        self._steps = PlainSteps(costs)
        self._usual = Sums()  # of seconds
        self._scale = Scale()
        self._played: Pending[tuple[int, Floats]] = Pending()  # arm, and its features
        # by arm: blocks, tokens and seconds left over, and what follows from them for tokens and seconds of a block
        self._segments: BySegment[Floats] = BySegment(lambda: np.zeros((_OFFSETS, 1)))
        self._gram = np.zeros((0, _SIZE, _SIZE))  # [arms]
        self._moments = np.zeros((0, 2, _SIZE))  # of tokens - 1 and of seconds less those of the prior
        self._prior_seconds = np.zeros(0)  # by the costs when the arm was first met
        self._shapes: dict[tuple[tuple[str, ...], bytes], _Shape] = {}
        self._has_untaught = True
        self._derive()

    def choose(self, context: BlockContext) -> Action:
        arms = self._arms.usable(context)
        if len(arms) == 1:
            return OFF
        self._grow()
        kinds = features(context)
        which, most, prior_seconds = self._shape(context.sources, arms)
        known = (self._weights.reshape(-1, _SIZE) @ kinds.T).reshape(-1, 2, len(kinds))[arms, :, which].T
        known += self._offsets(context.segment)[3:].take(arms, axis=1)
        tokens = np.maximum(1.0 + known[0], 1.0)
        seconds = np.maximum(prior_seconds + known[1], _LEAST_SECONDS)
        # x' inverse x over the upper triangle, for all arms and sources at once
        products = kinds.take(_ROW, axis=1) * kinds.take(_COLUMN, axis=1)
        doubt = np.sqrt(np.abs((self._doubts @ products.T)[arms, which]))
        doubt[0] = 0.0  # a plain step commits one token
        goodput = np.minimum(tokens, most) / seconds
        hoped = np.minimum(tokens + self._width * max(self._scale.value, _LEAST_SPREAD) * doubt, most) / seconds
        chosen = int(hoped.argmax())
        if self._has_untaught and (tries := self._usual.tries(arms, len(self._arms))).min() <= _UNTAUGHT:
            chosen = int(tries.argmin())
        self._played.note(context, (int(arms[chosen]), kinds[which[chosen]]))
        kind = "best" if chosen == int(goodput.argmax()) else "explore"
        return self._arms.action(int(arms[chosen]), kind, float(goodput[chosen] / goodput[0]), len(arms))

    def observe(self, outcome: BlockOutcome) -> None:
        played = self._played.take(outcome)
        measured = outcome.seconds / self._steps.unit(outcome.context_tokens)
        if played is None or self._arms.of(outcome.action) != played[0] or not 0.0 < measured < math.inf:
            return
        arm, seen = played
        self._grow()
        seconds = self._usual.add(arm, outcome.num_committed_tokens, measured, self._discount)
        tries = self._usual.tries(np.arange(len(self._arms)), len(self._arms))
        self._has_untaught = bool(tries.min() <= _UNTAUGHT)
        if tries[arm] <= _UNTAUGHT:
            return  # nothing to hold its seconds against: they may have been those of a stall
        left = np.array([outcome.num_committed_tokens - 1.0, seconds - self._prior_seconds[arm]])
        left_over = left - self._weights[arm] @ seen
        if arm:
            self._scale.add(float(left_over[0]))
        offsets = self._offsets(outcome.segment)
        offsets[:3, arm] = self._discount * offsets[:3, arm] + [1.0, *left_over]
        offsets[3:, arm] = offsets[1:3, arm] / (offsets[0, arm] + self._strength)
        self._gram[arm] = self._discount * self._gram[arm] + np.outer(seen, seen)
        self._moments[arm] = self._discount * self._moments[arm] + np.outer(left, seen)
        self._solve(arm)

    def _shape(self, sources: tuple[str, ...], arms: Indices) -> _Shape:
        key = (sources, arms.tobytes())
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= _MAX_CACHED:
                self._shapes.clear()
            places = {source: place for place, source in enumerate((NONE, *sources))}
            names = [self._arms.names[arm] for arm in arms.tolist()]
            which = np.array([places[source] for source, _ in names], dtype=np.intp)
            most = np.array([1.0 + k for _, k in names])
            found = self._shapes[key] = _Shape(which, most, self._prior_seconds[arms])
        return found

    def _offsets(self, segment: str) -> Floats:
        found = self._segments.seen(segment)
        missing = len(self._arms) - found.shape[1]
        if missing > 0:
            found = np.concatenate([found, np.zeros((_OFFSETS, missing))], axis=1)
            self._segments.put(segment, found)
        return found

    def _grow(self) -> None:
        missing = len(self._arms) - len(self._gram)
        if missing > 0:
            self._gram = np.concatenate([self._gram, np.zeros((missing, _SIZE, _SIZE))])
            self._moments = np.concatenate([self._moments, np.zeros((missing, 2, _SIZE))])
            new = self._arms.names[-missing:]
            seconds = [min(self._steps.of(source, k, k, _TYPICAL_CONTEXT), 1.0 + k) for source, k in new]
            self._prior_seconds = np.concatenate([self._prior_seconds, seconds])
            self._has_untaught = True
            self._derive()

    def _derive(self) -> None:
        """What follows from arms, Gram matrices and moments."""
        names = self._arms.names[: len(self._gram)]
        self._doubts = np.zeros((len(names), len(_ROW)))  # inverses, each pair of features once
        self._weights = np.zeros((len(names), 2, _SIZE))
        for arm in range(len(names)):
            self._solve(arm)

    def _solve(self, arm: int) -> None:
        inverse = np.linalg.inv(self._gram[arm] + self._ridge * np.eye(_SIZE))
        self._doubts[arm] = inverse[_ROW, _COLUMN] * _TIMES
        self._weights[arm] = self._moments[arm] @ inverse

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {
            "arms": self._arms.state(),
            "usual": self._usual.state(),
            "scale": self._scale.state(),
            "gram": self._gram.tolist(),
            "moments": self._moments.tolist(),
            "prior_seconds": self._prior_seconds.tolist(),
            "segments": self._segments.state(lambda offsets: offsets.tolist()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        keys = ("arms", "usual", "scale", "gram", "moments", "prior_seconds", "segments")
        with reading_state(self.name, state, keys):
            arms, scale = self._arms.restored(state["arms"]), Scale.restored(state["scale"])
            usual = Sums.restored(state["usual"], len(arms))
            count = len(state["gram"])
            gram = finite(state["gram"], (count, _SIZE, _SIZE) if count else (0,)).reshape(count, _SIZE, _SIZE)
            moments = finite(state["moments"], (count, 2, _SIZE) if count else (0,)).reshape(count, 2, _SIZE)
            check_precision(gram + self._ridge * np.eye(_SIZE))
            prior_seconds = finite(state["prior_seconds"], (count,), 0.0)
            segments = self._segments.restored(state["segments"], _read_offsets)
            if count > len(arms):
                raise ValueError(f"matrices of {count} arms, and {len(arms)} arms")
        self._arms, self._scale, self._usual, self._segments = arms, scale, usual, segments
        self._gram, self._moments, self._played, self._shapes = gram, moments, Pending(), {}
        self._prior_seconds, self._has_untaught = prior_seconds, True
        self._derive()


def _read_offsets(state: Any) -> Floats:
    offsets = finite(state, (_OFFSETS, max(1, len(state[0]))))
    finite(state[0], offsets[0].shape, 0.0)  # blocks
    return offsets


def features(context: BlockContext) -> Floats:
    """[1 + sources, FEATURES], of about the same size each: for the plain step, and for each source in its order."""
    request = context.request
    found = np.zeros((1 + len(context.sources), _SIZE))
    found[:, :5] = (
        1.0,
        min(request.temperature, 2.0),
        float(request.do_sample),
        math.log2(1 + context.context_tokens) / 10.0,
        math.log2(1 + context.output_tokens) / 10.0,
    )
    for place, source in enumerate(context.sources, start=1):
        offer = context.offers.get(source)
        if offer is not None:
            found[place, 5:] = (
                1.0,
                math.log2(1 + offer.num_tokens) / 4.0,
                math.log2(1 + offer.match_length) / 4.0,
                offer.scores[-1] if offer.scores else 0.0,
            )
    return found
