"""How the token at one position is chosen, and with it whether the draft token there is accepted.

Each rule sees one position at a time and is asked in order until it rejects, so nothing is drawn for a position whose
prefix was not committed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autospec.errors import ExactnessError
from autospec.randomness import Randomness


class Selection(NamedTuple):
    """The token to commit, and whether it is the draft's."""

    token: int
    is_accepted: bool


class SelectionRule(Protocol):
    """Chooses the token at one position."""

    def select(self, scores: Tensor, draft_token: int | None, draft_probs: Tensor | None) -> Selection:
        """Choose.

        Args:
            scores: [1, vocab_size], float32, the target's processed scores under this position's own prefix.
            draft_token: the draft's token here; None at the position after the last one (bonus) or in a plain step.
            draft_probs: [vocab_size], what `draft_token` was drawn from; None when it was certain (one-hot).
        """


class Greedy:
    """The likeliest token, the first among equals; a draft token is accepted when it is that token."""

    def select(self, scores: Tensor, draft_token: int | None, draft_probs: Tensor | None) -> Selection:
        token = int(torch.argmax(scores, dim=-1).item())
        return Selection(token, token == draft_token)


class Paired:
    """Draw the target's own token with the very call plain decoding makes; the draft is accepted when it is that token.

    The generator is used once per committed token, so the text is the one that plain decoding gives from the same
    seed, whatever was drafted. For a one-hot draft the acceptance probability is p(x), as under the rejection rule.

    Source: Daliri, Musco and Suresh 2024, drafter-invariant decoding by shared noise.
    """

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness

    def select(self, scores: Tensor, draft_token: int | None, draft_probs: Tensor | None) -> Selection:
        token = self._randomness.categorical(target_probs(scores))
        return Selection(token, token == draft_token)


class Maximal:
    """Accept x with probability min(1, p(x) / q(x)), else draw from the normalised residual max(0, p - q).

    One-hot drafts are chosen as by `Paired`: the probability is the same and the text then follows the seed.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
    """

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._paired = Paired(randomness)
        self.num_residual_underflows = 0

    def select(self, scores: Tensor, draft_token: int | None, draft_probs: Tensor | None) -> Selection:
        if draft_token is None or draft_probs is None:
            return self._paired.select(scores, draft_token, None)
        probs = target_probs(scores)
        p, q = float(probs[draft_token]), float(draft_probs[draft_token])
        total = float(draft_probs.sum())
        if not (q > 0.0 and abs(total - 1.0) < 1e-3):  # also false for NaN
            raise ExactnessError(
                f"draft token {draft_token} has probability {q} under the draft that drew it, whose probabilities sum "
                f"to {total}: draft_probs must be the distribution the token was drawn from"
            )
        if self._randomness.bernoulli(min(1.0, p / q)):
            return Selection(draft_token, is_accepted=True)
        residual = (probs - draft_probs).clamp(min=0.0)
        mass = residual.sum()
        if mass <= 0.0:  # p and q agree up to rounding, so that a rejection had next to no probability
            self.num_residual_underflows += 1
            residual, mass = probs, probs.sum()
        return Selection(self._randomness.categorical(residual / mass), is_accepted=False)


def target_probs(scores: Tensor) -> Tensor:
    """[vocab_size], from scores of shape [1, vocab_size], with the same call as transformers' `generate`."""
    return torch.nn.functional.softmax(scores, dim=-1)[0]


def make_rule(*, do_sample: bool, sampling: str, randomness: Randomness) -> SelectionRule:
    """The rule for a request. `sampling` is `paired` or `maximal`."""
    if not do_sample:
        return Greedy()
    return Paired(randomness) if sampling == "paired" else Maximal(randomness)
