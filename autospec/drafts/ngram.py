"""Prompt lookup: what followed the last few tokens when they stood earlier in prompt or answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autospec.drafts.base import DraftRequest, Proposal
from autospec.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NGram:
    """Drafts by copying the continuation of the newest earlier match, longest match first.

    Args:
        max_ngram: longest run of last tokens looked for, at least 1.
        min_ngram: shortest run that is trusted, between 1 and `max_ngram`.

    Raises:
        ConfigurationError: a size is not a whole number or out of range.

    Source: Saxena 2023, prompt lookup decoding.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 2) -> None:
        for option, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{option}={value!r}: a whole number of at least 1 is needed")
        if min_ngram > max_ngram:
            raise ConfigurationError(f"min_ngram={min_ngram} is larger than max_ngram={max_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        """Works with every target."""

    def start(self, request: DraftRequest) -> NGramSession:
        return NGramSession(self.max_ngram, self.min_ngram, request.vocab_size)


class NGramSession:
    """An index over the committed tokens, extended by what is new at each call: the cost per block does not grow."""

    def __init__(self, max_ngram: int, min_ngram: int, vocab_size: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._vocab_size = vocab_size
        self._newest_end: dict[tuple[int, ...], int] = {}  # n-gram -> position after its newest occurrence
        self._num_indexed = 0  # n-grams that end before this position, and so have a continuation, are indexed

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        self._extend(committed)
        for size in self._sizes:
            start = self._newest_end.get(tuple(committed[-size:])) if len(committed) >= size else None
            if start is not None:
                return Proposal(self._continuation(committed, start, block_length))
        return Proposal()

    def _extend(self, committed: Sequence[int]) -> None:
        for end in range(self._num_indexed + 1, len(committed)):
            for size in self._sizes:
                if end >= size:
                    self._newest_end[tuple(committed[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(committed) - 1)

    def _continuation(self, committed: Sequence[int], start: int, block_length: int) -> list[int]:
        # a match that reaches the end of the text goes on into its own draft: "ab ab a" continues "b ab ab"
        period = len(committed) - start
        tokens = [committed[start + offset % period] for offset in range(block_length)]
        # a prompt may hold ids that the target has no logits for; they can never be accepted
        stop = next((i for i, token in enumerate(tokens) if token >= self._vocab_size), len(tokens))
        return tokens[:stop]
