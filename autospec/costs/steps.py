"""What a step of an engine costs by the tokens that it verifies: learned from the seconds of steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


class StepCosts:
    """Seconds of steps by their tokens. Not thread-safe.

    Widths are kept apart, so that steps which are really there stay; between two of them it is a line.
    """

    def __init__(self) -> None:
        self._widths: dict[int, _Width] = {}
        self._drift = 1.0
        self._grid: list[tuple[float, float]] = []  # tokens and seconds, as of the last settling
        self.num_seen = 0

    @property
    def is_known(self) -> bool:
        """Was anything seen yet?"""
        return bool(self._grid)

    @property
    def narrowest(self) -> float:
        """Tokens of the narrowest steps that are believed; 0 before anything was seen."""
        return self._grid[0][0] if self._grid else 0.0

    @property
    def widest(self) -> float:
        """Tokens of the widest steps that are believed; 0 before anything was seen."""
        return self._grid[-1][0] if self._grid else 0.0

    def seconds(self, num_tokens: float) -> float:
        """A step over so many tokens."""
        return on_line(self._grid, num_tokens) if self._grid else _prior(num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> bool:
        """Learn what a step took. Returns: is it time to look at estimates again?"""
        width = self._widths.setdefault(_place(num_tokens), _Width())
        if width.num_seen >= LEAST:
            usual = width.seconds * self._drift
            surprise = min(max(seconds / usual, 1.0 / _MOST_SURPRISE), _MOST_SURPRISE)
            seconds = min(max(seconds, usual / STALL), usual * STALL)
            self._drift *= surprise**_DRIFT
        width.add(num_tokens, seconds / self._drift)
        self.num_seen += 1
        return self.num_seen % SETTLE_EVERY == 0 or self.num_seen == LEAST

    def settle(self) -> bool:
        """Bring estimates up to date. Returns: did any of them change by more than a little?"""
        seen = [width for width in self._widths.values() if width.num_seen >= LEAST] or self._widths.values()
        grid = sorted((width.tokens, width.seconds * self._drift) for width in seen)
        before = [on_line(self._grid, tokens) if self._grid else 0.0 for tokens, _ in grid]
        moves = [abs(seconds / old - 1.0) if old else 1.0 for (_, seconds), old in zip(grid, before, strict=True)]
        if len(grid) == len(self._grid) and max(moves, default=0.0) <= LEAST_CHANGE:
            return False
        self._grid = grid
        return True

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
                own = seconds / self._drift
                self._widths[_place(tokens)] = _Width(float(tokens), own, FIRST, [own] * FIRST)
        self.settle()


def _place(num_tokens: int) -> int:
    return num_tokens if num_tokens <= _EXACT else _EXACT + 1 + int(8.0 * math.log2(num_tokens / _EXACT))


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
