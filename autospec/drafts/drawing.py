"""From a draft's logits to drawn tokens, position by position, with q as it was drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from autospec.drafts.base import DraftRequest, Proposal
from autospec.errors import DraftError
from autospec.types import Stop

if TYPE_CHECKING:
    from torch import Tensor


class StopRule(NamedTuple):
    """When a block ends before its next position, by what the draft thinks of it."""

    min_margin: float | None = None
    max_entropy: float | None = None

    def ends(self, probs: Tensor) -> bool:
        """Args: probs: [vocab_size], of the draft at the next position, before a token is drawn."""
        if self.min_margin is not None:
            first, second = torch.topk(probs, 2).values.tolist() if len(probs) > 1 else (1.0, 0.0)
            if first - second < self.min_margin:
                return True
        return self.max_entropy is not None and float(torch.special.entr(probs).sum()) > self.max_entropy


NEVER = StopRule()


def confidence(logits: Tensor) -> tuple[float, float]:
    """Margin of the two largest probabilities, and entropy in nats. Args: logits: [n]."""
    probs = logits.float().softmax(dim=-1)
    largest = probs.topk(min(2, len(probs))).values
    margin = largest[0] - largest[-1] if len(largest) > 1 else largest[0]
    found: list[float] = torch.stack([margin, torch.special.entr(probs).sum()]).tolist()
    return found[0], found[1]


def write_same_ids(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over the target's ids, [1, vocab_size], for a draft with the same ones. Args: logits: [1, n]."""
    num_ids = min(logits.shape[-1], vocab_size)
    scores = logits.new_full((1, vocab_size), -torch.inf)
    scores[:, :num_ids] = logits[:, :num_ids]
    return scores


def shaped(
    logits: Tensor,
    request: DraftRequest,
    prefix: Tensor | None,
    write: Callable[[Tensor, int], Tensor] = write_same_ids,
) -> Tensor:
    """Scores over the target's ids, [1, vocab_size], whose softmax is q.

    Args:
        logits: [1, n], of the draft.
        prefix: [1, m], the text before this position; may be None where no processor reads it.
        write: as for `Drawing`.
    """
    scores = write(logits.to(request.scores_dtype), request.vocab_size)
    if prefix is not None and request.processors:
        scores = request.processors(prefix, scores)
    return scores


class Drawing:
    """Draws the tokens of one block.

    Args:
        request: whose processors, noise and number format are used.
        committed: the tokens before the block.
        is_greedy: take the likeliest token (a one-hot q).
        stop_rule: when the block ends before its next position.
        write: from the draft's logits, [1, n], to those over the target's ids, [1, vocab_size].
        stop: asked as well, of what the draft's own logits say.
    """

    def __init__(
        self,
        request: DraftRequest,
        committed: Sequence[int],
        *,
        is_greedy: bool,
        stop_rule: StopRule = NEVER,
        write: Callable[[Tensor, int], Tensor] = write_same_ids,
        stop: Stop | None = None,
    ) -> None:
        self._request = request
        self._is_greedy = is_greedy
        self._stop_rule = stop_rule
        self._write = write
        self._stop = stop
        self._confidences: list[tuple[float, float]] = []
        self._randomness = request.randomness.fork() if request.is_paired and not is_greedy else request.randomness
        # the whole text, so only where somebody reads it
        self._prefix = torch.tensor([list(committed)], device=request.device) if request.processors else None
        self._probs: list[Tensor] = []
        self.tokens: list[int] = []

    def wants_more(self) -> bool:
        """Is the draft to look at the next position?"""
        return self._stop is None or self._stop.wants_more()

    def draw(self, logits: Tensor) -> bool:
        """Draw the next token.

        Args:
            logits: [1, n], of the draft at the next position.

        Returns:
            False when the block ends before this position: by the stop rule, or as processors leave nothing to draw.

        Raises:
            DraftError: the logits are not finite. Nothing was drawn then.
        """
        if not torch.isfinite(logits.amax()):
            raise DraftError("the draft's logits are not finite (a half-precision overflow?)")
        if self._stop is not None:
            self._confidences.append(confidence(logits[0]))
            if self._stop.ends(*self._confidences[-1]):
                return False
        scores = shaped(logits, self._request, self._prefix, self._write)
        if not torch.isfinite(scores.amax()):
            return False
        draft_probs = None if self._is_greedy and self._stop_rule == NEVER else scores.softmax(dim=-1)[0]
        if draft_probs is not None and self._stop_rule.ends(draft_probs):
            return False
        if self._is_greedy or draft_probs is None:
            token = int(scores.argmax(dim=-1).item())
        else:
            token = self._randomness.categorical(draft_probs)
            self._probs.append(draft_probs)
        self.tokens.append(token)
        if self._prefix is not None:
            self._prefix = torch.cat([self._prefix, self._prefix.new_tensor([[token]])], dim=-1)
        return True

    def failed(self, error: Exception) -> DraftError:
        """What to raise at the next call, after a failure in the middle of the block.

        What was drawn is submitted all the same: dropping it would depend on its own draw.

        Raises:
            DraftError: now, as nothing was drawn.
        """
        is_clear = isinstance(error, DraftError)
        failure = DraftError(str(error) if is_clear else f"{type(error).__name__}: {error}")
        if not self.tokens:
            raise failure from error
        return failure

    def proposal(self, catch_up_seconds: float) -> Proposal:
        """What was drawn so far."""
        is_drawn = bool(self._probs) and not self._request.is_paired
        return Proposal(
            self.tokens,
            torch.stack(self._probs) if is_drawn else None,
            catch_up_seconds,
            confidences=self._confidences,
        )
