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
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, text: Sequence[int], ends: range, sizes: range) -> None:
        """Index the n-grams of these sizes (descending) that end before these positions of the text."""
        known, longest = self.ends, sizes[0]
        for end in ends:
            ngram = tuple(text[end - longest if end > longest else 0 : end])
            for size in sizes:
                known[ngram[-size:]] = end  # where a text begins, shorter ones more than once


class FrequentEnds:
    """Of each n-gram, where it first ended before what followed it most often (the first to be so, among equals)."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self._most: dict[tuple[int, ...], int] = {}  # times that it went on as from there
        self._found: dict[tuple[int, ...], tuple[int, int]] = {}  # with the token that followed: times, first end

    def extend(self, text: Sequence[int], ends: range, sizes: range) -> None:
        """Index the n-grams of these sizes (descending) that end before these positions of the text."""
        found, most, longest = self._found, self._most, sizes[0]
        for end in ends:
            followed = tuple(text[end - longest if end > longest else 0 : end + 1])
            for size in sizes:
                if size <= end:
                    with_next = followed[-size - 1 :]
                    times, first = found.get(with_next, (0, end))
                    times += 1
                    found[with_next] = times, first
                    ngram = with_next[:-1]
                    if times > most.get(ngram, 0):
                        most[ngram] = times
                        self.ends[ngram] = first


class NGramSession:
    """An index over the committed tokens, extended by what is new at each call: the cost per block does not grow."""

    def __init__(
        self, index: NewestEnds | FrequentEnds, sizes: range, tokens_per_match: int | None, vocab_size: int
    ) -> None:
        self._extend, self._find = index.extend, index.ends.get
        self._sizes = sizes
        self._longest = sizes[0]
        self._tokens_per_match = tokens_per_match
        self._vocab_size = vocab_size
        self._num_indexed = 0  # n-grams that end before this position, and so have a continuation, are indexed

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        num_new = len(committed) - self._num_indexed
        started = time.perf_counter() if num_new > USUAL_TOKENS else None  # a prompt, or what others committed
        if num_new > 1:
            self._extend(committed, range(self._num_indexed + 1, len(committed)), self._sizes)
            self._num_indexed = len(committed) - 1
        catch_up_seconds = 0.0 if started is None else time.perf_counter() - started
        last, find = tuple(committed[-self._longest :]), self._find
        for size in self._sizes:
            start = find(last[-size:])  # a text shorter than the size is found nowhere: it has no place for itself
            if start is not None:
                num_tokens = block_length
                if self._tokens_per_match is not None:
                    num_tokens = min(block_length, size * self._tokens_per_match)
                return Proposal(self._continuation(committed, start, num_tokens), None, catch_up_seconds, (), (), size)
        return Proposal(catch_up_seconds=catch_up_seconds)

    def _continuation(self, committed: Sequence[int], start: int, num_tokens: int) -> list[int]:
        tokens = [*committed[start : start + num_tokens]]
        if len(tokens) < num_tokens:  # a match that reaches the end goes on into its own draft: "ab ab a" by "b ab ab"
            tokens = (tokens * num_tokens)[:num_tokens]
        return tokens if max(tokens) < self._vocab_size else with_logits(tokens, self._vocab_size)
