"""Drafts from whatever followed the last tokens before: in this request, and in the answers of earlier ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autospec.drafts.automaton import SuffixAutomaton
from autospec.drafts.base import DraftRequest, Proposal, with_logits
from autospec.drafts.ngram import USUAL_TOKENS
from autospec.drafts.pool import DEPTH, SuffixIndex, SuffixPool
from autospec.errors import ConfigurationError, DraftError
from autospec.forks import renew_after_fork
from autospec.notices import warn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALL = ""  # the pool of all segments together
_Draft = tuple[list[int], list[float], int]  # tokens, their scores, length of the match
MAX_SEGMENT_POOLS = 64


class Suffix:
    """Drafts the likeliest continuation of the longest match, for as long as it is likely enough.

    A token's score is the product of the shares with which its draft's tokens followed before; the draft ends where the
    score falls below `min_score`. Of a match in this request and one in the pool, that with the larger sum of
    scores is taken, which is how many of its tokens would be accepted if the past repeated itself.

    Args:
        pool: earlier answers, as a pool or as the file of one; None: an empty one of its own. A damaged file stops no
            answer: the source is off in every request, with that reason in its record.
        learns: answers are added to the pool as requests end. The pool then holds users' text, in memory.
        per_segment: each segment has a pool of its own, which `pool` is read beside. Of many segments those that learnt
            last keep theirs.
        min_match: shortest run of last tokens that is trusted.
        min_score: between 0 and 1.
        max_pool_tokens: bound of each pool that is made here; the oldest answers go first.

    Raises:
        ConfigurationError: a setting is out of range.
        DraftError: the file is missing.

    Source: Oliaro et al. 2024, SuffixDecoding.
    """

    name = "suffix"
    is_retrieval = True

    def __init__(
        self,
        pool: SuffixPool | str | Path | None = None,
        *,
        learns: bool = True,
        per_segment: bool = False,
        min_match: int = 1,
        min_score: float = 0.2,
        max_pool_tokens: int = 1_000_000,
    ) -> None:
        for option, value, least in (("min_match", min_match, 1), ("max_pool_tokens", max_pool_tokens, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{option}={value!r}: a whole number of at least {least} is needed")
        if min_match >= DEPTH:
            raise ConfigurationError(
                f"min_match={min_match}: less than {DEPTH} is needed, longer ones are not told apart"
            )
        if isinstance(min_score, bool) or not isinstance(min_score, (int, float)) or not 0.0 < min_score <= 1.0:
            raise ConfigurationError(f"min_score={min_score!r}: a number above 0 and up to 1 is needed")
        for option, flag in (("learns", learns), ("per_segment", per_segment)):
            if not isinstance(flag, bool):
                raise ConfigurationError(f"{option}={flag!r}: True or False is needed")
        self.failure: str | None = None
        if isinstance(pool, (str, Path)):
            pool = self._loaded(Path(pool), max_pool_tokens)
        elif pool is not None and not isinstance(pool, SuffixPool):
            raise ConfigurationError(f"pool={pool!r:.60}: a SuffixPool, the file of one, or None is needed")
        self.learns = learns
        self.per_segment = per_segment
        self.min_match = min_match
        self.min_score = min_score
        self._max_pool_tokens = max_pool_tokens
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._pools: dict[str, SuffixPool] = {_ALL: pool or SuffixPool(max_tokens=max_pool_tokens)}

    @property
    def pools(self) -> Mapping[str, SuffixPool]:
        """By segment; under an empty name that of all together."""
        return self._pools

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        if tokenizer is not None:
            self._pools[_ALL].belong_to(tokenizer)

    def start(self, request: DraftRequest) -> SuffixSession:
        if self.failure is not None:
            raise DraftError(self.failure)
        with self._lock:
            pools = [self._pools[name] for name in dict.fromkeys((request.segment, _ALL)) if name in self._pools]
        return SuffixSession(pools, self.min_match, self.min_score, request.vocab_size)

    def learn(self, request: DraftRequest, answer: Sequence[int]) -> None:
        """Add the answer of a request that has ended."""
        if not self.learns or self.failure is not None:
            return
        self._pool_of(request.segment if self.per_segment else _ALL).add(answer)

    def _loaded(self, path: Path, max_tokens: int) -> SuffixPool | None:
        try:
            return SuffixPool.load(path, max_tokens=max_tokens)
        except DraftError as error:
            if not path.is_file():
                raise
            self.failure = str(error)
            warn(f"suffix will not draft: {error}")
            return None

    def _pool_of(self, name: str) -> SuffixPool:
        """The pool that a segment's answers go to, from now on the last to be dropped."""
        with self._lock:
            if name == _ALL:
                return self._pools[_ALL]
            pool = self._pools.pop(name, None)
            if pool is None:
                pool = SuffixPool(max_tokens=self._max_pool_tokens, tokenizer=self._pools[_ALL].tokenizer)
            self._pools[name] = pool
            if len(self._pools) > MAX_SEGMENT_POOLS + 1:
                del self._pools[next(each for each in self._pools if each != _ALL)]
            return pool


class SuffixSession:
    """An automaton over the committed tokens, extended by what is new at each call."""

    def __init__(self, pools: Sequence[SuffixPool], min_match: int, min_score: float, vocab_size: int) -> None:
        # as they are now: later answers are for later requests
        self._indexes = [index for pool in pools if len((index := pool.index).starts)]
        self._min_match = min_match
        self._min_score = min_score
        self._vocab_size = vocab_size
        self._automaton = SuffixAutomaton()

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        automaton = self._automaton
        new = committed[automaton.num_tokens :]
        started = time.perf_counter() if len(new) > USUAL_TOKENS else None
        automaton.extend(new)
        catch_up_seconds = 0.0 if started is None else time.perf_counter() - started
        state, match_length = automaton.longest_match(self._min_match)
        tokens, scores = automaton.continuation(state, block_length, self._min_score)
        for index in self._indexes:
            found = self._in(index, committed, block_length)
            if sum(found[1]) > sum(scores):
                tokens, scores, match_length = found
        if tokens and max(tokens) >= self._vocab_size:
            tokens = with_logits(tokens, self._vocab_size)
            scores = scores[: len(tokens)]
        return Proposal(tokens, None, catch_up_seconds, (), scores, match_length)

    def _in(self, index: SuffixIndex, committed: Sequence[int], block_length: int) -> _Draft:
        length, first, last = index.longest_match(committed, self._min_match)
        if not length:
            return [], [], 0
        return *index.continuation(length, first, last, block_length, self._min_score), length
