"""What retrieval sources would propose, and what would have become of it: also where another action was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autospec.drafts.base import Proposal
from autospec.types import Offer, OfferOutcome

FADE = 0.8  # weight that an earlier fate keeps at each new one, in `Offer.recent_acceptance`


@dataclass(slots=True)
class _Pending:
    source: str
    offer: Offer
    tokens: list[int]
    start: int  # position in the text of its first token
    output_tokens: int
    num_accepted: int = 0


class Offers:
    """The offers of one request. Their fates are read off the committed text, whichever draft it came from."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._recent: dict[str, float] = {}

    def add(self, source: str, proposal: Proposal, start: int, output_tokens: int) -> Offer:
        """Note what a source would propose now.

        Args:
            start: number of committed tokens, prompt included.
            output_tokens: of these, those of the answer.
        """
        offer = Offer(
            num_tokens=len(proposal.tokens),
            match_length=proposal.match_length,
            scores=tuple(proposal.scores),
            recent_acceptance=self._recent.get(source),
        )
        self._pending.append(_Pending(source, offer, proposal.tokens, start, output_tokens))
        return offer

    def settle(self, text: Sequence[int], *, is_finished: bool) -> tuple[OfferOutcome, ...]:
        """The offers whose fate is known by now, in the order in which they were made.

        Args:
            text: all committed tokens, prompt included.
            is_finished: no token will follow; offers that reach beyond the end are judged as far as it goes.
        """
        settled, waiting = [], []
        for each in self._pending:
            num_judged = self._judge(each, text)
            if num_judged is None and not is_finished:
                waiting.append(each)
                continue
            judged = each.num_accepted if num_judged is None else num_judged
            if judged:
                before = self._recent.get(each.source, 0.5)
                self._recent[each.source] = FADE * before + (1.0 - FADE) * (each.num_accepted > 0)
            settled.append(OfferOutcome(each.source, each.offer, each.output_tokens, judged, each.num_accepted))
        self._pending = waiting
        return tuple(settled)

    @staticmethod
    def _judge(each: _Pending, text: Sequence[int]) -> int | None:
        """How many of its tokens have been judged; None while more of them may be."""
        while each.num_accepted < len(each.tokens):
            position = each.start + each.num_accepted
            if position >= len(text):
                return None
            if text[position] != each.tokens[each.num_accepted]:
                return each.num_accepted + 1
            each.num_accepted += 1
        return each.num_accepted
