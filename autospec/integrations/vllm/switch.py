"""Whether drafting is worth while at all for a batch as large as this one: measured, by number of requests."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from autospec.costs.correction import winsorised_mean

WINDOW = 128
"""Last steps that are compared, with drafting and without."""
LEAST_OPEN = 32
"""Steps with drafting before they are judged."""
PROBE = 4
"""Plain steps by which it is known what those cost."""
PROBE_EVERY = 512
"""Steps with drafting after which plain ones are measured again."""
PAUSE = 512
"""Plain steps after drafting lost, before it is tried again; twice as many after each more."""
MOST_PAUSE = 16384
LEAST_GAIN = 1.01
"""Tokens per second with drafting over those without, below which it is switched off."""


@dataclass(slots=True)
class _Place:
    opened: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # tokens, seconds
    closed: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    since_plain: int = PROBE_EVERY - LEAST_OPEN
    num_tried: int = 0  # steps with drafting since it was switched on
    left_closed: int = 0
    pause: int = 0


class Switch:
    """Compares tokens per second of steps with and without drafting, the time of the proposer itself included.

    A policy weighs what one request gains; this sees what all of them together really got, with the time that choosing
    and drafting for each of them takes. Not thread-safe.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def is_on(self, num_requests: int) -> bool:
        """May the next step have drafts? Asked once before each step."""
        place = self._places.setdefault(num_requests, _Place())
        if not place.left_closed and place.since_plain >= PROBE_EVERY:
            place.left_closed, place.since_plain = PROBE, 0
        if place.left_closed:
            place.left_closed -= 1
            return False
        place.since_plain += 1
        return True

    def observe(self, num_requests: int, num_tokens: int, seconds: float, *, was_on: bool) -> None:
        """What a step came to. Args: num_tokens: committed, of all requests; seconds: from step to step."""
        place = self._places.setdefault(num_requests, _Place())
        if seconds <= 0.0:
            return
        (place.opened if was_on else place.closed).append((num_tokens, seconds))
        if not was_on:
            return
        place.num_tried += 1
        if place.num_tried < LEAST_OPEN or len(place.closed) < PROBE or place.num_tried % LEAST_OPEN:
            return
        goodput, error = _goodput(place.opened)
        least = LEAST_GAIN * _goodput(place.closed)[0]
        if goodput + error >= least:
            if goodput >= least:
                place.pause = 0
            return
        place.pause = min(2 * place.pause, MOST_PAUSE) if place.pause else PAUSE
        place.left_closed, place.since_plain, place.num_tried = place.pause, 0, 0
        place.opened.clear()


def _goodput(steps: deque[tuple[int, float]]) -> tuple[float, float]:
    """Tokens per second and its standard error; a stalled step counts as much as the slowest of the usual ones."""
    tokens = [num for num, _ in steps]
    mean = sum(tokens) / len(tokens)
    spread = sum((num - mean) ** 2 for num in tokens) / len(tokens)
    seconds = winsorised_mean(seconds for _, seconds in steps)
    return mean / seconds, math.sqrt(spread / len(tokens)) / seconds
