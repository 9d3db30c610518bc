"""How tokens are chosen, and with it which draft tokens are accepted.

A rule sees any number of positions at once, in order, and gives the tokens up to the first that is not the draft's. All
work over the vocabulary is done for all positions together, and the device is waited for once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autospec.errors import ExactnessError
from autospec.randomness import Randomness


class Selection(NamedTuple):
    """What to commit: the accepted draft tokens, and after them at most one that the target chose."""

    tokens: list[int]
    num_accepted: int


class SelectionRule(Protocol):
    """Chooses the tokens at consecutive positions."""

    num_residual_underflows: int  # rejections whose residual summed to 0

    def select(self, scores: Tensor, draft_tokens: Sequence[int], draft_probs: Tensor | None) -> Selection:
        """Choose.

        Args:
            scores: [n, vocab_size], float32, the target's processed scores, each row under its own position's prefix.
            draft_tokens: [n - 1], when the last row is that of the bonus token, or [n], when there is none.
            draft_probs: [len(draft_tokens), vocab_size], what each was drawn from; None when certain (one-hot).
        """

    def keep(self, num_tokens: int) -> None:
        """The answer ended after the first tokens of the last selection: only their noise was used."""


class Greedy:
    """The likeliest token, the first among equals; a draft token is accepted when it is that token."""

    num_residual_underflows = 0

    def select(self, scores: Tensor, draft_tokens: Sequence[int], draft_probs: Tensor | None) -> Selection:
        tokens = torch.argmax(scores, dim=-1).tolist()
        if not draft_tokens:
            return Selection(tokens, 0)
        num_accepted = _num_equal(tokens, draft_tokens)
        return Selection(tokens[: num_accepted + 1], num_accepted)

    def keep(self, num_tokens: int) -> None:
        """No noise."""


class Paired:
    """Draw the target's own token with the noise of plain decoding's call; the draft is accepted when it is that token.

    The generator is used once per committed token, so the text is the one that plain decoding gives from the same
    seed, whatever was drafted. For a one-hot draft the acceptance probability is p(x), as under the rejection rule.

    Source: Daliri, Musco and Suresh 2024, drafter-invariant decoding by shared noise.
    """

    num_residual_underflows = 0

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness

    def select(self, scores: Tensor, draft_tokens: Sequence[int], draft_probs: Tensor | None) -> Selection:
        tokens = self._randomness.walk(target_probs(scores), draft_tokens)
        return Selection(tokens, _num_equal(tokens, draft_tokens) if draft_tokens else 0)

    def keep(self, num_tokens: int) -> None:
        self._randomness.rewind(num_tokens)


class Maximal:
    """Accept x with probability min(1, p(x) / q(x)), else draw from the normalised residual max(0, p - q).

    One-hot drafts are chosen as by `Paired`: the probability is the same and the text then follows the seed.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
    """

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._paired = Paired(randomness)
        self._was_paired = True
        self.num_residual_underflows = 0

    def select(self, scores: Tensor, draft_tokens: Sequence[int], draft_probs: Tensor | None) -> Selection:
        self._was_paired = draft_probs is None or not draft_tokens
        if draft_probs is None or self._was_paired:
            return self._paired.select(scores, draft_tokens, None)
        probs, num_drafts = target_probs(scores), len(draft_tokens)
        drafted = torch.tensor(draft_tokens, device=probs.device)[:, None]
        p = probs[:num_drafts].gather(1, drafted)[:, 0].double()
        q = draft_probs.gather(1, drafted)[:, 0].double()
        accepted = self.num_accepted(p, q)
        if num_drafts == len(probs) and int(accepted) == num_drafts:
            check_drawn(draft_tokens, q, draft_probs)
            return Selection(list(draft_tokens), num_drafts)
        residual, mass = self.residual(probs, draft_probs, accepted)
        token = self._randomness.category(residual)
        is_drawn = (q > 0.0).all() & ((draft_probs.sum(dim=-1) - 1.0).abs() < 1e-3).all()  # false for nan, too
        flags = [mass > 0.0, is_drawn, residual[0].isnan()]
        num_accepted, last, has_mass, is_fine, has_failed = torch.stack(
            [accepted, token, *map(Tensor.long, flags)]
        ).tolist()
        if not is_fine:
            check_drawn(draft_tokens, q, draft_probs)
        if has_failed:  # no distribution: plain decoding fails here, with the tokens before it said
            if not num_accepted:
                self._randomness.categorical(probs[0])
            return Selection(list(draft_tokens[:num_accepted]), num_accepted)
        self.num_residual_underflows += not has_mass
        return Selection([*draft_tokens[:num_accepted], last], num_accepted)

    def keep(self, num_tokens: int) -> None:
        if self._was_paired:
            self._paired.keep(num_tokens)

    def num_accepted(self, p: Tensor, q: Tensor) -> Tensor:
        """How many draft tokens are accepted, []. Args: p, q: [k], float64, of each draft token under both models."""
        return self._randomness.num_successes((p / q).clamp(max=1.0))

    def residual(self, probs: Tensor, draft_probs: Tensor, num_accepted: Tensor) -> tuple[Tensor, Tensor]:
        """What the token after the accepted ones is drawn from, [vocab_size], and its mass before normalising, [].

        After a rejection that is max(0, p - q) there; after a fully accepted block p of the bonus position.
        """
        row = num_accepted[None]
        p = probs.index_select(0, row)[0]
        is_rejected = num_accepted < len(draft_probs)
        q = draft_probs.index_select(0, row.clamp(max=len(draft_probs) - 1))[0] * is_rejected
        residual = (p - q).clamp(min=0.0)
        mass = residual.sum()
        # p and q may agree up to rounding, so that a rejection had next to no probability
        residual = torch.where(mass > 0.0, residual, p)
        return residual / residual.sum(), mass


def target_probs(scores: Tensor) -> Tensor:
    """[n, vocab_size], from scores of the same shape, with the same call as transformers' `generate`."""
    return torch.nn.functional.softmax(scores, dim=-1)


def check_drawn(draft_tokens: Sequence[int], q: Tensor, draft_probs: Tensor) -> None:
    """Refuse drafts that were not drawn from their q.

    Raises:
        ExactnessError: a token has no probability under the draft that drew it, or its probabilities do not sum to 1.
    """
    for token, probability, total in zip(draft_tokens, q.tolist(), draft_probs.sum(dim=-1).tolist(), strict=True):
        if not (probability > 0.0 and abs(total - 1.0) < 1e-3):  # also false for NaN
            raise ExactnessError(
                f"draft token {token} has probability {probability} under the draft that drew it, whose probabilities "
                f"sum to {total}: draft_probs must be the distribution the token was drawn from"
            )


def make_rule(*, do_sample: bool, sampling: str, randomness: Randomness) -> SelectionRule:
    """The rule for a request. `sampling` is `paired` or `maximal`."""
    if not do_sample:
        return Greedy()
    return Paired(randomness) if sampling == "paired" else Maximal(randomness)


def _num_equal(tokens: Sequence[int], draft_tokens: Sequence[int]) -> int:
    """How many first tokens are the draft's."""
    count = 0
    for token, drafted in zip(tokens, draft_tokens, strict=False):
        if token != drafted:
            break
        count += 1
    return count
