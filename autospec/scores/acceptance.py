"""How a draft judged tokens of an answer, and whether it would have been right: many positions at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from autospec.scores.scored import DraftScores

if TYPE_CHECKING:
    from torch import Tensor


def judged(
    logits: Tensor,
    scores: Tensor,
    tokens: Tensor,
    target_probs: Tensor | None,
    *,
    is_paired: bool,
) -> list[list[float]]:
    """A draft's numbers before each of some tokens that the target said.

    Args:
        logits: [n, draft_vocab_size], the draft's own.
        scores: [n, vocab_size], whose softmax is q.
        tokens: [n], what the target said.
        target_probs: [n, vocab_size], p, where the draft's tokens are drawn; None where it takes the likeliest.
        is_paired: draft and target draw with the same noise.

    Returns:
        [n] lists of acceptance, margin, entropy and rank, as `DraftScores` has them.
    """
    margin, entropy = confidences(logits)
    rank = (scores > scores.gather(1, tokens[:, None])).sum(dim=-1)
    if target_probs is None:
        accept = (scores.argmax(dim=-1) == tokens).double()
    else:
        accept = (coupled if is_paired else rejection)(target_probs, scores.softmax(dim=-1), tokens)
    found: list[list[float]] = torch.stack([accept, margin.double(), entropy.double(), rank.double()], dim=1).tolist()
    return found


def draft_scores(found: Sequence[Sequence[float]]) -> DraftScores:
    """Of a whole answer. Args: found: for each of its tokens, what `judged` gave."""
    accept, margin, entropy, rank = np.array(found, dtype=np.float64).T
    return DraftScores(
        accept.astype(np.float32),
        margin.astype(np.float32),
        entropy.astype(np.float32),
        np.minimum(rank, np.iinfo(np.int16).max).astype(np.int16),
    )


def confidences(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Margins and entropies, [n] each, as `autospec.drafts.drawing.confidence` has them. Args: logits: [n, m]."""
    probs = logits.float().softmax(dim=-1)
    largest = probs.topk(min(2, probs.shape[-1]), dim=-1).values
    margin = largest[:, 0] - largest[:, 1] if largest.shape[-1] > 1 else largest[:, 0]
    return margin, torch.special.entr(probs).sum(dim=-1)


def rejection(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """Probabilities that drawn drafts were accepted, given what the target said: min(1, q / p).

    Args:
        target_probs, draft_probs: [n, vocab_size].
        tokens: [n], what the target said.

    Returns:
        [n], float64.

    Source: Leviathan et al. 2023 for the rule; docs/tune.md for what follows of it, given the token.
    """
    p, q = _of(target_probs, tokens), _of(draft_probs, tokens)
    return torch.where(p > 0.0, (q / p).clamp(max=1.0), 1.0)


def coupled(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """The same where draft and target draw with the same exponential noise E: argmax q / E, given argmax p / E.

    Both are `token` with probability 1 / sum_i max(p_i / p, q_i / q), the target's is with probability p.

    Source: Daliri, Musco and Suresh 2024.
    """
    p, q = _of(target_probs, tokens), _of(draft_probs, tokens)
    ratio = p / q.where(q > 0.0, 1.0)
    total = torch.maximum(target_probs.double(), draft_probs.double() * ratio[:, None]).sum(dim=-1)
    return torch.where(q > 0.0, (1.0 / total).clamp(max=1.0), 0.0)


def _of(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(1, tokens[:, None])[:, 0].double()
