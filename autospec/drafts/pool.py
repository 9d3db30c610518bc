"""Earlier texts, searchable by what stands before a continuation; bounded, saved to and shared from a file.

A suffix array: the start of every position, sorted by what follows there. All occurrences of a run of tokens are
neighbours in it, and among those the ones that go on alike.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.drafts.vocabulary import fingerprint
from autospec.errors import DraftError

Tokens = NDArray[np.uint32]

DEPTH = 32  # tokens after a start that are sorted by; longer matches cannot be told apart
END = 0xFFFFFFFF  # after each text, so that no match runs from one into the next
FORMAT = 1
_SMALL = 20_000  # tokens that are sorted in a few milliseconds
_KEYS = ("format", "texts", "starts", "tokenizer", "digest")


class SuffixIndex:
    """A fixed set of texts.

    Args:
        texts: [n], the texts one after the other, each with `END` behind it.
        starts: [n], positions sorted by what follows; made from `texts` if None.
    """

    def __init__(self, texts: Tokens, starts: NDArray[np.uint32] | None = None) -> None:
        self.texts = texts
        self.starts = starts if starts is not None else sorted_starts(texts)
        self._bytes = memoryview(np.ascontiguousarray(texts, dtype=">u4").tobytes())  # compares as the tokens do

    def longest_match(self, tokens: Sequence[int], min_length: int) -> tuple[int, int, int]:
        """The longest end of `tokens` that occurs, and where.

        Returns:
            length, and the range of `starts` that begin with it; length 0 when none of at least `min_length` occurs.
        """
        best = (0, 0, 0)
        if not len(self.starts):
            return best
        low, high = min_length, min(DEPTH - 1, len(tokens))
        end = _as_bytes(tokens[len(tokens) - high :])
        while low <= high:
            length = (low + high + 1) // 2
            first, last = self._span(end[len(end) - 4 * length :], 0, len(self.starts))
            if first < last:
                best, low = (length, first, last), length + 1
            else:
                high = length - 1
        return best

    def span(self, tokens: Sequence[int], first: int, last: int) -> tuple[int, int]:
        """The range of starts, within a given one, that begin with `tokens`."""
        return self._span(_as_bytes(tokens), first, last)

    def _span(self, wanted: bytes, first: int, last: int) -> tuple[int, int]:
        width = len(wanted)
        key = lambda start: bytes(self._bytes[4 * int(start) : 4 * int(start) + width])  # noqa: E731
        return (
            bisect.bisect_left(self.starts, wanted, first, last, key=key),
            bisect.bisect_right(self.starts, wanted, first, last, key=key),
        )

    def continuation(
        self, length: int, first: int, last: int, max_tokens: int, min_score: float
    ) -> tuple[list[int], list[float]]:
        """The likeliest continuation of a match, as `SuffixAutomaton.continuation`. Args: as from `longest_match`."""
        tokens: list[int] = []
        scores: list[float] = []
        score = 1.0
        while len(tokens) < max_tokens and length + len(tokens) < DEPTH:
            places = self.starts[first:last].astype(np.int64) + length + len(tokens)
            following = self.texts[np.minimum(places, len(self.texts) - 1)]
            values, begins, counts = np.unique(following, return_index=True, return_counts=True)
            counts[values == END] = 0
            total = len(following)
            best = int(counts.argmax())
            score *= int(counts[best]) / total
            if counts[best] == 0 or score < min_score:
                break
            tokens.append(int(values[best]))
            scores.append(score)
            first, last = first + int(begins[best]), first + int(begins[best]) + int(counts[best])
        return tokens, scores


def _as_bytes(tokens: Sequence[int]) -> bytes:
    """Four for each, that compare as the tokens do."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def sorted_starts(texts: Tokens) -> NDArray[np.uint32]:
    """Positions sorted by the `DEPTH` tokens that follow, by doubling; ends of texts are left out.

    Source: Manber and Myers 1993.
    """
    ranks = np.unique(texts, return_inverse=True)[1].astype(np.int64)
    width, count = 1, len(texts)
    while width < DEPTH and count:
        behind = np.zeros(count, dtype=np.int64)
        behind[: max(0, count - width)] = ranks[width:] + 1
        pairs = ranks * (int(ranks.max()) + 2) + behind
        ranks = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        width *= 2
    order: NDArray[np.uint32] = np.argsort(ranks, kind="stable").astype(np.uint32)
    is_text: NDArray[np.bool_] = texts[order] != END
    return np.asarray(order[is_text], dtype=np.uint32)


