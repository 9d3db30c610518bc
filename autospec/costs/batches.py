"""What a step costs that verifies several requests at once: learned from the seconds of steps, by their tokens."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autospec.costs.correction import winsorised_mean

KEPT = 64
"""Steps of a width that its mean goes back to."""
FIRST = 8
"""Steps of a width of which the median counts, until there are more: the first ones may hold compilations."""
LEAST = 3
"""Steps of a width before it is believed, as long as another one is."""
SETTLE_EVERY = 16
"""Steps between two looks: estimates stand still meanwhile, so that policies can keep tables."""
LEAST_CHANGE = 0.01
STALL = 2.0
"""A step that took this many times what its width usually takes counts as so much and no more."""
PRIOR_SLOPE = 0.02
"""Of a step of one token, what each further token is thought to add before anything was seen."""
PRIOR_TOKENS = 8.0
"""Span of widths that the prior slope counts for, beyond the widest seen."""
PRIOR_SECONDS = 0.05
"""Of a step of one token, before anything was seen; policies compare, so its size matters little."""
_DRIFT = 1.0 / 16.0  # of a step's surprise that all widths take over, so that those not seen lately follow
_MOST_SURPRISE = 1.4
_EXACT = 32  # widths up to here are told apart; wider ones in eighths of an octave


@dataclass(slots=True)
class _Width:
    """What was seen of steps over about so many tokens. Seconds are less the drift when they were seen."""

    tokens: float = 0.0  # a mean
    seconds: float = 0.0
    num_seen: int = 0
    first: list[float] = field(default_factory=list)

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_seen = min(self.num_seen + 1, KEPT)
        self.tokens += (num_tokens - self.tokens) / self.num_seen
        if self.num_seen <= FIRST:
            self.first.append(seconds)
            self.seconds = sorted(self.first)[(len(self.first) - 1) // 2]
        else:
            self.seconds += (seconds - self.seconds) / self.num_seen


class BatchCosts:
    """Seconds of steps and of drafts, for policies that choose for one of several requests. Not thread-safe.

    Widths are kept apart, so that steps which are really there stay; between two of them it is a line. Of all the
    tokens in a step it is the number that counts: a step verifies the drafts of each request and one token besides.

    Args:
        block_lengths: to choose between, ascending.
        sources: draft sources that can be used.
    """

    def __init__(self, block_lengths: Sequence[int], sources: Iterable[str]) -> None:
        self._block_lengths = tuple(block_lengths)
        self._sources = frozenset(sources)
        self._widths: dict[int, _Width] = {}
        self._drift = 1.0
        self._grid: list[tuple[float, float]] = []  # tokens and seconds, as of the last settling
        self._draft_seconds: deque[float] = deque(maxlen=KEPT)
        self._draft = 0.0
        self._num_steps = 0
        self._num_requests = 1
        self._eighths = 8  # of the requests, those that draft in a usual step
        self._drafting = 1.0
        self._version = 0

    @property
    def block_lengths(self) -> tuple[int, ...]:
        return self._block_lengths

    @property
    def version(self) -> int:
        """Grows whenever an estimate changes, and when another batch is served."""
        return self._version

    @property
    def num_steps(self) -> int:
        """Steps seen."""
        return self._num_steps

    @property
    def num_requests(self) -> int:
        """For which estimates are given where the question names no number."""
        return self._num_requests

    def serve(self, num_requests: int, drafting_share: float = 1.0) -> None:
        """From now on answer for one request among so many.

        Args:
            num_requests: in the batch. Beyond 8 those that differ by less than an eighth are taken as one.
            drafting_share: of the requests, those that have drafts in a usual step; in eighths, that are kept until it
                is half an eighth beyond.
        """
        num_requests, share = _rounded(num_requests), min(max(drafting_share, 0.0), 1.0)
        if not self._eighths - 1.5 < 8.0 * share <= self._eighths + 0.5:
            self._eighths = math.ceil(8.0 * share)
        drafting = max(1.0, num_requests * self._eighths / 8.0)
        if (num_requests, drafting) != (self._num_requests, self._drafting):
            self._num_requests, self._drafting = num_requests, drafting
            self._version += 1

    def step_seconds(self, num_tokens: float) -> float:
        """A step over so many tokens, of all requests together."""
        return on_line(self._grid, num_tokens) if self._grid else _prior(num_tokens)

    def verify_seconds(self, num_tokens: int, context_tokens: int, num_requests: int | None = None) -> float:
        """A step in which a request verifies `num_tokens` tokens (drafts + 1), as far as it is this request's doing.

        All requests wait for the tokens of each. Where those that draft do as this one does, the tokens of a step are
        one of each request, and the drafts of these; what they add to a plain step all requests bear, and only those
        that draft gain by it.

        Args:
            num_tokens: of one request.
            context_tokens: not looked at: a step's seconds are seen for contexts as they come.
            num_requests: in the batch, all of which draft; None: as `serve` was told.
        """
        requests = self._num_requests if num_requests is None else num_requests
        drafting = self._drafting if num_requests is None else float(requests)
        plain = self.step_seconds(requests)
        if num_tokens <= 1:
            return plain
        wide = self.step_seconds(requests + drafting * (num_tokens - 1))
        return max(plain + (wide - plain) * requests / drafting, min(plain, wide))

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        """One proposal, for one request; infinite for a source that is not there."""
        return self._draft if source in self._sources else math.inf

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        """Was no step seen that wide?"""
        if source is not None:
            return source not in self._sources
        widest = self._grid[-1][0] if self._grid else 0.0
        return self._num_requests + self._drafting * (num_tokens - 1) > widest

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn what a step took, drafting left out. Args: num_tokens: of all requests."""
        if num_tokens < 1 or not 0.0 < seconds < math.inf:
            return
        width = self._widths.setdefault(_place(num_tokens), _Width())
        if width.num_seen >= LEAST:
            usual = width.seconds * self._drift
            surprise = min(max(seconds / usual, 1.0 / _MOST_SURPRISE), _MOST_SURPRISE)
            seconds = min(max(seconds, usual / STALL), usual * STALL)
            self._drift *= surprise**_DRIFT
        width.add(num_tokens, seconds / self._drift)
        self._num_steps += 1
        if self._num_steps % SETTLE_EVERY == 0 or self._num_steps == LEAST:
            self._settle()

    def observe_draft(self, seconds: float) -> None:
        """Learn what drafting for one request took."""
        if 0.0 < seconds < math.inf:
            self._draft_seconds.append(seconds)

    def _settle(self) -> None:
        seen = [width for width in self._widths.values() if width.num_seen >= LEAST] or self._widths.values()
        grid = sorted((width.tokens, width.seconds * self._drift) for width in seen)
        draft = winsorised_mean(self._draft_seconds) if self._draft_seconds else 0.0
        before = [on_line(self._grid, tokens) if self._grid else 0.0 for tokens, _ in grid]
        moves = [abs(seconds / old - 1.0) if old else 1.0 for (_, seconds), old in zip(grid, before, strict=True)]
        is_other_draft = abs(draft - self._draft) > LEAST_CHANGE * grid[0][1]
        if len(grid) != len(self._grid) or max(moves) > LEAST_CHANGE or is_other_draft:
            self._grid, self._draft = grid, draft
            self._version += 1

    def points(self) -> list[tuple[int, float]]:
        """Tokens and seconds of the widths that are believed, ascending."""
        return [(round(tokens), seconds) for tokens, seconds in self._grid]

    def begin_with(self, points: Iterable[tuple[int, float]]) -> None:
        """Take over what another one has seen, as `points` gives it; it counts as a few steps of each width.

        Args:
            points: tokens and seconds; such as cannot be are left out.
        """
        for tokens, seconds in points:
            if tokens >= 1 and 1e-9 <= seconds <= 1e6:
                self._widths[_place(tokens)] = _Width(float(tokens), seconds, FIRST, [seconds] * FIRST)
        if self._widths:
            self._settle()


