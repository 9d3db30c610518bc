"""What retrieval sources offer along a recorded answer, and when it is known what became of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autospec.decoding.offers import FADE
from autospec.scores.scored import OfferScores, ScoredRequest
from autospec.types import Offer, OfferOutcome


class OfferWalk:
    """Offers of one walk: as `autospec.decoding.offers.Offers`, with fates read off the scores.

    Args:
        request: scored.
        names: of the sources that are asked.
    """

    def __init__(self, request: ScoredRequest, names: Collection[str]) -> None:
        self._request = request
        self._scores = {name: scores for name, scores in request.offers.items() if name in names}
        self._pending: list[tuple[str, Offer, int, int]] = []  # source, offer, position, tokens that are right
        self._recent: dict[str, float] = {}

    def at(self, position: int, room: int) -> Mapping[str, Offer]:
        """What each source would propose after `position` tokens of the answer."""
        return {name: self._offer(name, scores, position, room) for name, scores in self._scores.items()}

    def _offer(self, name: str, scores: OfferScores, position: int, room: int) -> Offer:
        num_tokens = min(int(scores.num_tokens[position]), room)
        offer = Offer(
            num_tokens,
            int(scores.match_length[position]),
            scores.scores[position][:num_tokens],
            self._recent.get(name),
        )
        self._pending.append((name, offer, position, min(int(scores.num_right[position]), num_tokens)))
        return offer

    def settle(self, end: int) -> tuple[OfferOutcome, ...]:
        """Offers whose fate is known once `end` tokens of the answer are committed."""
        is_finished = end >= self._request.output_tokens
        settled, waiting = [], []
        for each in self._pending:
            name, offer, position, right = each
            seen = end - position
            is_whole = right == offer.num_tokens
            if not is_finished and seen < right + (not is_whole):
                waiting.append(each)
                continue
            accepted = min(right, seen)
            judged = accepted + (not is_whole and seen > right)
            if judged:
                before = self._recent.get(name, 0.5)
                self._recent[name] = FADE * before + (1.0 - FADE) * (accepted > 0)
            settled.append(OfferOutcome(name, offer, position, judged, accepted))
        self._pending = waiting
        return tuple(settled)
