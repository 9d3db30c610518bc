"""A policy's blocks along recorded answers: what live decoding would have done, without a forward.

Whether a draft token was accepted is drawn once for each position of an answer and source, from a seed: every policy
meets the same luck (common random numbers). No position is judged twice in one walk, so the law of its blocks is that
of live decoding.

Source: docs/tune.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autospec.policies.base import CostEstimates, Policy, asked
from autospec.policies.prices import Prices
from autospec.scores.luck import Luck
from autospec.scores.offering import OfferWalk
from autospec.scores.scored import DraftScores, ScoredRequest
from autospec.types import NONE, Action, BlockContext, BlockOutcome, RequestContext, Stop

CONTROL = Action(reason="control")
LONGEST = 64
"""Draft tokens of a block; a longer one is walked as if it were this long."""


@dataclass(slots=True)
class Walked:
    """What one request came to."""

    request: ScoredRequest
    is_control: bool = False
    blocks: int = 0
    num_draft_tokens: int = 0
    num_judged_tokens: int = 0
    num_accepted_tokens: int = 0
    seconds: float = 0.0  # of its blocks, catching up included; prefill is not
    off_seconds: float = 0.0  # of plain steps in their stead
    actions: Counter[str] = field(default_factory=Counter)  # Action.label -> blocks
    acceptance_lengths: Counter[int] = field(default_factory=Counter)  # tokens committed (+1 included) -> blocks

    @property
    def whole_seconds(self) -> float:
        """Of the request, prefill included where it is known."""
        return self.seconds + (self.request.prefill_seconds or 0.0)

    @property
    def whole_off_seconds(self) -> float:
        """The same, decoded plainly."""
        return self.off_seconds + (self.request.prefill_seconds or 0.0)


def walk(
    policy: Policy,
    requests: Sequence[ScoredRequest],
    costs: CostEstimates,
    *,
    luck: Luck,
    host_seconds: float = 0.0,
) -> Iterator[Walked]:
    """The policy along all answers, in the order in which the requests arrived; it learns as it does in service.

    Args:
        policy: chooses before each block. It is told the seconds that `costs` expect.
        requests: scored.
        costs: of the device.
        luck: whether a model draft's tokens were accepted.
        host_seconds: of a block beside drafting and verifying: choosing tokens, streaming, bookkeeping.
    """
    prices = Prices(costs, pads=hasattr(policy, "verify_width"), longest=LONGEST)
    for request in requests:
        yield _Walk(policy, request, prices, luck, host_seconds).run()


def catch_up_seconds(prices: Prices, source: str, backlog: int, context_tokens: int) -> float:
    """A model draft's reading of tokens that it has not seen; one or two are part of drafting."""
    return prices.catch_up(source, backlog, prices.at(context_tokens)) if backlog > 2 else 0.0


