"""One fixed action along recorded answers: as `walk` has it, without a record for each block, and so much faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autospec.policies.base import CostEstimates
from autospec.policies.prices import Prices
from autospec.scores.luck import Luck
from autospec.scores.scored import ScoredRequest
from autospec.scores.walk import LONGEST, Walked, catch_up_seconds
from autospec.types import NONE, Action


def walk_fixed(
    action: Action,
    requests: Sequence[ScoredRequest],
    costs: CostEstimates,
    *,
    luck: Luck,
    host_seconds: float = 0.0,
) -> Iterator[Walked]:
    """What `walk(Fixed(...), ...)` gives. Arguments as there.

    Args:
        action: taken in every block, as far as there is room.
    """
    prices = Prices(costs, pads=False, longest=LONGEST)
    for request in requests:
        is_there = action.block_length > 0 and action.source in request.sources
        yield _one(action if is_there else Action(), request, prices, luck, host_seconds)


def _one(action: Action, request: ScoredRequest, prices: Prices, luck: Luck, host_seconds: float) -> Walked:
    walked = Walked(request)
    offer = request.offers.get(action.source)
    right: list[int] = []
    drafts: list[int] | None = None
    if offer is not None:
        right, drafts = offer.num_right.tolist(), offer.num_tokens.tolist()
    elif action.block_length:
        right = luck.runs(request, action.source).tolist()
    source, most, length = action.source, request.max_new_tokens, request.output_tokens
    position = min(1, length)
    seconds = off_seconds = 0.0
    labels: dict[int, int] = {}
    lengths: dict[int, int] = {}
    is_model, has_drafted = offer is None, False
    while position < length:
        context = request.prompt_tokens + position
        listed = prices.at(context)
        asked = min(action.block_length, most - position - 1, LONGEST)
        drafted = accepted = 0
        if asked > 0:
            drafted = asked if drafts is None else min(asked, drafts[position])
            accepted = min(drafted, right[position])
            seconds += prices.steps(source, listed)[asked]
            if is_model and not has_drafted:
                seconds += catch_up_seconds(prices, source, context, context)
                has_drafted = True
        else:
            asked = 0
        committed = min(accepted + 1, length - position)
        seconds += listed.verify[drafted] + host_seconds
        off_seconds += committed * (listed.step + host_seconds)
        labels[asked] = labels.get(asked, 0) + 1
        lengths[committed] = lengths.get(committed, 0) + 1
        walked.num_draft_tokens += drafted
        walked.num_judged_tokens += min(committed, drafted)
        walked.num_accepted_tokens += min(accepted, committed)
        position += committed
    walked.seconds, walked.off_seconds, walked.blocks = seconds, off_seconds, sum(labels.values())
    walked.acceptance_lengths.update(lengths)
    for asked, count in labels.items():
        walked.actions[f"{source}:{asked}" if asked else NONE] += count
    return walked