def _place(num_tokens: int) -> int:
    return num_tokens if num_tokens <= _EXACT else _EXACT + 1 + int(8.0 * math.log2(num_tokens / _EXACT))


def _rounded(num_requests: int) -> int:
    """Numbers of requests that differ by less than an eighth are taken as one."""
    if num_requests <= 8:
        return max(1, num_requests)
    step: int = 1 << (num_requests.bit_length() - 4)
    return int(num_requests // step * step)


def _prior(num_tokens: float) -> float:
    return PRIOR_SECONDS * (1.0 + PRIOR_SLOPE * (num_tokens - 1.0))


def on_line(grid: Sequence[tuple[float, float]], num_tokens: float) -> float:
    """A line between two widths seen; narrower than all of them as the narrowest, wider by a slope drawn to the prior.

    The slope is that over all widths seen, which a single one that is off does not turn.
    """
    first, last = grid[0], grid[-1]
    if num_tokens <= first[0]:
        return first[1]
    if num_tokens >= last[0]:
        span = last[0] - first[0]
        prior = first[1] * _prior(2.0) / _prior(first[0]) - first[1] * _prior(1.0) / _prior(first[0])
        seen = max(0.0, last[1] - first[1])
        return last[1] + (seen + PRIOR_TOKENS * prior) / (span + PRIOR_TOKENS) * (num_tokens - last[0])
    right = bisect_left(grid, (num_tokens, -math.inf))
    (low, low_seconds), (high, high_seconds) = grid[right - 1], grid[right]
    return low_seconds + (high_seconds - low_seconds) * (num_tokens - low) / (high - low)
