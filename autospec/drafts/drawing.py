"""From a draft's logits to drawn tokens, position by position, with q as it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autospec.drafts.base import DraftRequest, Proposal
from autospec.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor


class Drawing:
    """Draws the tokens of one block.

    Args:
        request: whose processors, noise and number format are used.
        committed: the tokens before the block.
        is_greedy: take the likeliest token (a one-hot q).
    """

    def __init__(self, request: DraftRequest, committed: Sequence[int], *, is_greedy: bool) -> None:
        self._request = request
        self._is_greedy = is_greedy
        self._randomness = request.randomness.fork() if request.is_paired and not is_greedy else request.randomness
        self._prefix = torch.tensor([list(committed)], device=request.device)
        self._probs: list[Tensor] = []
        self.tokens: list[int] = []

    def draw(self, logits: Tensor) -> bool:
        """Draw the next token.

        Args:
            logits: [n], of the draft at the next position; ids that only one of draft and target has are not drawn.

        Returns:
            False when the processors leave nothing to draw: the block then ends before this position.

        Raises:
            DraftError: the logits are not finite. Nothing was drawn then.
        """
        if not torch.isfinite(logits.amax()):
            raise DraftError("the draft's logits are not finite (a half-precision overflow?)")
        num_ids = min(len(logits), self._request.vocab_size)
        scores = torch.full(
            (1, self._request.vocab_size), -torch.inf, dtype=self._request.scores_dtype, device=self._request.device
        )
        scores[0, :num_ids] = logits[:num_ids]
        scores = self._request.processors(self._prefix, scores)
        if not torch.isfinite(scores.amax()):
            return False
        if self._is_greedy:
            token = int(scores.argmax(dim=-1).item())
        else:
            draft_probs = scores.softmax(dim=-1)[0]
            token = self._randomness.categorical(draft_probs)
            self._probs.append(draft_probs)
        self.tokens.append(token)
        self._prefix = torch.cat([self._prefix, self._prefix.new_tensor([[token]])], dim=-1)
        return True

    def proposal(self, catch_up_seconds: float) -> Proposal:
        """What was drawn so far."""
        is_drawn = bool(self._probs) and not self._request.is_paired
        return Proposal(self.tokens, torch.stack(self._probs) if is_drawn else None, catch_up_seconds)
