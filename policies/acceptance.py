"""How many draft tokens are likely to be accepted, by segment and source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.base import MAX_SEGMENTS, check_range
from autospec.policies.confidence import Confidence, features, margin_logit, score_logits, token_features
from autospec.policies.counts import MAX_POSITIONS, Counts
from autospec.types import BlockContext, BlockOutcome, OfferOutcome, RequestContext

_NOTHING = Counts()
_NEGLIGIBLE = 0.01


class AcceptanceModel:
    """Beta estimates of acceptance from at-risk counts, corrected by what is known of an offer.

    Position j is at risk only in blocks that proposed at least j tokens and accepted j - 1 of them, so blocks cut short
    by a policy, by EOS or by the length limit do not bias it. A segment's estimate is shrunk towards the source's
    over all segments, and that one towards the prior. What is known of an offer before it is judged (the length of its
    match, its scores, how the source fared lately in the request, temperature, position) moves the logit of the
    estimate, see `policies/confidence.py`.

    Args:
        discount: weight kept by old evidence at each new block of the same segment and source.
        prior_acceptance: acceptance expected of a source never tried.
        strength: blocks of evidence that the broader estimate counts for.
    """

    def __init__(self, *, discount: float = 0.98, prior_acceptance: float = 0.8, strength: float = 4.0) -> None:
        check_range("discount", discount, 0.0, 1.0)
        check_range("prior_acceptance", prior_acceptance, 0.0, 1.0)
        check_range("strength", strength, 1e-6, 1e6)
        self._discount = discount
        self._prior = prior_acceptance
        self._strength = strength
        self._by_segment: dict[str, dict[str, Counts]] = {}
        self._by_source: dict[str, Counts] = {}
        self._confidence: dict[str, Confidence] = {}

    @property
    def settings(self) -> dict[str, object]:
        """As it was made, in plain values."""
        return {"discount": self._discount, "prior_acceptance": self._prior, "strength": self._strength}

    def add(self, outcome: BlockOutcome) -> None:
        """Learn from one block that asked a source for drafts."""
        judged, accepted, source = outcome.num_judged_tokens, outcome.num_accepted_tokens, outcome.action.source
        own = self._own(outcome.segment, source)
        own.notice_change(judged, accepted)
        expected_next = None
        if outcome.confidences and outcome.request is not None:
            temperature, output_tokens = outcome.request.temperature, outcome.output_tokens
            if len(outcome.confidences) > judged == accepted == outcome.num_draft_tokens:
                confident = self.confident(outcome.segment, source, temperature, output_tokens, judged + 1)
                expected_next = confident(judged, *outcome.confidences[judged])
            self._learn_confidences(own, outcome, temperature, output_tokens)
        num_wanted = max(outcome.num_draft_tokens, len(outcome.confidences))  # a block that was ended is no miss
        self._count(outcome.segment, source, num_wanted, judged, accepted, expected_next)

    def add_offer(self, request: RequestContext, settled: OfferOutcome) -> None:
        """Learn from an offer whose fate is known, whether it was used or not."""
        offer, source, judged = settled.offer, settled.source, settled.num_judged_tokens
        if judged:
            own = self._own(request.segment, source)
            values = features(offer, request.temperature, settled.output_tokens)
            scores = score_logits(offer.scores, judged)
            self._confidence_of(source).learn(
                [math.log(odds) for odds in self._odds(request.segment, source, judged)],
                [[value - mean for value, mean in zip(values, own.features, strict=True)]] * judged,
                None if scores is None else [score - own.score for score in scores],
                settled.num_accepted_tokens,
            )
            own.add_features(values, scores, self._discount)
        self._count(request.segment, source, offer.num_tokens, judged, settled.num_accepted_tokens)

    def blocks(self, segment: str, source: str) -> float:
        """Discounted number of blocks in which `source` was asked for drafts in this segment."""
        counts = self._find(segment, source)
        return counts.asked if counts else 0.0

    def survival(self, segment: str, source: str, block_length: int) -> list[float]:
        """[block_length], probability that at least j + 1 draft tokens are accepted in a block that has them.

        Less than a hundredth is taken for none.
        """
        survival, product = [], 1.0
        for odds in self._odds(segment, source, block_length):
            product *= odds / (1.0 + odds)
            if product < _NEGLIGIBLE:
                break
            survival.append(product)
        return survival + [0.0] * (block_length - len(survival))

    def expected_tokens(self, segment: str, source: str, block_length: int) -> list[float]:
        """[block_length + 1], accepted tokens expected of so many draft tokens, in a block that has any."""
        own, broad = self._find(segment, source) or _NOTHING, self._by_source.get(source, _NOTHING)
        for_it, against_it = self._lean(own, broad)
        lean = for_it + against_it
        sums, total, product = [0.0], 0.0, 1.0
        for accepted, at_risk in zip(own.accepted, own.at_risk, strict=True):
            product *= (accepted + for_it) / (at_risk + lean)
            if product < _NEGLIGIBLE:
                break
            total += product
            sums.append(total)
        else:
            return self._further(sums, product, (accepted + for_it) / (at_risk + lean), block_length)
        sums += [total] * (block_length + 1 - len(sums))
        return sums

    @staticmethod
    def _further(sums: list[float], product: float, rate: float, block_length: int) -> list[float]:
        """Beyond the positions that are told apart, all fare as the last."""
        while len(sums) <= block_length:
            product *= rate
            sums.append(sums[-1] + (product if product >= _NEGLIGIBLE else 0.0))
        return sums

    def changes(self, segment: str, source: str) -> tuple[int, int]:
        """As long as this is the same, all that is expected of a source's blocks in the segment is, too."""
        own, broad = self._find(segment, source) or _NOTHING, self._by_source.get(source, _NOTHING)
        return own.changes, broad.changes

    def offer_survival(self, context: BlockContext, source: str) -> list[float]:
        """[num_tokens] of the source's offer, probability that at least j + 1 of its tokens are accepted.

        Less than a hundredth is taken for none.
        """
        offer = context.offers[source]
        confidence = self._confidence.get(source)
        own = self._find(context.segment, source)
        if confidence is None or own is None or not own.seen:
            return self.survival(context.segment, source, offer.num_tokens)
        values = features(offer, context.request.temperature, context.output_tokens)
        scores = offer.scores if len(offer.scores) >= offer.num_tokens else ()
        odds = self._odds(context.segment, source, offer.num_tokens)
        survival = confidence.survival(odds, values, own.features, scores, own.score, _NEGLIGIBLE)
        return survival + [0.0] * (offer.num_tokens - len(survival))

    def rates(self, segment: str, source: str, num_positions: int) -> list[float]:
        """[num_positions], acceptance of each position, given those before it."""
        return [odds / (1.0 + odds) for odds in self._odds(segment, source, num_positions)]

    def of_a_block(
        self, segment: str, source: str, temperature: float, output_tokens: int, num_positions: int
    ) -> tuple[list[float], Callable[[int, float, float], float]]:
        """Of a model draft's block: `rates`, and what `confident` gives."""
        odds = self._odds(segment, source, num_positions)
        rates = [each / (1.0 + each) for each in odds]
        return rates, self._confident(odds, segment, source, temperature, output_tokens)

    def confident(
        self, segment: str, source: str, temperature: float, output_tokens: int, num_positions: int
    ) -> Callable[[int, float, float], float]:
        """Acceptance at a position of a model draft's block, from its index and from margin and entropy of q there."""
        odds = self._odds(segment, source, num_positions)
        return self._confident(odds, segment, source, temperature, output_tokens)

    def _confident(
        self, odds: list[float], segment: str, source: str, temperature: float, output_tokens: int
    ) -> Callable[[int, float, float], float]:
        own, confidence = self._find(segment, source), self._confidence.get(source)
        if own is None or confidence is None or not own.seen:
            return lambda position, margin, entropy: odds[position] / (1.0 + odds[position])
        means, mean_score, rate = tuple(own.features), own.score, confidence.rate

        def accepted(position: int, margin: float, entropy: float) -> float:
            values = token_features(entropy, temperature, output_tokens)
            relative = [value - mean for value, mean in zip(values, means, strict=True)]
            return rate(odds[position], relative, margin_logit(margin) - mean_score)

        return accepted

    def optimistic_survival(
        self, segment: str, source: str, block_length: int, deviations: float, evidence: float
    ) -> list[float]:
        """[block_length], as `survival`, were each rate so many standard deviations better than it is thought to be.

        Args:
            evidence: share of what is known that still counts; the rest is thought to be as in a source never tried.
        """
        weight = evidence * self.blocks(segment, source) + self._strength
        unknown, spread = (1.0 - evidence) * self._prior, deviations * deviations / weight
        survival, product, sqrt = [], 1.0, math.sqrt
        for odds in self._odds(segment, source, block_length):
            rate = evidence * odds / (1.0 + odds) + unknown
            rate += sqrt(spread * rate * (1.0 - rate))
            if rate < 1.0:
                product *= rate
            if product < _NEGLIGIBLE:
                break
            survival.append(product)
        return survival + [0.0] * (block_length - len(survival))

    def hit_rate(self, segment: str, source: str) -> float:
        """Probability that the source has anything to propose."""
        broad = self._by_source.get(source, _NOTHING)
        own = self._find(segment, source) or _NOTHING
        broad_rate = _shrunk(broad.proposed, broad.asked, 1.0, self._strength)
        return _shrunk(own.proposed, own.asked, broad_rate, self._strength)

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {
            "by_segment": {
                segment: {source: counts.state() for source, counts in found.items()}
                for segment, found in self._by_segment.items()
            },
            "by_source": {source: counts.state() for source, counts in self._by_source.items()},
            "confidence": {source: each.state() for source, each in self._confidence.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        try:
            by_segment = {
                segment: {source: Counts.restored(each) for source, each in found.items()}
                for segment, found in state["by_segment"].items()
            }
            by_source = {source: Counts.restored(each) for source, each in state["by_source"].items()}
            confidence = {source: Confidence.restored(each) for source, each in state["confidence"].items()}
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigurationError(f"this is no state of an acceptance model: {error!r}") from error
        self._by_segment, self._by_source, self._confidence = by_segment, by_source, confidence

    def _own(self, segment: str, source: str) -> Counts:
        found = self._by_segment.pop(segment, None) or {}
        self._by_segment[segment] = found  # the newest last
        if len(self._by_segment) > MAX_SEGMENTS:
            del self._by_segment[next(iter(self._by_segment))]
        return _counts_of(found, source)

    def _find(self, segment: str, source: str) -> Counts | None:
        found = self._by_segment.get(segment)
        return found.get(source) if found else None

    def _confidence_of(self, source: str) -> Confidence:
        confidence = self._confidence.get(source)
        if confidence is None:
            confidence = self._confidence[source] = Confidence()
        return confidence

    def _learn_confidences(self, own: Counts, outcome: BlockOutcome, temperature: float, output_tokens: int) -> None:
        judged, source = outcome.num_judged_tokens, outcome.action.source
        values = [token_features(entropy, temperature, output_tokens) for _, entropy in outcome.confidences]
        scores = [margin_logit(margin) for margin, _ in outcome.confidences]
        if judged and own.seen:
            self._confidence_of(source).learn(
                [math.log(odds) for odds in self._odds(outcome.segment, source, judged)],
                [[value - mean for value, mean in zip(row, own.features, strict=True)] for row in values[:judged]],
                [score - own.score for score in scores[:judged]],
                outcome.num_accepted_tokens,
            )
        mean = [sum(column) / len(values) for column in zip(*values, strict=True)]
        own.add_features(mean, scores, self._discount)

    def _count(
        self,
        segment: str,
        source: str,
        num_draft: int,
        num_judged: int,
        num_accepted: int,
        expected_next: float | None = None,
    ) -> None:
        for counts in (self._own(segment, source), _counts_of(self._by_source, source)):
            counts.add(num_draft, num_judged, num_accepted, self._discount, expected_next)

    def _odds(self, segment: str, source: str, num_positions: int) -> list[float]:
        """[num_positions], acceptance over rejection of each position that is at risk."""
        own = self._find(segment, source) or _NOTHING
        broad = self._by_source.get(source, _NOTHING)
        for_it, against_it = self._lean(own, broad)
        pairs = zip(own.accepted[:num_positions], own.at_risk, strict=False)
        odds = [(accepted + for_it) / (at_risk - accepted + against_it) for accepted, at_risk in pairs]
        return odds if num_positions <= MAX_POSITIONS else odds + odds[-1:] * (num_positions - MAX_POSITIONS)

    def _lean(self, own: Counts, broad: Counts) -> tuple[float, float]:
        """Acceptances and rejections that every position begins with.

        They are of the rate pooled over positions, which itself is shrunk towards the broader estimate.
        """
        weight = self._strength
        rate = (broad.accepted_tokens + weight * self._prior) / (broad.judged_tokens + weight)
        rate = (own.accepted_tokens + weight * rate) / (own.judged_tokens + weight)
        return max(weight * rate, 1e-4), max(weight * (1.0 - rate), 1e-4)


def _counts_of(found: dict[str, Counts], source: str) -> Counts:
    counts = found.get(source)
    if counts is None:
        counts = found[source] = Counts()
    return counts


def _shrunk(successes: float, trials: float, mean: float, weight: float) -> float:
    """Posterior mean of a Beta whose prior has this mean and counts for `weight` trials."""
    return (successes + weight * mean) / (trials + weight)
