"""What an offer's features say about its acceptance: a logistic correction, learned as offers are judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from autospec.types import Offer

FEATURES = ("match length", "recent acceptance", "temperature", "position in the output")
NUM_FEATURES = len(FEATURES)
_SIZE = NUM_FEATURES + 1  # and the score of each token, given those before it
_CERTAINTY = 4.0  # of the prior that features say nothing
_KEPT = 0.999  # of old evidence at each new offer
_LONGEST_STEP = 0.5
_FARTHEST = 6.0  # a shift of the logit
_LEAST_SHARE = 0.02  # of a score that is believed


def features(offer: Offer, temperature: float, output_tokens: int) -> list[float]:
    """[NUM_FEATURES], of about the same size each."""
    recent = 0.5 if offer.recent_acceptance is None else offer.recent_acceptance
    return [math.log2(1 + offer.match_length), 4.0 * recent, min(temperature, 2.0), math.log2(1 + output_tokens) / 4.0]


def score_logits(scores: Sequence[float], num_tokens: int) -> list[float] | None:
    """[num_tokens], logits of each token's score given the tokens before it; None for a source without scores."""
    if len(scores) < num_tokens or not num_tokens:
        return None
    return [_share_logit(score, before) for score, before in zip(scores[:num_tokens], (1.0, *scores), strict=False)]


def _share_logit(score: float, before: float) -> float:
    share = min(max(score / before if before > 0.0 else 0.0, _LEAST_SHARE), 1.0 - _LEAST_SHARE)
    return math.log(share / (1.0 - share))


class Confidence:
    """Moves the logit of an acceptance rate by the features of an offer.

    Bayesian logistic regression with the rate's logit as offset, updated offer by offer: the posterior of the weights
    is kept as a Gaussian. Features are taken relative to their mean, so that where nothing is special nothing is moved.

    Source: the sequential Laplace approximation, Spiegelhalter and Lauritzen 1990.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * _SIZE
        self._precision = _CERTAINTY * np.eye(_SIZE)

    def factors(
        self,
        values: Sequence[float],
        means: Sequence[float],
        scores: Sequence[float],
        mean_score: float,
        num_tokens: int,
    ) -> Iterator[float]:
        """[num_tokens], what to multiply the odds by: exponentials of the shifts, made as they are asked for.

        Args:
            values, means: [NUM_FEATURES], and what they usually are.
            scores: of the offer, empty where it has none; `mean_score`, the usual logit of one given those before it.
        """
        shift = 0.0
        for weight, value, mean in zip(self._weights, values, means, strict=False):
            shift += weight * (value - mean)
        if len(scores) < num_tokens:
            yield from repeat(math.exp(min(max(shift, -_FARTHEST), _FARTHEST)), num_tokens)
            return
        weight, before = self._weights[-1], 1.0
        for score in scores[:num_tokens]:
            moved = shift + weight * (_share_logit(score, before) - mean_score)
            yield math.exp(min(max(moved, -_FARTHEST), _FARTHEST))
            before = score

    def shifts(self, values: Sequence[float], scores: Sequence[float] | None, num_tokens: int) -> list[float]:
        """[num_tokens], what to add to the logits.

        Args:
            values: [NUM_FEATURES], relative to their mean.
            scores: [num_tokens], logits of the tokens' scores relative to their mean; None where there are none.
        """
        shift = sum(weight * value for weight, value in zip(self._weights, values, strict=False))
        if scores is None:
            return [min(max(shift, -_FARTHEST), _FARTHEST)] * num_tokens
        weight = self._weights[-1]
        return [min(max(shift + weight * score, -_FARTHEST), _FARTHEST) for score in scores]

    def learn(
        self, base: Sequence[float], values: Sequence[float], scores: Sequence[float] | None, num_accepted: int
    ) -> None:
        """One offer was judged.

        Args:
            base: [n], the logits before the correction.
            values, scores: as in `shifts`, of the n tokens that were judged.
            num_accepted: of them, the first ones; at most one other was judged.
        """
        count = len(base)
        rows = np.empty((count, _SIZE))
        rows[:, :-1] = values
        rows[:, -1] = 0.0 if scores is None else scores
        logits = np.array(base) + self.shifts(values, scores, count)
        expected = 1.0 / (1.0 + np.exp(-logits))
        surprise = -expected
        surprise[:num_accepted] += 1.0
        self._precision *= _KEPT
        self._precision.flat[:: _SIZE + 1] += (1.0 - _KEPT) * _CERTAINTY
        self._precision += (rows.T * (expected * (1.0 - expected))) @ rows
        step = np.linalg.solve(self._precision, surprise @ rows).tolist()
        size = max(map(abs, step))
        share = 1.0 if size <= _LONGEST_STEP else _LONGEST_STEP / size
        self._weights = [weight + share * change for weight, change in zip(self._weights, step, strict=True)]

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {"weights": list(self._weights), "precision": self._precision.tolist()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Confidence:
        """Raises: ValueError, TypeError, KeyError: this is no such state."""
        confidence = cls()
        weights, precision = [float(weight) for weight in state["weights"]], np.array(state["precision"], dtype=float)
        if len(weights) != _SIZE or precision.shape != (_SIZE, _SIZE) or not np.all(np.isfinite(precision)):
            raise ValueError("weights of another shape")
        confidence._weights, confidence._precision = weights, precision
        return confidence
