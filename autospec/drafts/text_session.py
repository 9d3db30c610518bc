"""Drafts by text: a model reads and continues it in its own tokens, the target's tokens of what it says are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autospec.drafts.base import Proposal, with_logits
from autospec.drafts.translation import Reading, SameIds

if TYPE_CHECKING:
    from torch import Tensor

    from autospec.drafts.assistant import AssistantSession
    from autospec.drafts.shared_tokens import Specials
    from autospec.drafts.spelling import Spelling

_SHORTEST, _LONGEST = 64, 256  # bytes of a piece that is encoded on its own, mostly words; one alone is encoded again
_MOST_IDS_PER_TOKEN = 4


class TextReading:
    """The committed text in the draft's tokens, encoded piece by piece.

    Where a piece ends depends on the bytes before and on the next one alone, so that what is read does not depend on
    the steps in which the text grew. Only the last piece is encoded again when it grows.
    """

    def __init__(self, target: Spelling, draft: Spelling, specials: Specials) -> None:
        self._target = target
        self._draft = draft
        self._specials = specials.reads
        self._ids = list(specials.start)
        self.num_settled = len(self._ids)
        self._open = bytearray()  # the last piece
        self._is_first = True  # it starts a text, or comes after a special token
        self._num_read = 0  # tokens of the target

    def read(self, committed: Sequence[int]) -> list[int]:
        if len(committed) == self._num_read:
            return self._ids
        del self._ids[self.num_settled :]
        for token in committed[self._num_read :]:
            if (piece := self._target.pieces.get(token)) is not None:
                self._open += piece
                continue
            self._settle()
            self._ids.extend([*self._spelled(bytes(self._open)), *self._specials.get(token, ())])
            self._open.clear()
            self._is_first = True
        self._num_read = len(committed)
        self._settle()
        self.num_settled = len(self._ids)
        self._ids.extend(self._spelled(bytes(self._open)))
        return self._ids

    @property
    def is_at_start(self) -> bool:
        """No text since the start or the last special token."""
        return self._is_first and not self._open

    @property
    def unfinished(self) -> bytes:
        """The first bytes of a character whose others are not committed yet."""
        return bytes(self._open)[len(self._open) - _length_of_unfinished(self._open) :]

    def _settle(self) -> None:
        begin = 0
        while (end := _border(self._open, begin)) is not None:
            self._ids.extend(self._spelled(bytes(self._open[begin:end])))
            self._is_first = False
            begin = end
        del self._open[:begin]

    def _spelled(self, data: bytes) -> list[int]:
        if self._is_first and self._target.adds_space:
            data = data.removeprefix(b" ")  # put there by the target's tokenizer
        text = data.decode(errors="ignore")  # an unfinished character is not there yet
        return self._draft.read(text.encode(), is_start=self._is_first) if text else []


class TextSession:
    """Drafts for one request.

    Args:
        inner: drafts greedily in its own tokens; reads the text by `reading`.
        reading: of this request.
        target, draft, specials: the two tokenizers.
        vocab_size: of the target's logits.
    """

    def __init__(
        self,
        inner: AssistantSession,
        reading: TextReading,
        target: Spelling,
        draft: Spelling,
        specials: Specials,
        vocab_size: int,
    ) -> None:
        self._inner = inner
        self._reading = reading
        self._target = target
        self._draft = draft
        self._specials = specials.writes
        self._vocab_size = vocab_size

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        ids_per_token = min(len(self._reading.read(committed)) / len(committed), _MOST_IDS_PER_TOKEN)
        drafted = self._inner.propose(committed, max(1, round(block_length * ids_per_token)))
        tokens = self._written(drafted.tokens)[:block_length]
        return Proposal(with_logits(tokens, self._vocab_size), None, drafted.catch_up_seconds)

    def _written(self, ids: list[int]) -> list[int]:
        """The target's tokens of what was drafted, up to a special token that it does not have."""
        tokens: list[int] = []
        data, unfinished, is_start = bytearray(), self._reading.unfinished, self._reading.is_at_start
        for index in [*ids, None]:
            if index is not None and (piece := self._draft.pieces.get(index)) is not None:
                data += piece
                continue
            spelled = self._spelled(bytes(data), unfinished, is_start=is_start)
            if spelled is None:
                break
            tokens += spelled
            special = self._specials.get(index) if index is not None else None
            if special is None:
                break
            tokens.append(special)
            data, unfinished, is_start = bytearray(), b"", True
        return tokens

    def _spelled(self, data: bytes, unfinished: bytes, *, is_start: bool) -> list[int] | None:
        """Tokens of the target. None: not what was begun."""
        if not data.startswith(unfinished):
            return None
        if is_start and self._draft.adds_space:
            data = data.removeprefix(b" ")
        begin = _length_of_character(unfinished[0]) if unfinished else 0
        end = len(data) - _length_of_unfinished(data)
        tokens = self._target.of_bytes(data[len(unfinished) : begin])
        text = data[begin : max(begin, end)].decode(errors="ignore")
        if text and is_start:
            tokens += self._target.encode(text)
        elif text:
            spelled = self._target.going_on(text)
            tokens += spelled if spelled is not None else self._target.of_bytes(text.encode())
        return tokens + self._target.of_bytes(data[max(begin, end) :])


@dataclass(frozen=True, slots=True)
class OwnIds:
    """A draft that drafts its own tokens, for one request."""

    ids: SameIds
    text: Reading
    is_same = True

    @property
    def usual_backlog(self) -> int:
        return 8  # the target's tokens may be several of the draft's, and the last ones are encoded again

    def read(self, token: int) -> list[int]:
        return [token]

    def reading(self) -> Reading:
        return self.text

    def write(self, logits: Tensor, vocab_size: int) -> Tensor:
        return self.ids.write(logits, vocab_size)


def _border(data: bytearray, begin: int) -> int | None:
    """Where a piece ends: before a space, where tokenizers mostly end a token; if there is none for long, anywhere."""
    end = begin + _SHORTEST
    while (end := data.find(b" ", end, begin + _LONGEST)) >= 0:
        if not data[end - 1 : end].isspace():
            return end
        end += 1
    if len(data) < begin + _LONGEST:
        return None
    end = begin + _LONGEST // 2
    return end - _length_of_unfinished(data[begin:end])


def _length_of_unfinished(data: bytes | bytearray) -> int:
    """How many of the last bytes begin a character without ending it."""
    for length in range(1, min(4, len(data) + 1)):
        byte = data[-length]
        if byte & 0xC0 != 0x80:  # where a character begins
            return length if _length_of_character(byte) > length else 0
    return 0


def _length_of_character(first: int) -> int:
    """Bytes of a character, by its first one; 1 for what begins none."""
    return 2 if 0xC2 <= first <= 0xDF else 3 if 0xE0 <= first <= 0xEF else 4 if 0xF0 <= first <= 0xF4 else 1
