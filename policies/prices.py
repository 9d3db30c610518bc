"""What blocks cost, looked up from the cost estimates once for contexts of about the same length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autospec.policies.base import CostEstimates

_CONTEXT_TOKENS = 64
"""Contexts that differ by less are priced alike."""

_READ_AT_ONCE = 64
"""Tokens that a draft model reads in about the time of one of its steps, where nothing was measured."""

_MOST = 4096
"""Price lists kept."""


@dataclass(frozen=True, slots=True)
class PriceList:
    """Seconds at one length of context."""

    block_lengths: list[int]
    context_tokens: int
    verify: list[float]  # [longest block + 1], by draft tokens verified; at a wider width where that is cheaper
    verify_blocks: list[float]  # [block lengths], of these: of a block that is as long as it was asked to be
    draft: dict[str, list[float] | None]  # [block lengths] by source; None where it cannot be used
    steps: dict[str, list[float]]  # [longest block + 1] by source, of those that can be used, as far as asked for

    @property
    def step(self) -> float:
        """A plain step."""
        return self.verify[0]


class Prices:
    """Price lists of a device, made anew when its estimates change.

    Args:
        costs: estimates; their `version`, if they have one, grows whenever they change.
        longest: block length that is priced at least.
        pads: verification is padded to a wider forward where the costs say that this one is cheaper.
    """

    def __init__(self, costs: CostEstimates, *, pads: bool = True, longest: int = 0) -> None:
        self._costs = costs
        self._longest = longest
        self._cheapest = getattr(costs, "cheapest_width", None) if pads else None
        self._read_seconds = getattr(costs, "catch_up_seconds", None)
        self._grows = getattr(costs, "depends_on_context", True)
        self._lists: dict[int, PriceList] = {}
        self._version: object = None

    def at(self, context_tokens: int) -> PriceList:
        """Prices after so many committed tokens. Draft sources are added to it as they are asked for."""
        version = getattr(self._costs, "version", 0)
        if version != self._version or len(self._lists) > _MOST:
            self._lists, self._version = {}, version
        key = context_tokens // _CONTEXT_TOKENS if self._grows else 0
        prices = self._lists.get(key)
        if prices is None:
            lengths = list(self._costs.block_lengths)
            longest = max(lengths[-1] if lengths else 0, self._longest)
            context = _typical(context_tokens)
            widths = [self.width(tokens, context) for tokens in range(2, longest + 2)]
            verify = [self._costs.verify_seconds(width, context) for width in (1, *widths)]  # a plain step stays one
            of_blocks = [verify[length] for length in lengths]
            prices = self._lists[key] = PriceList(lengths, context, verify, of_blocks, {}, {})
        return prices

    def catch_up(self, source: str, backlog: int, prices: PriceList) -> float:
        """A draft's reading of `backlog` tokens that it has not seen, as measured; else a step for every 64.

        Where fewer are read than were ever measured, the seconds lie between one step's and those.
        """
        step = self.steps(source, prices)[1] if len(prices.verify) > 1 else 0.0
        seconds = None if self._read_seconds is None else self._read_seconds(source, backlog)
        if seconds is None:
            return step * (1.0 + backlog / _READ_AT_ONCE)
        return float(step + max(0.0, seconds - step) * min(1.0, backlog / _READ_AT_ONCE))

    def width(self, num_tokens: int, context_tokens: int) -> int:
        """Tokens of the forward that verifies so many at the least cost."""
        return num_tokens if self._cheapest is None else int(self._cheapest(num_tokens, context_tokens))

    def draft(self, source: str, prices: PriceList) -> list[float] | None:
        """[block lengths of the list], seconds of one proposal; None where the source cannot be used."""
        if source not in prices.draft:
            context = prices.context_tokens
            seconds = [self._costs.draft_seconds(source, length, context) for length in prices.block_lengths]
            prices.draft[source] = None if math.inf in seconds else seconds
        return prices.draft[source]

    def steps(self, source: str, prices: PriceList) -> list[float]:
        """[longest block + 1], seconds of drafting so many tokens; of a source that can be used."""
        found = prices.steps.get(source)
        if found is None:
            each = range(1, len(prices.verify))
            found = [0.0, *(self._costs.draft_seconds(source, length, prices.context_tokens) for length in each)]
            prices.steps[source] = found
        return found

    def seconds(self, source: str, num_draft_steps: int, num_draft_tokens: int, context_tokens: int) -> float:
        """A block as it was: so many positions drafted or asked for, so many tokens proposed."""
        prices = self.at(context_tokens)
        longest = len(prices.verify) - 1
        proposed = prices.verify[min(num_draft_tokens, longest)]
        if not num_draft_steps or not self.draft(source, prices):
            return proposed
        return proposed + self.steps(source, prices)[min(num_draft_steps, longest)]


def _typical(context_tokens: int) -> int:
    return context_tokens // _CONTEXT_TOKENS * _CONTEXT_TOKENS + _CONTEXT_TOKENS // 2
