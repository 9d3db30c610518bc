"""What makes retrieval's proposals cheap changes none: beside brute force, and beside the automaton step by step."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_drafts import request

from autospec.drafts import NGram, Suffix
from autospec.drafts.base import Proposal

pytestmark = pytest.mark.compat

VOCABULARY = 9
"""Of the target; a prompt may hold larger ids."""


def answers(seed: int) -> Iterator[tuple[list[int], int]]:
    """Committed tokens and a block length, block by block: a prompt first, then drafts that are taken or rejected."""
    rng = random.Random(seed)
    kinds = rng.choice([1, 2, 3, 6, VOCABULARY + 1])
    committed = [rng.randrange(kinds) for _ in range(rng.choice([0, 1, 2, 3, 30, 60]))]
    for _ in range(60):
        yield committed, rng.choice([1, 2, 3, 8, 16])
        start = rng.randrange(len(committed)) if committed else 0
        copied = committed[start : start + rng.randrange(12)]
        committed = [*committed, *copied[: rng.randrange(12)], *[rng.randrange(kinds)] * rng.choice([0, 1, 1, 40])]


def with_logits(tokens: list[int]) -> list[int]:
    unknown = [position for position, token in enumerate(tokens) if token >= VOCABULARY]
    return tokens[: unknown[0]] if unknown else tokens


def searched(committed: list[int], block_length: int, source: NGram) -> tuple[list[int], int]:
    """Tokens and length of the match, found by looking at every place of the text."""
    for size in range(source.max_ngram, source.min_ngram - 1, -1):
        last = committed[-size:]
        ends = [end for end in range(size, len(committed)) if committed[end - size : end] == last]
        if not ends or len(last) < size:
            continue
        if source.continuation == "newest":
            end = ends[-1]
        else:
            times: Counter[int] = Counter()
            reached: dict[int, int] = {}  # the count that a token was the first to reach
            for each in ends:
                times[committed[each]] += 1
                reached.setdefault(times[committed[each]], committed[each])
            token = reached[max(times.values())]
            end = next(each for each in ends if committed[each] == token)
        length = min(block_length, size * source.tokens_per_match) if source.tokens_per_match else block_length
        period = len(committed) - end
        return with_logits([committed[end + offset % period] for offset in range(length)]), size
    return [], 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("continuation", ["newest", "frequent"])
@pytest.mark.parametrize(
    "sizes", [{}, {"max_ngram": 5, "min_ngram": 2}, {"max_ngram": 1}, {"tokens_per_match": 2}], ids=str
)
def test_ngram_proposes_what_a_search_finds(continuation: str, sizes: dict[str, int], seed: int) -> None:
    source = NGram(continuation=continuation, **sizes)
    session = source.start(request(vocab_size=VOCABULARY))
    for committed, block_length in answers(seed):
        proposal = session.propose(committed, block_length)
        assert (proposal.tokens, proposal.match_length) == searched(committed, block_length, source)
        assert type(proposal.tokens) is list


class StepByStep:
    """The automaton as Blumer et al. 1985 have it, a function for each step, and everything counted as it comes."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.newest = 0

    def state(self, length: int, followers: dict[int, int]) -> int:
        self.next.append(followers)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(0)
        return len(self.link) - 1

    def append(self, token: int) -> None:
        newest, state = self.state(self.length[self.newest] + 1, {}), self.newest
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = newest
            state = self.link[state]
        self.link[newest] = 0 if state < 0 else self.ending(state, token)
        self.newest = counted = newest
        for _ in range(64):
            if counted <= 0:
                break
            self.count[counted] += 1
            counted = self.link[counted]

    def ending(self, state: int, token: int) -> int:
        following = self.next[state][token]
        if self.length[following] == self.length[state] + 1:
            return following
        split = self.state(self.length[state] + 1, dict(self.next[following]))
        self.link[split], self.count[split] = self.link[following], self.count[following]
        self.link[following] = split
        while state >= 0 and self.next[state].get(token) == following:
            self.next[state][token] = split
            state = self.link[state]
        return split

    def match(self, min_length: int) -> tuple[int, int]:
        state = self.link[self.newest]
        while state > 0 and self.length[state] >= min_length:
            if self.next[state]:
                return state, self.length[state]
            state = self.link[state]
        return 0, 0

    def continuation(self, state: int, max_tokens: int, min_score: float) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        scores: list[float] = []
        score = 1.0
        while len(tokens) < max_tokens:
            while state > 0 and not self.next[state]:
                state = self.link[state]
            if state <= 0:
                break
            ranked = [(self.count[after], place) for place, after in enumerate(self.next[state].values())]
            most, place = max(ranked)
            score *= most / sum(count for count, _ in ranked)
            if score < min_score:
                break
            token, state = list(self.next[state].items())[place]
            tokens.append(token)
            scores.append(score)
        return tokens, scores


