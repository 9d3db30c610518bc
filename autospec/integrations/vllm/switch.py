"""Whether drafting is worth while at all for a batch like this one: measured, by number of requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from autospec.costs.correction import winsorised_mean

WINDOW = 128
"""Last steps that are compared, with drafting and without."""
LEAST_OPEN = 32
"""Steps with drafting before they are judged."""
PROBE = 4
"""Plain steps by which it is known what those cost."""
SURE = 16
"""Plain steps before drafting is switched off by them; of older ones, no more are compared while it is on."""
MOST_UNSEEN = 4
"""Steps for each that a probe wants to see, until it is given up: those that read a prompt tell nothing."""
PROBE_EVERY = 512
"""Steps with drafting after which plain ones are measured again."""
PAUSE = 512
"""Plain steps after drafting lost, before it is tried again; twice as many after each more."""
MOST_PAUSE = 2048
LEAST_GAIN = 1.01
"""Tokens per second with drafting over those without, below which it is switched off."""
MOST_KINDS = 1024
"""Of batches, that are remembered: those seen last."""


@dataclass(slots=True)
class _Place:
    opened: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # tokens, seconds
    closed: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    since_plain: int = PROBE_EVERY - LEAST_OPEN
    num_tried: int = 0  # steps with drafting since it was switched on
    num_wanted: int = 0  # plain steps that a probe still wants to see
    left_closed: int = 0
    pause: int = 0

    def probe(self, num_steps: int) -> None:
        self.num_wanted, self.left_closed, self.since_plain = num_steps, MOST_UNSEEN * num_steps, 0


class Switch:
    """Compares tokens per second of steps with and without drafting, the time of the proposer itself included.

    A policy weighs what one request gains; this sees what all of them together really got, with the time that choosing
    and drafting for each of them takes. Kinds of batches are judged apart: by number of requests, and by whatever else
    tells them apart. Not thread-safe.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place] = {}

    def is_on(self, kind: Hashable) -> bool:
        """May the next step have drafts? Asked once before each step."""
        place = self._place(kind)
        if not place.left_closed and place.since_plain >= PROBE_EVERY:
            while len(place.closed) > SURE - PROBE:
                place.closed.popleft()  # the device may not be what it was then
            place.probe(PROBE)
        if place.left_closed:
            place.left_closed -= 1
            return False
        place.num_wanted = 0  # of a probe that was given up
        place.since_plain += 1
        return True

    def observe(self, kind: Hashable, num_tokens: int, seconds: float, *, was_on: bool) -> None:
        """What a step came to. Args: num_tokens: committed, of all requests; seconds: from step to step."""
        place = self._place(kind)
        if seconds <= 0.0:
            return
        if was_on:
            place.opened.append((num_tokens, seconds))
            place.num_tried += 1
            is_time = place.num_tried % LEAST_OPEN == 0
        else:
            place.closed.append((num_tokens, seconds))
            is_time = place.num_wanted == 1
            place.num_wanted = max(0, place.num_wanted - 1)
            if is_time:
                place.left_closed = 0
        if is_time and place.num_tried >= LEAST_OPEN and len(place.closed) >= PROBE:
            _judge(place)

    def _place(self, kind: Hashable) -> _Place:
        place = self._places.pop(kind) if kind in self._places else _Place()
        self._places[kind] = place
        if len(self._places) > MOST_KINDS:
            del self._places[next(iter(self._places))]
        return place


def _judge(place: _Place) -> None:
    goodput, error = _goodput(place.opened)
    least = LEAST_GAIN * _goodput(place.closed)[0]
    if goodput + error >= least:
        if goodput >= least:
            place.pause = 0
        return
    if len(place.closed) < SURE:
        place.probe(SURE - len(place.closed))  # a few steps may be fast by chance
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