_pools: weakref.WeakSet[SuffixPool] = weakref.WeakSet()


def _after_fork() -> None:
    """A thread that held a lock does not exist in the child."""
    for pool in _pools:
        pool._renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class SuffixPool:
    """Texts of earlier requests, oldest first to go.

    Args:
        max_tokens: of all texts together.

    Thread-safe. What was added last is searchable once `build` has run, which `add` sees to when enough has come
    together: at once in a small pool, in a thread of its own in a large one, so that no request waits for it.
    """

    def __init__(self, *, max_tokens: int = 1_000_000, tokenizer: str = "") -> None:
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer
        self._texts: deque[Tokens] = deque()
        self._num_tokens = 0
        self._num_new = 0
        self._renew_locks()
        _pools.add(self)
        self.index = SuffixIndex(np.zeros(0, dtype=np.uint32))

    def _renew_locks(self) -> None:
        self._lock = threading.Lock()
        self._building = threading.Lock()  # held by the one build that runs

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, tokens: Iterable[int]) -> None:
        """Add one text; drop the oldest ones beyond the bound."""
        text = np.fromiter((*tokens, END), dtype=np.uint32)[-self.max_tokens :]
        if len(text) < 2:
            return
        with self._lock:
            self._texts.append(text)
            self._num_tokens += len(text)
            self._num_new += len(text)
            while self._num_tokens > self.max_tokens:
                self._num_tokens -= len(self._texts.popleft())
            is_due = self._num_new * 8 >= self._num_tokens  # a rebuild is paid for by an eighth of what it sorts
        if is_due and self._num_tokens <= _SMALL:
            self.build()
        elif is_due and not self._building.locked():
            threading.Thread(target=self.build, name="autospec-pool", daemon=True).start()

    def belong_to(self, tokenizer: Any) -> None:
        """Take texts of this tokenizer only.

        Raises:
            DraftError: it holds texts of another one.
        """
        mine = fingerprint(tokenizer)
        if self.tokenizer and self.tokenizer != mine:
            raise DraftError(
                "the pool was made with another tokenizer, its ids mean other text: make it again with this one"
            )
        self.tokenizer = mine

    def build(self) -> None:
        """Make everything added so far searchable."""
        with self._building:
            with self._lock:
                texts = list(self._texts)
                self._num_new = 0
            self.index = SuffixIndex(np.concatenate(texts) if texts else np.zeros(0, dtype=np.uint32))

    def clear(self) -> None:
        with self._lock:
            self._texts.clear()
            self._num_tokens = 0
        self.build()

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        self.build()
        with path.open("wb") as file:
            np.savez(
                file,
                format=np.asarray(FORMAT),
                texts=self.index.texts,
                starts=self.index.starts,
                tokenizer=np.asarray(self.tokenizer),
                digest=np.asarray(_digest(self.index.texts, self.index.starts)),
            )

    @classmethod
    def load(cls, path: Path, *, max_tokens: int = 1_000_000) -> SuffixPool:
        """Read what `save` wrote.

        Raises:
            DraftError: the file is missing, damaged, of another version, or no pool at all.
        """
        arrays = _read(path)
        texts, starts = arrays["texts"], arrays["starts"]
        is_whole = (
            texts.dtype == starts.dtype == np.uint32
            and texts.ndim == starts.ndim == 1
            and str(arrays["digest"]) == _digest(texts, starts)
        )
        if not is_whole:
            raise DraftError(f"{path}: a damaged pool; make it again")
        pool = cls(max_tokens=max_tokens, tokenizer=str(arrays["tokenizer"]))
        pool._texts.extend(np.split(texts, np.flatnonzero(texts == END)[:-1] + 1) if len(texts) else [])
        pool._num_tokens = len(texts)
        pool.index = SuffixIndex(texts, starts)
        return pool


def _digest(texts: Tokens, starts: NDArray[np.uint32]) -> str:
    return hashlib.blake2b(texts.tobytes() + starts.tobytes(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if any(key not in arrays for key in _KEYS):
                raise DraftError(f"{path}: not a pool of earlier texts")
            found = {key: arrays[key] for key in _KEYS}
    except DraftError:
        raise
    except OSError as error:
        raise DraftError(f"{path}: {error.strerror or error}") from error
    except Exception as error:
        raise DraftError(f"{path}: cut short or not a pool of earlier texts ({type(error).__name__})") from error
    if int(found["format"]) != FORMAT:
        raise DraftError(
            f"{path}: version {int(found['format'])} of the file, this release reads {FORMAT}; make it again"
        )
    return found
