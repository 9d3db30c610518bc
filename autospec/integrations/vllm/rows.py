"""Which request is in which row of the engine's batch. vLLM says no names, and rows move between calls.

A request is recognised by its whole text: row and length first, then every token. So a wrong match is possible only
where two requests have had the very same tokens so far. Their drafts then follow from the same text, and what becomes
of them is not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
_TAIL = 32


class History:
    """The tokens of one request, as a list for the sources and as an array to compare."""

    __slots__ = ("_array", "text")

    def __init__(self, tokens: Tokens) -> None:
        self.text: list[int] = tokens.tolist()
        self._array = np.empty(max(64, 2 * len(tokens)), dtype=np.int32)
        self._array[: len(tokens)] = tokens

    def __len__(self) -> int:
        return len(self.text)

    def append(self, tokens: Sequence[int]) -> None:
        start = len(self.text)
        self.text.extend(tokens)
        if len(self.text) > len(self._array):
            grown = np.empty(2 * len(self.text), dtype=np.int32)
            grown[:start] = self._array[:start]
            self._array = grown
        self._array[start : len(self.text)] = tokens

    def cut(self, num_tokens: int) -> None:
        """Take back so many of the last tokens."""
        del self.text[len(self.text) - num_tokens :]

    def is_begin_of(self, row: Tokens, length: int) -> bool:
        """Are the first `length` tokens of a row these, all of them?"""
        return len(self.text) == length and bool(np.array_equal(self._array[:length], row[:length]))

    def is_within(self, row: Tokens, length: int) -> bool:
        """Do the first `length` tokens of a row begin with these, and go on?"""
        mine = len(self.text)
        return mine < length and bool(np.array_equal(self._array[:mine], row[:mine]))

    @property
    def key(self) -> tuple[int, bytes]:
        """The same for equal histories."""
        length = len(self.text)
        return length, self._array[max(0, length - _TAIL) : length].tobytes()

    def equals(self, other: History) -> bool:
        return other.is_begin_of(self._array, len(self.text))


class Known(Protocol):
    """What is kept of a request."""

    history: History


K = TypeVar("K", bound=Known)


@dataclass(frozen=True, slots=True)
class Matched(Generic[K]):
    """What the rows of a call are."""

    found: list[K | None]  # [rows]; None: a request not seen before
    is_sure: list[bool]  # [rows]; False: another request has the same tokens, and it may be that one
    gone: list[K]  # requests in no row
    num_missed: list[int]  # [rows], tokens that were committed since the last call, without one


def match(
    known: Sequence[K | None],
    away: Iterable[K],
    lengths: Sequence[int],
    token_ids: Tokens,
    *,
    may_have_missed: bool = False,
    ends: Collection[int] = (),
) -> Matched[K]:
    """Find the requests that rows go on from.

    Args:
        known: what was in each row at the last call.
        away: requests that were in no row then, and may come back.
        lengths: [rows], tokens that each row had before this call's.
        token_ids: [at least rows, longest], tokens of each row, this call's included.
        may_have_missed: steps without a call are to be expected since the last one.
        ends: tokens after which no answer goes on; behind one of them a text is another request's.
    """
    found: list[K | None] = []
    for row, length in enumerate(lengths):
        here = known[row] if row < len(known) else None
        stays = here is not None and here.history.is_begin_of(token_ids[row], length)
        found.append(here if stays else None)
    taken = {id(each) for each in found if each is not None}
    left = [each for each in (*known, *away) if each is not None and id(each) not in taken]
    num_missed = [0] * len(found)
    if left:
        _find_moved(found, left, lengths, token_ids)
        is_gap = not any(each is not None and each in known for each in found)
        late = _late(found, left, lengths, token_ids, ends) if may_have_missed or is_gap else {}
        # as one: a step without a call is one for all rows, while a conversation that goes on is so in one row alone
        for row, each in late.items() if may_have_missed or len(late) > 1 else ():
            left.remove(each)
            found[row], num_missed[row] = each, lengths[row] - len(each.history)
    has_moved = any(here is not each for here, each in zip_longest(known, found))
    return Matched(found, _alone(found, left) if has_moved else [True] * len(found), left, num_missed)


def _find_moved(found: list[K | None], left: list[K], lengths: Sequence[int], token_ids: Tokens) -> None:
    """Fill rows with those of `left` that they go on from, and take them out there."""
    by_length: dict[int, list[K]] = defaultdict(list)
    for each in left:
        by_length[len(each.history)].append(each)
    for row, length in enumerate(lengths):
        candidates = by_length.get(length, []) if found[row] is None else []
        moved = next((each for each in candidates if each.history.is_begin_of(token_ids[row], length)), None)
        if moved is not None:
            candidates.remove(moved)
            left.remove(moved)
            found[row] = moved


def _late(
    found: Sequence[K | None], left: Sequence[K], lengths: Sequence[int], token_ids: Tokens, ends: Collection[int]
) -> dict[int, K]:
    """Of rows not found, those that go on from one of `left` after tokens which were never shown."""
    late: dict[int, K] = {}
    longest_first = sorted(left, key=lambda each: len(each.history), reverse=True)
    for row, length in enumerate(lengths):
        for each in longest_first if found[row] is None else ():
            if not each.history.is_within(token_ids[row], length):
                continue
            if set(ends).isdisjoint(token_ids[row, len(each.history) - 1 : length].tolist()):
                late[row] = each
                longest_first.remove(each)
                break
    return late


def _alone(found: Sequence[K | None], gone: Sequence[K]) -> list[bool]:
    """Of each row: does no other request have the same tokens?"""
    alike: dict[tuple[int, bytes], list[K]] = defaultdict(list)
    for each in (*found, *gone):
        if each is not None:
            alike[each.history.key].append(each)

    def is_alone(each: K) -> bool:
        others = alike[each.history.key]
        return len(others) == 1 or not any(o is not each and o.history.equals(each.history) for o in others)

    return [each is None or is_alone(each) for each in found]
