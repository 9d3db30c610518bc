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

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        following, link, length, count, newest = self._next, self._link, self._length, self._count, self._newest
        for token in tokens:
            made, state = len(link), newest
            following.append({})
            length.append(length[newest] + 1)
            count.append(1)
            link.append(0)
            while state >= 0 and token not in following[state]:
                following[state][token] = made
                state = link[state]
            if state >= 0:
                ending = following[state][token]
                link[made] = ending if length[ending] == length[state] + 1 else self._split(state, token, ending)
            newest, suffix, left = made, link[made], _COUNTED
            while suffix > 0 and (left := left - 1):
                count[suffix] += 1
                suffix = link[suffix]
        self._newest = newest

    @property
    def num_tokens(self) -> int:
        return self._length[self._newest]

    @property
    def num_states(self) -> int:
        return len(self._link)

    def longest_match(self, min_length: int) -> tuple[int, int]:
        """State and length of the longest end of the text that occurred before; 0 and 0 where it is shorter than so."""
        state = self._link[self._newest]
        length = self._length[state] if state > 0 else 0
        return (state, length) if length >= min_length else (0, 0)

    def continuation(self, state: int, max_tokens: int, min_score: float) -> tuple[list[int], list[float]]:
        """The likeliest continuation of a state's substrings; none of state 0.

        Args:
            state: as from `longest_match`.
            max_tokens: at most so many.
            min_score: at most 1; stop before the product of the tokens' empirical probabilities falls below it.

        Returns:
            tokens, and the product up to each.
        """
        following, link, counts = self._next, self._link, self._count
        tokens: list[int] = []
        scores: list[float] = []
        score = 1.0
        for _ in range(max_tokens):
            while state > 0 and not following[state]:  # the text ends here: go on as its own end went on before
                state = link[state]
            if state <= 0:
                break
            followers = following[state]
            if len(followers) == 1:
                ((token, state),) = followers.items()
            else:
                total = most = 0
                for each, after in followers.items():
                    count = counts[after]
                    total += count
                    if count >= most:  # among equals the one that was the last to appear
                        token, state, most = each, after, count
                score *= most / total
                if score < min_score:
                    break
            tokens.append(token)
            scores.append(score)
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

    def _split(self, state: int, token: int, ending: int) -> int:
        """A state of its own for the longest substring of `state` with `token` behind it, so far in `ending`."""
        following, link = self._next, self._link
        split = len(link)
        following.append(dict(following[ending]))
        self._length.append(self._length[state] + 1)
        self._count.append(self._count[ending])
        link.append(link[ending])
        link[ending] = split
        while state >= 0 and following[state].get(token) == ending:
            following[state][token] = split
            state = link[state]
        return split