class _Walk:
    """Along one answer. Positions are those of the answer; the first token comes from the prompt's forward."""

    def __init__(self, policy: Policy, request: ScoredRequest, prices: Prices, luck: Luck, host_seconds: float) -> None:
        self._policy, self._request, self._prices = policy, request, prices
        self._host_seconds = host_seconds
        self._runs = {name: luck.runs(request, name) for name in request.drafts}
        self._context = RequestContext(
            request.segment,
            request.prompt_tokens,
            request.max_new_tokens,
            request.do_sample,
            request.sources,
            request.temperature,
        )
        names = asked(policy, request.segment, tuple(request.offers))
        self._offers = OfferWalk(request, names) if names else None
        self._drafted_at: dict[str, int] = {}
        self._drafted_last: str | None = None
        self._stoppable = frozenset(request.drafts)
        self._width = getattr(policy, "verify_width", None)
        self._walked = Walked(request)

    def run(self) -> Walked:
        takes = getattr(self._policy, "is_control", None)
        self._walked.is_control = bool(takes is not None and takes(self._context))
        position = min(1, self._request.output_tokens)
        while position < self._request.output_tokens:
            position += self._block(position)
        return self._walked

    def _block(self, position: int) -> int:
        """One block. Returns: tokens committed."""
        request, walked = self._request, self._walked
        room = request.max_new_tokens - position - 1
        context_tokens = request.prompt_tokens + position
        action = CONTROL
        if not walked.is_control:
            action = self._policy.choose(self._block_context(position, context_tokens, room))
        block_length = min(action.block_length, room, LONGEST)
        if block_length < 1 or action.source == NONE:
            action, drafted, right = Action(reason=action.reason), 0, 0
            confidences: tuple[tuple[float, float], ...] = ()
        else:
            if block_length < action.block_length:
                action = Action(action.source, block_length, action.reason, action.gain, action.stop)
            drafted, right, confidences = self._draft(action, position)
        committed = min(right + 1, request.output_tokens - position)
        outcome = self._outcome(action, position, context_tokens, drafted, right, committed, confidences)
        self._policy.observe(outcome)
        self._drafted_last = action.source if action.block_length else None
        if self._drafted_last is not None:
            self._drafted_at[action.source] = context_tokens
        walked.blocks += 1
        walked.num_draft_tokens += drafted
        walked.num_judged_tokens += outcome.num_judged_tokens
        walked.num_accepted_tokens += outcome.num_accepted_tokens
        walked.seconds += outcome.seconds + outcome.catch_up_seconds
        walked.off_seconds += committed * (self._prices.at(context_tokens).step + self._host_seconds)
        walked.actions[action.label] += 1
        walked.acceptance_lengths[committed] += 1
        return committed

    def _block_context(self, position: int, context_tokens: int, room: int) -> BlockContext:
        return BlockContext(
            self._context,
            context_tokens,
            position,
            self._request.sources,
            self._offers.at(position, room) if self._offers is not None and room >= 1 else {},
            {name: self._backlog(name, context_tokens) for name in self._request.drafts},
            self._stoppable,
        )

    def _backlog(self, name: str, context_tokens: int) -> int:
        return 0 if name == self._drafted_last else context_tokens - self._drafted_at.get(name, 0)

    def _draft(self, action: Action, position: int) -> tuple[int, int, tuple[tuple[float, float], ...]]:
        """Tokens drafted, of these the first ones that are accepted, and what a stop was asked with."""
        offer = self._request.offers.get(action.source)
        if offer is not None:
            drafted = min(int(offer.num_tokens[position]), action.block_length)
            return drafted, min(drafted, int(offer.num_right[position])), ()
        run = int(self._runs[action.source][position])
        if action.stop is None:
            return action.block_length, min(run, action.block_length), ()
        scores = self._request.drafts[action.source]
        drafted, confidences = _until_stopped(action.stop, scores, position, action.block_length)
        return drafted, min(run, drafted), confidences

    def _outcome(
        self,
        action: Action,
        position: int,
        context_tokens: int,
        drafted: int,
        right: int,
        committed: int,
        confidences: tuple[tuple[float, float], ...],
    ) -> BlockOutcome:
        request, prices = self._request, self._prices
        listed = prices.at(context_tokens)
        steps = len(confidences) or action.block_length
        catch_up_tokens = self._backlog(action.source, context_tokens) if action.source in request.drafts else 0
        caught_up = catch_up_seconds(prices, action.source, catch_up_tokens, context_tokens) if steps else 0.0
        width = drafted + 1 if self._width is None or not drafted else self._width(drafted + 1, context_tokens)
        end = position + committed
        return BlockOutcome(
            segment=request.segment,
            action=action if action.block_length else Action(reason=action.reason),
            context_tokens=context_tokens,
            num_draft_tokens=drafted,
            num_judged_tokens=min(committed, drafted),
            num_accepted_tokens=min(right, committed),
            num_committed_tokens=committed,
            draft_seconds=prices.steps(action.source, listed)[steps] if steps else 0.0,
            verify_seconds=listed.verify[drafted],
            correction_seconds=self._host_seconds,
            catch_up_seconds=caught_up,
            catch_up_tokens=catch_up_tokens,
            request=self._context,
            offers=() if self._offers is None else self._offers.settle(end),
            confidences=confidences,
            num_padding_tokens=width - drafted - 1,
        )


def _until_stopped(
    stop: Stop, scores: DraftScores, position: int, block_length: int
) -> tuple[int, tuple[tuple[float, float], ...]]:
    """Margins and entropies beyond the first rejection are taken to be those along the answer, and beyond its end as
    its last ones: the draft does not know where the answer ends."""
    confidences: list[tuple[float, float]] = []
    for drafted in range(block_length):
        place = min(position + drafted, len(scores.margin) - 1)
        confidences.append((float(scores.margin[place]), float(scores.entropy[place])))
        if stop.ends(*confidences[-1]):
            return drafted, tuple(confidences)
        if not stop.wants_more():
            break
    return len(confidences), tuple(confidences)


@dataclass(frozen=True, slots=True)
class Totals:
    """Of several requests."""

    requests: int
    output_tokens: int
    blocks: int
    num_draft_tokens: int
    num_accepted_tokens: int
    seconds: float  # prefill, where known, included
    off_seconds: float
    actions: Mapping[str, int]

    @property
    def speed_up(self) -> float | None:
        """Plain decoding's seconds over the policy's; None of nothing."""
        return self.off_seconds / self.seconds if self.seconds > 0.0 else None


def totals(walks: Sequence[Walked]) -> Totals:
    """Sums; a ratio of them is one of totals, never a mean of ratios."""
    return Totals(
        requests=len(walks),
        output_tokens=sum(each.request.output_tokens for each in walks),
        blocks=sum(each.blocks for each in walks),
        num_draft_tokens=sum(each.num_draft_tokens for each in walks),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in walks),
        seconds=sum(each.whole_seconds for each in walks),
        off_seconds=sum(each.whole_off_seconds for each in walks),
        actions=dict(sum((each.actions for each in walks), Counter[str]())),
    )


def by_segment(walks: Sequence[Walked]) -> dict[str, Totals]:
    """Totals of each segment, in the order in which they were first seen."""
    groups: dict[str, list[Walked]] = {}
    for each in walks:
        groups.setdefault(each.request.segment, []).append(each)
    return {segment: totals(group) for segment, group in groups.items()}


__all__ = ["Totals", "Walked", "by_segment", "totals", "walk"]
