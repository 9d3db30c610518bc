"""What a proposal's features say about its acceptance: a logistic correction, learned as proposals are judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import mul
from typing import Any

from autospec.policies.reading import check_precision, finite
from autospec.types import Offer

FEATURES = ("match length", "recent acceptance", "temperature", "position in the output")
NUM_FEATURES = len(FEATURES)
_SIZE = NUM_FEATURES + 3  # and of each token: its score given those before it, the logit it had before, and one
_CERTAINTY = 1.0  # of the prior that features say nothing
_KEPT = 0.99  # of old evidence at each new offer
_LONGEST_STEP = 0.5
_FARTHEST = 6.0  # a shift of the logit
_MOST_WEIGHT = 1e6  # in size
_LEAST_PIVOT = 1e-9  # rounding may leave nothing of it in a state of very large numbers that somebody hands over
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.98  # of a score that is believed


def features(offer: Offer, temperature: float, output_tokens: int) -> list[float]:
    """[NUM_FEATURES], of about the same size each."""
    recent = 0.5 if offer.recent_acceptance is None else offer.recent_acceptance
    return [math.log2(1 + offer.match_length), 4.0 * recent, min(temperature, 2.0), math.log2(1 + output_tokens) / 4.0]


def token_features(entropy: float, temperature: float, output_tokens: int) -> list[float]:
    """[NUM_FEATURES] of one token of a model draft: its entropy (nats) stands for the length of a match."""
    return [entropy, 2.0, min(temperature, 2.0), math.log2(1 + output_tokens) / 4.0]


def margin_logit(margin: float) -> float:
    """Score of a model draft's token. Args: margin: difference of the two largest probabilities."""
    return _share_logit(margin, 1.0)


def score_logits(scores: Sequence[float], num_tokens: int) -> list[float] | None:
    """[num_tokens], logits of each token's score given the tokens before it; None for a source without scores."""
    if len(scores) < num_tokens or not num_tokens:
        return None
    return [_share_logit(score, before) for score, before in zip(scores[:num_tokens], (1.0, *scores), strict=False)]


def _share_logit(score: float, before: float) -> float:
    share = min(max(score / before if before > 0.0 else 0.0, _LEAST_SHARE), _MOST_SHARE)
    return math.log(share / (1.0 - share))


