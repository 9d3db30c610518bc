"""A suffix automaton over one growing text: where its end stood before, and what followed there how often.

Source: Blumer et al. 1985 for the automaton, built token by token.
"""

from __future__ import annotations

from collections.abc import Iterable

_COUNTED = 64  # suffixes of each new end that are counted; more only in texts that hardly do anything but repeat


class SuffixAutomaton:
    """All substrings of a text, each with how often it occurred, in memory that grows with the text alone.

    A state stands for substrings with the same ends. Its link leads to the longest of its suffixes that ends elsewhere,
    too, so that the link of the newest state is the longest end of the text that has occurred before.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # [state] token -> state
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._count = [0]  # ends of this state
        self._newest = 0
        self.num_tokens = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    @property
    def num_states(self) -> int:
        return len(self._link)

    def matches(self, min_length: int) -> Iterable[tuple[int, int]]:
        """(state, length) of the ends of the text that occurred before and went on, longest first."""
        state = self._link[self._newest]
        while state > 0 and self._length[state] >= min_length:
            if self._next[state]:
                yield state, self._length[state]
            state = self._link[state]

    def continuation(self, state: int, max_tokens: int, min_score: float) -> tuple[list[int], list[float]]:
        """The likeliest continuation of a state's substrings.

        Args:
            state: as from `matches`.
            max_tokens: at most so many.
            min_score: stop before the product of the tokens' empirical probabilities falls below it.

        Returns:
            tokens, and the product up to each.
        """
        following, counts = self._next, self._count
        tokens: list[int] = []
        scores: list[float] = []
        score = 1.0
        while len(tokens) < max_tokens:
            while state > 0 and not following[state]:  # the text ends here: go on as its own end went on before
                state = self._link[state]
            if state <= 0:
                break
            total = most = 0
            for each, after in following[state].items():
                count = counts[after]
                total += count
                if count >= most:  # among equals the one that was the last to appear
                    token, follower, most = each, after, count
            score *= most / total
            if score < min_score:
                break
            tokens.append(token)
            scores.append(score)
            state = follower
        return tokens, scores

    def occurrences(self, substring: Iterable[int]) -> int:
        """How often a substring ends in the text (up to the bound on counting in repetitive texts)."""
        state = 0
        for token in substring:
            following = self._next[state].get(token)
            if following is None:
                return 0
            state = following
        return self._count[state]

    def _append(self, token: int) -> None:
        following, link, counts = self._next, self._link, self._count
        newest = self._state(self._length[self._newest] + 1, {})
        state = self._newest
        while state >= 0 and token not in following[state]:
            following[state][token] = newest
            state = link[state]
        link[newest] = 0 if state < 0 else self._ending(state, token)
        self._newest = newest
        self.num_tokens += 1
        counted = newest
        for _ in range(_COUNTED):
            if counted <= 0:
                break
            counts[counted] += 1
            counted = link[counted]

    def _ending(self, state: int, token: int) -> int:
        """The state of exactly the longest substring of `state` with `token` after it, split off if need be."""
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        split = self._state(self._length[state] + 1, dict(self._next[following]))
        self._link[split] = self._link[following]
        self._count[split] = self._count[following]
        self._link[following] = split
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _state(self, length: int, followers: dict[int, int]) -> int:
        self._next.append(followers)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(0)
        return len(self._link) - 1
