"""From a draft's logits to drawn tokens, position by position, with q as it was drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from autospec.drafts.base import DraftRequest, Proposal
from autospec.errors import DraftError
from autospec.types import Stop

if TYPE_CHECKING:
    from torch import Tensor


def draws_ahead(device: torch.device) -> bool:
    """Does looking at a drawn token wait for the device? Then a block is drawn first and looked at once."""
    return device.type != "cpu"


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
_ROOM = 64  # tokens after a text, in a tensor that grows


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
    if num_ids == logits.shape[-1] == vocab_size:
        return logits
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
    # processors may write into what they are given
    scores = write(logits.to(request.scores_dtype, copy=bool(request.processors)), request.vocab_size)
    if prefix is not None and request.processors:
        scores = request.processors(prefix, scores)
    return scores


class Prefix:
    """Prompt and answer of one request on the device of its draft, for processors that read them.

    Args:
        device: of the draft.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = torch.zeros((1, 0), dtype=torch.long, device=device)
        self._length = 0

    def follow(self, committed: Sequence[int], room: int) -> None:
        """Take in what was committed since the last call. Args: room: tokens that may be drafted after it."""
        wanted = len(committed) + room
        if wanted > self._tokens.shape[1]:
            grown = torch.zeros((1, 2 * wanted), dtype=torch.long, device=self._device)
            grown[:, : self._length] = self._tokens[:, : self._length]
            self._tokens = grown
        if new := committed[self._length :]:
            self._tokens[0, self._length : len(committed)] = torch.tensor(new, device=self._device)
        self._length = len(committed)

    def append(self, position: int, token: Tensor | int) -> None:
        """Note a draft token. Args: position: 0 is the first one after what was committed."""
        self._tokens[0, self._length + position] = token

    def first(self, num_drafts: int) -> Tensor:
        """[1, n]: what was committed, and so many drafts."""
        return self._tokens[:, : self._length + num_drafts]


class Drawing:
    """Draws the tokens of one block, either looking at each (`draw`), or at all of them in the end (`draw_ahead`).

    Args:
        request: whose processors, noise and number format are used.
        committed: the tokens before the block.
        is_greedy: take the likeliest token (a one-hot q).
        stop_rule: when the block ends before its next position.
        write: from the draft's logits, [1, n], to those over the target's ids, [1, vocab_size].
        stop: asked as well, of what the draft's own logits say.
        prefix: of the session; None: a new one where processors read it.
        room: tokens that are drawn at most, where it is given with the prefix.
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
        prefix: Prefix | None = None,
        room: int = _ROOM,
    ) -> None:
        self._request = request
        self._is_greedy = is_greedy
        self._stop_rule = stop_rule
        self._write = write
        self._stop = stop
        self._confidences: list[tuple[float, float]] = []
        self._randomness = request.randomness.fork() if request.is_paired and not is_greedy else request.randomness
        # the whole text, so only where somebody reads it
        self._prefix = None
        if request.processors:
            self._prefix = Prefix(request.device) if prefix is None else prefix
            self._prefix.follow(committed, room)
        self._probs: list[Tensor] = []
        self._unseen: list[Tensor] = []  # [1] each: tokens drawn ahead
        self.drawn: list[int] = []  # ahead: what does not count, and what follows it, included
        self._largest: list[Tensor] = []  # [2] each: of the draft's logits there, and of the scores
        self.tokens: list[int] = []

    @property
    def can_draw_ahead(self) -> bool:
        """Nothing that was drawn is to be looked at before the next token is drawn."""
        return self._stop is None and self._stop_rule == NEVER

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
        if self._is_plain and self._stop is None:
            largest, index = (each.item() for each in self._write(logits, self._request.vocab_size).max(dim=-1))
            if not math.isfinite(largest):
                _check(float(logits.amax()))
                return False
            self.tokens.append(int(index))
            return True
        _check(float(logits.amax()))
        if self._stop is not None:
            self._confidences.append(confidence(logits[0]))
            if self._stop.ends(*self._confidences[-1]):
                return False
        scores = self._scores(logits)
        if self._is_greedy and self._stop_rule == NEVER:
            largest, index = (each.item() for each in scores.max(dim=-1))
            if not math.isfinite(largest):
                return False
            self._note(int(index))
            return True
        if not math.isfinite(float(scores.amax())):
            return False
        draft_probs = scores.softmax(dim=-1)[0]
        if self._stop_rule.ends(draft_probs):
            return False
        if self._is_greedy:
            self._note(int(scores.argmax(dim=-1).item()))
        else:
            self._note(self._randomness.categorical(draft_probs))
            self._probs.append(draft_probs)
        return True

    def draw_ahead(self, logits: Tensor) -> Tensor:
        """Draw the next token and leave it on the device; whether it counts is seen by `look`.

        Args:
            logits: [1, n], of the draft at the next position.

        Returns:
            [1], the token.
        """
        scores = self._write(logits, self._request.vocab_size) if self._is_plain else self._scores(logits)
        best, token = scores.max(dim=-1)
        largest = torch.stack([best[0] if scores is logits else logits[0].amax().to(best.dtype), best[0]])
        draft_probs = None
        if not self._is_greedy:
            draft_probs = scores.softmax(dim=-1)[0]
            token = self._randomness.category(draft_probs)[None]
        if self._prefix is not None:
            self._prefix.append(len(self._unseen), token[0])
        if draft_probs is not None:
            self._probs.append(draft_probs)
        self._largest.append(largest)
        self._unseen.append(token)
        return token

    def look(self) -> None:
        """Wait for what was drawn ahead. Afterwards `tokens` are those that count.

        Raises:
            DraftError: the draft's logits at some position were not finite. Tokens before it count.
        """
        if not self._unseen:
            return
        seen = torch.cat(
            [torch.cat(self._unseen).float(), torch.stack(self._largest).float().flatten()]
        )  # ids are exact
        values: list[float] = seen.tolist()  # one transfer
        number = len(self._unseen)
        self.drawn = [int(value) for value in values[:number]]
        self._unseen.clear()
        for token, largest, best in zip(self.drawn, values[number::2], values[number + 1 :: 2], strict=True):
            if not (math.isfinite(largest) and math.isfinite(best)):
                del self._probs[len(self.tokens) :]
                _check(largest)
                break
            self.tokens.append(token)

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

    @property
    def _is_plain(self) -> bool:
        """The likeliest token of the draft itself: its number format does not matter, nor do probabilities."""
        return self._is_greedy and self._prefix is None and self._stop_rule == NEVER

    def _scores(self, logits: Tensor) -> Tensor:
        """[1, vocab_size], whose softmax is q. Args: logits: [1, n]."""
        prefix = None if self._prefix is None else self._prefix.first(len(self.tokens) + len(self._unseen))
        return shaped(logits, self._request, prefix, self._write)

    def _note(self, token: int) -> None:
        if self._prefix is not None:
            self._prefix.append(len(self.tokens), token)
        self.tokens.append(token)


def _check(largest: float) -> None:
    """Args: largest: of a draft's logits. Raises: DraftError: it is not finite."""
    if not math.isfinite(largest):
        raise DraftError("the draft's logits are not finite (a half-precision overflow?)")