class Confidence:
    """Moves the logit of an acceptance rate by the features of an offer, or of a model draft's token.

    Bayesian logistic regression with the rate's logit as offset, updated offer by offer: the posterior of the weights
    is kept as a Gaussian. Features are taken relative to their mean, so that where nothing is special nothing is moved.
    The logit itself is among what is weighed: rates of few blocks, which say too much, are drawn towards the middle.

    Source: the sequential Laplace approximation, Spiegelhalter and Lauritzen 1990; Platt 1999 for the last.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * _SIZE
        self._precision = [[0.0] * index + [_CERTAINTY] for index in range(_SIZE)]  # rows up to the diagonal

    def survival(
        self,
        odds: Iterable[float],
        values: Sequence[float],
        means: Sequence[float],
        scores: Sequence[float],
        mean_score: float,
        least: float,
    ) -> list[float]:
        """Probability that at least j + 1 tokens of an offer are accepted, as long as it is not below `least`.

        Args:
            odds: of each token, before the correction.
            values, means: [NUM_FEATURES], and what they usually are.
            scores: of the offer, empty where it has none; `mean_score`, the usual logit of one given those before it.
        """
        log, exp = math.log, math.exp
        shift = self._weights[-1]
        for weight, value, mean in zip(self._weights, values, means, strict=False):
            shift += weight * (value - mean)
        of_score, of_logit, before = self._weights[-3], self._weights[-2], 1.0
        found, product = [], 1.0
        for each, score in zip(odds, scores or repeat(None), strict=False):
            logit = log(each)
            move = shift + of_logit * logit
            if score is not None:
                share = score / before if before > 0.0 else 0.0
                if share < _LEAST_SHARE:
                    share = _LEAST_SHARE
                elif share > _MOST_SHARE:
                    share = _MOST_SHARE
                move += of_score * (log(share / (1.0 - share)) - mean_score)
                before = score
            if not -_FARTHEST < move < _FARTHEST:
                move = _FARTHEST if move > 0.0 else -_FARTHEST
            product /= 1.0 + exp(-logit - move)
            if product < least:
                break
            found.append(product)
        return found

    def rate(self, odds: float, values: Sequence[float], score: float) -> float:
        """Acceptance of one token. Args: odds: before the correction; values, score: relative to their means."""
        logit = math.log(odds)
        move = self._weights[-1] + self._weights[-3] * score + self._weights[-2] * logit
        for weight, value in zip(self._weights, values, strict=False):
            move += weight * value
        return 1.0 / (1.0 + math.exp(-logit - min(max(move, -_FARTHEST), _FARTHEST)))

    def learn(
        self,
        base: Sequence[float],
        values: Sequence[Sequence[float]],
        scores: Sequence[float] | None,
        num_accepted: int,
    ) -> None:
        """A proposal was judged.

        Args:
            base: [n], the logits before the correction.
            values: [n, NUM_FEATURES], relative to their mean; of one proposal they differ in the first one alone.
            scores: [n], logits of the tokens' scores relative to their mean; None where there are none.
            num_accepted: of them, the first ones; at most one other was judged.
        """
        of_first, *of_shared, of_score, of_logit, of_one = self._weights
        shared, exp = values[0][1:], math.exp
        common = of_one + sum(map(mul, of_shared, shared))
        # sums over the tokens: g of the gradient, the others of products of f(irst), s(core), l(ogit) and 1
        gf = gs = gl = g1 = ff = fs = fl = f1 = ss = sl = s1 = ll = l1 = n = 0.0
        for position, (logit, value, score) in enumerate(zip(base, values, scores or repeat(0.0), strict=False)):
            first = value[0]
            move = common + of_first * first + of_score * score + of_logit * logit
            if not -_FARTHEST < move < _FARTHEST:
                move = _FARTHEST if move > 0.0 else -_FARTHEST
            expected = 1.0 / (1.0 + exp(-logit - move))
            surprise = 1.0 - expected if position < num_accepted else -expected
            gf, gs, gl, g1 = gf + surprise * first, gs + surprise * score, gl + surprise * logit, g1 + surprise
            weight = expected * (1.0 - expected)
            of_f, of_s, of_l = weight * first, weight * score, weight * logit
            ff, fs, fl, f1 = ff + of_f * first, fs + of_f * score, fl + of_f * logit, f1 + of_f
            ss, sl, s1 = ss + of_s * score, sl + of_s * logit, s1 + of_s
            ll, l1, n = ll + of_l * logit, l1 + of_l, n + weight
        gained = [  # up to the diagonal, as the precision
            [ff],
            *[[each * f1, *[each * other * n for other in shared[: i + 1]]] for i, each in enumerate(shared)],
            [fs, *[each * s1 for each in shared], ss],
            [fl, *[each * l1 for each in shared], sl, ll],
            [f1, *[each * n for each in shared], s1, l1, n],
        ]
        precision = [
            [_KEPT * known + new for known, new in zip(row, rows, strict=True)]
            for row, rows in zip(self._precision, gained, strict=True)
        ]
        for row in precision:
            row[-1] += (1.0 - _KEPT) * _CERTAINTY
        gradient = [gf, *[each * g1 for each in shared], gs, gl, g1]
        step = _solved(precision, gradient)
        size = max(map(abs, step))
        share = 1.0 if size <= _LONGEST_STEP else _LONGEST_STEP / size
        self._precision = precision
        self._weights = [known + share * change for known, change in zip(self._weights, step, strict=True)]

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        lower = self._precision
        precision = [[lower[max(i, j)][min(i, j)] for j in range(_SIZE)] for i in range(_SIZE)]
        return {"weights": list(self._weights), "precision": precision}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Confidence:
        """Raises: ValueError, TypeError, LookupError, OverflowError: this is no such state."""
        confidence = cls()
        confidence._weights = finite(state["weights"], (_SIZE,), -_MOST_WEIGHT, _MOST_WEIGHT).tolist()
        precision = finite(state["precision"], (_SIZE, _SIZE))
        check_precision(precision)
        confidence._precision = [row[: index + 1] for index, row in enumerate(precision.tolist())]
        return confidence


def _solved(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of A x = `right`, by Cholesky. In plain numbers: seven of them are too few for arrays to pay in every block.

    Args:
        lower: row i has the i + 1 entries of A up to its diagonal; A is symmetric and positive definite.
    """
    factor: list[list[float]] = []
    found: list[float] = []
    for row, value in zip(lower, right, strict=True):
        made: list[float] = []
        for entry, above in zip(row, factor, strict=False):
            made.append((entry - sum(map(mul, made, above))) / above[-1])
        found.append(value - sum(map(mul, made, found)))
        made.append(math.sqrt(max(row[-1] - sum(map(mul, made, made)), _LEAST_PIVOT)))
        found[-1] /= made[-1]
        factor.append(made)
    for index in range(len(found) - 1, -1, -1):
        row = factor[index]
        found[index] = solved = found[index] / row[index]
        for column in range(index):
            found[column] -= row[column] * solved
    return found
