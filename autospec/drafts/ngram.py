"""Prompt lookup: what followed the last few tokens when they stood earlier in prompt or answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autospec.drafts.base import DraftRequest, Proposal, with_logits
from autospec.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CONTINUATIONS = ("newest", "frequent")
USUAL_TOKENS = 33
"""That a block may bring; the time of indexing more of them is no part of drafting."""


class NGram:
    """Drafts by copying what followed an earlier match of the last tokens, longest match first.

    Args:
        max_ngram: longest run of last tokens looked for, at least 1.
        min_ngram: shortest run that is trusted, between 1 and `max_ngram`. One token is a weak match: more drafts,
            more of them accepted, a smaller share; 2 suits devices that verify a few tokens at much more than one.
        continuation: of several matches, copy after the first of those that went on with the most `frequent` token (the
            first to be so, among equals), or after the `newest`. Summaries copy most from the beginning of a text.
        tokens_per_match: draft at most so many tokens for each token of the match, so that longer matches are trusted
            further; None: the whole block.

    Raises:
        ConfigurationError: a size is not a whole number or out of range, or the continuation is unknown.

    Source: Saxena 2023, prompt lookup decoding.
    """

    name = "ngram"
    is_retrieval = True

    def __init__(
        self,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        continuation: str = "frequent",
        tokens_per_match: int | None = None,
    ) -> None:
        sizes = {"max_ngram": max_ngram, "min_ngram": min_ngram}
        if tokens_per_match is not None:
            sizes["tokens_per_match"] = tokens_per_match
        for option, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{option}={value!r}: a whole number of at least 1 is needed")
        if min_ngram > max_ngram:
            raise ConfigurationError(f"min_ngram={min_ngram} is larger than max_ngram={max_ngram}")
        if continuation not in CONTINUATIONS:
            raise ConfigurationError(f"continuation={continuation!r}: known are {', '.join(CONTINUATIONS)}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.continuation = continuation
        self.tokens_per_match = tokens_per_match

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        """Works with every target."""

    def start(self, request: DraftRequest) -> NGramSession:
        index = NewestEnds() if self.continuation == "newest" else FrequentEnds()
        sizes = range(self.max_ngram, self.min_ngram - 1, -1)
        return NGramSession(index, sizes, self.tokens_per_match, request.vocab_size)


class NewestEnds:
    """Of each n-gram, where it ended last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, text: Sequence[int], ends: range, sizes: range) -> None:
        """Index the n-grams of these sizes that end before these positions of the text."""
        known = self._ends
        for end in ends:
            for size in sizes:
                if end >= size:
                    known[tuple(text[end - size : end])] = end

    def find(self, ngram: tuple[int, ...]) -> int | None:
        return self._ends.get(ngram)


class FrequentEnds:
    """Of each n-gram, where it first ended before what followed it most often (the first to be so, among equals)."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[int, int]] = {}  # with the token that followed: count, first end
        self._best: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, text: Sequence[int], ends: range, sizes: range) -> None:
        """Index the n-grams of these sizes that end before these positions of the text."""
        found, best = self._found, self._best
        for end in ends:
            for size in sizes:
                if end >= size:
                    followed = tuple(text[end - size : end + 1])
                    known = found.get(followed)
                    found[followed] = counted = (1, end) if known is None else (known[0] + 1, known[1])
                    most = best.get(followed[:-1])
                    if most is None or counted[0] > most[0]:
                        best[followed[:-1]] = counted

    def find(self, ngram: tuple[int, ...]) -> int | None:
        best = self._best.get(ngram)
        return None if best is None else best[1]


class NGramSession:
    """An index over the committed tokens, extended by what is new at each call: the cost per block does not grow."""

    def __init__(
        self, index: NewestEnds | FrequentEnds, sizes: range, tokens_per_match: int | None, vocab_size: int
    ) -> None:
        self._index = index
        self._sizes = sizes
        self._tokens_per_match = tokens_per_match
        self._vocab_size = vocab_size
        self._num_indexed = 0  # n-grams that end before this position, and so have a continuation, are indexed

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        catch_up_seconds, find, length = self._catch_up(committed), self._index.find, len(committed)
        for size in self._sizes:
            start = find(tuple(committed[-size:])) if length >= size else None
            if start is not None:
                trusted = block_length if self._tokens_per_match is None else size * self._tokens_per_match
                tokens = self._continuation(committed, start, min(block_length, trusted))
                return Proposal(tokens, catch_up_seconds=catch_up_seconds, match_length=size)
        return Proposal(catch_up_seconds=catch_up_seconds)

    def _catch_up(self, committed: Sequence[int]) -> float:
        """Index what is new. Returns: seconds, of more than usual blocks bring: a prompt, or what others committed."""
        if len(committed) - self._num_indexed <= USUAL_TOKENS:
            self._extend(committed)
            return 0.0
        started = time.perf_counter()
        self._extend(committed)
        return time.perf_counter() - started

    def _extend(self, committed: Sequence[int]) -> None:
        self._index.extend(committed, range(self._num_indexed + 1, len(committed)), self._sizes)
        self._num_indexed = max(self._num_indexed, len(committed) - 1)

    def _continuation(self, committed: Sequence[int], start: int, num_tokens: int) -> list[int]:
        # a match that reaches the end of the text goes on into its own draft: "ab ab a" continues "b ab ab"
        period = len(committed) - start
        if num_tokens <= period:
            tokens = list(committed[start : start + num_tokens])
            return tokens if max(tokens) < self._vocab_size else with_logits(tokens, self._vocab_size)
        tokens = [committed[start + offset % period] for offset in range(num_tokens)]
        return with_logits(tokens, self._vocab_size)
