"""From the target's token ids to those of a draft that has its own, and from the draft's logits back.

Whatever a translation does, q stays exact: the draft's logits become a distribution over the target's ids before
anything is drawn, and how the committed text is read only decides what the draft thinks of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Reading(Protocol):
    """The committed text of one request as the draft's own ids."""

    num_settled: int  # of the ids read last: so many stay, however the text goes on

    def read(self, committed: Sequence[int]) -> Sequence[int]:
        """[m] ids of the draft. Args: committed: of the target; it only ever grows."""


class Translation(Protocol):
    """What a draft's ids mean to a target; holds nothing of any request."""

    @property
    def is_same(self) -> bool:
        """What is drafted is read under the same id."""

    @property
    def usual_backlog(self) -> int:
        """Ids that a draft's cache mostly lacks when it drafted the block before: of the bonus and the last draft."""

    def read(self, token: int) -> list[int]:
        """The draft's ids for a token that was just drafted."""

    def reading(self) -> Reading:
        """For one request, from its start."""

    def write(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits over the target's ids, [1, vocab_size], -inf where the draft has none.

        Args:
            logits: of the draft, [1, draft_vocab_size].
            vocab_size: of the target's logits.

        Returns:
            the logits themselves where nothing is to be changed.
        """


@dataclass(frozen=True, slots=True)
class SameIds:
    """Both mean the same by the ids below `num_ids`; no other is drafted."""

    num_ids: int
    is_same = True

    @property
    def usual_backlog(self) -> int:
        return 2

    def read(self, token: int) -> list[int]:
        return [token]

    def reading(self) -> Reading:
        return _AsItStands()

    def write(self, logits: Tensor, vocab_size: int) -> Tensor:
        if self.num_ids >= logits.shape[-1] == vocab_size:
            return logits
        scores = logits.new_full((1, vocab_size), -torch.inf)
        scores[:, : self.num_ids] = logits[:, : self.num_ids]
        return scores


class OtherIds:
    """Each id of the target is read as some of the draft's, and some of the draft's stand for one of the target's.

    Args:
        reads: ids of the draft that a target's id is read as: mostly one, several, or none at all.
        writes: [draft_vocab_size], int64, the target's id that a draft's id stands for, -1 where there is none; a
            target's id appears once at most, and is read as the very id that stands for it.
        start: what the draft reads before the text.
    """

    def __init__(self, reads: Callable[[int], tuple[int, ...]], writes: Tensor, start: tuple[int, ...] = ()) -> None:
        self.reads = reads
        self.writes = writes
        self.start = start
        self._drawable = (writes >= 0).nonzero()[:, 0]
        self._meanings = writes[self._drawable]

    def on(self, device: torch.device, vocab_size: int) -> OtherIds:
        """The same for a target on a device with logits for the first `vocab_size` ids."""
        return OtherIds(self.reads, self.writes.where(self.writes < vocab_size, -1).to(device), self.start)

    is_same = False
    usual_backlog = 4  # one token may be several of the draft's

    def read(self, token: int) -> list[int]:
        return list(self.reads(token))

    def reading(self) -> Reading:
        return _TokenByToken(self.reads, self.start)

    def write(self, logits: Tensor, vocab_size: int) -> Tensor:
        scores = logits.new_full((1, vocab_size), -torch.inf)
        scores[:, self._meanings] = logits[:, self._drawable]
        return scores


class _AsItStands:
    num_settled = sys.maxsize

    def read(self, committed: Sequence[int]) -> Sequence[int]:
        return committed


class _TokenByToken:
    num_settled = sys.maxsize

    def __init__(self, reads: Callable[[int], tuple[int, ...]], start: tuple[int, ...]) -> None:
        self._reads = reads
        self._ids = list(start)
        self._num_read = 0  # tokens of the target

    def read(self, committed: Sequence[int]) -> Sequence[int]:
        for token in committed[self._num_read :]:
            self._ids.extend(self._reads(token))
        self._num_read = len(committed)
        return self._ids