def stepped(automaton: StepByStep, source: Suffix, committed: list[int], block_length: int) -> Proposal:
    """What `suffix` is to propose: of this text and of its pools, what promises most."""
    for token in committed[automaton.length[automaton.newest] :]:
        automaton.append(token)
    state, length = automaton.match(source.min_match)
    found = [(*automaton.continuation(state, block_length, source.min_score), length)]
    for pool in source.pools.values():
        length, first, last = pool.index.longest_match(committed, source.min_match)
        if length:
            found.append((*pool.index.continuation(length, first, last, block_length, source.min_score), length))
    tokens, scores, length = max(found, key=lambda each: sum(each[1]))
    tokens = with_logits(tokens)
    return Proposal(tokens, scores=scores[: len(tokens)], match_length=length)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("settings", [{}, {"min_match": 3, "min_score": 0.05}, {"min_score": 1.0}], ids=str)
def test_suffix_proposes_what_the_automaton_step_by_step_does(
    settings: dict[str, Any], has_pool: bool, seed: int
) -> None:
    source = Suffix(learns=has_pool, **settings)
    for other in range(5 if has_pool else 0):
        *_, (text, _) = answers(1000 + 7 * seed + other)
        source.learn(request(), text)
    source.pools[""].build()
    session, automaton = source.start(request(vocab_size=VOCABULARY)), StepByStep()
    for committed, block_length in answers(seed):
        proposal = session.propose(committed, block_length)
        expected = stepped(automaton, source, committed, block_length)
        assert proposal.tokens == expected.tokens
        assert list(proposal.scores) == expected.scores  # to the last bit
        assert proposal.match_length == expected.match_length


def test_suffix_counts_no_further_than_it_says() -> None:
    """In a text of one token every suffix ends anew with each; the bound on counting is part of what is proposed."""
    session, automaton, source = Suffix(learns=False).start(request()), StepByStep(), Suffix(learns=False)
    committed: list[int] = []
    for token in [7] * 150 + [8] + [7] * 90 + [9] + [7] * 100:
        committed.append(token)
        proposal, expected = session.propose(committed, 6), stepped(automaton, source, committed, 6)
        assert (proposal.tokens, list(proposal.scores)) == (expected.tokens, expected.scores)


def calls(run: Callable[[], Any]) -> int:
    """Functions of Python and of C that are called."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


CALLS = {"newest": 12, "frequent": 24, "suffix": 58}
"""Of one proposal of eight tokens after two new ones were committed."""


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("newest", NGram(continuation="newest")),
        ("frequent", NGram(continuation="frequent")),
        ("suffix", Suffix(learns=False)),
    ],
)
def test_at_most_so_many_calls(name: str, source: Any) -> None:
    rng = random.Random(0)
    phrases = [[rng.randrange(1000) for _ in range(8)] for _ in range(20)]
    committed = [token for _ in range(60) for token in rng.choice(phrases)]
    blocks = 40
    session = source.start(request(vocab_size=1000))
    session.propose(committed[: -2 * blocks], 8)
    texts = [committed[: len(committed) - 2 * left] for left in range(blocks - 1, -1, -1)]
    count = calls(lambda: [session.propose(text, 8) for text in texts])
    assert 0 < count <= CALLS[name] * blocks
