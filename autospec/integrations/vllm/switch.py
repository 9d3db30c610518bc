"""Whether drafting is worth while at all for a batch like this one: measured, by kind of batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW = 128
"""Last steps that are compared, with drafting and without."""
LOOK_EVERY = 8
"""Steps with drafting between two looks at what they brought."""
LEAST_OWN = 32
"""Steps with drafting after which a segment is judged by its own: until then by those of all, unless it was off before.

After as many in which it did not lose, it is forgotten that it has lost before.
"""
LEAST_REQUESTS = 32
"""In steps with drafting, all together, until these can lose: of one request a few tell little, as hits are rare."""
FEW = 2
"""Requests up to which drafting has to lose by two standard errors, and not by one: a policy that chooses for one
request sees most of what there is to see itself, and of so few requests steps tell little."""
PROBE = 4
"""Plain steps by which it is known what those cost."""
SURE = 16
"""Plain steps before drafting is switched off by them; of older ones, no more are compared while it is on."""
MOST_UNSEEN = 4
"""Steps for each that a probe wants to see, until it is given up: those that read a prompt tell nothing."""
PROBE_EVERY = 512
"""Steps with drafting after which plain ones are measured again."""
PAUSE = 128
"""Plain steps after drafting lost, before it is tried again; twice as many after each more."""
MOST_PAUSE = 2048
LEAST_GAIN = 1.01
"""Tokens per second with drafting over those without, below which it is switched off."""
MOST_KINDS = 1024
"""Of batches, that are remembered: those seen last."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of batch.

    Requests are counted by powers of two (5 to 8 are alike): a batch that runs empty would else be a new kind, of which
    nothing is known, with every request that ends.
    """

    octave: int
    is_sampled: bool  # any of them, as far as is known
    segment: str | None  # of a request that is alone: what one segment loses, the next may gain

    @classmethod
    def of(cls, num_requests: int, *, is_sampled: bool, segment: str | None) -> Kind:
        return cls((num_requests - 1).bit_length(), is_sampled, segment if num_requests == 1 else None)

    @property
    def all_segments(self) -> Kind:
        return Kind(self.octave, self.is_sampled, None)

    def smaller(self) -> list[Kind]:
        """Batches of fewer requests: where drafting loses in these, it does so here, since verifying is dearer."""
        return [Kind(octave, self.is_sampled, None) for octave in range(self.octave)]


class _Step(NamedTuple):
    num_tokens: int
    seconds: float
    num_requests: int


PlainSeconds = Callable[[float], float]
"""What a step takes in which so many requests get a token each."""


@dataclass(slots=True)
class _Place:
    opened: deque[_Step] = field(default_factory=lambda: deque(maxlen=WINDOW))
    closed: deque[_Step] = field(default_factory=lambda: deque(maxlen=WINDOW))
    since_plain: int = PROBE_EVERY - LOOK_EVERY
    num_tried: int = 0  # steps with drafting since it was switched on
    num_wanted: int = 0  # plain steps that a probe still wants to see
    left_closed: int = 0
    pause: int = 0  # the last one, 0 where drafting has not lost

    def probe(self, num_steps: int) -> None:
        self.num_wanted, self.left_closed, self.since_plain = num_steps, MOST_UNSEEN * num_steps, 0

    def go_off(self) -> None:
        self.pause = min(2 * self.pause, MOST_PAUSE) if self.pause else PAUSE
        self.left_closed, self.since_plain, self.num_tried = self.pause, 0, 0

    def note(self, step: _Step, *, was_on: bool) -> None:
        (self.opened if was_on else self.closed).append(step)

    def loses(self, plain_seconds: PlainSeconds) -> bool:
        """Does drafting lose by more than chance?"""
        if len(self.opened) < LOOK_EVERY or len(self.closed) < PROBE:
            return False
        if sum(step.num_requests for step in self.opened) < LEAST_REQUESTS:
            return False
        num_errors = 2.0 if self.opened[-1].num_requests <= FEW else 1.0
        with_drafts, margin = _goodput(self.opened, plain_seconds, num_errors, is_rough=True)
        plain, other_margin = _goodput(self.closed, plain_seconds, num_errors)
        return with_drafts * (1.0 + math.hypot(margin, other_margin)) < LEAST_GAIN * plain


class Switch:
    """Compares tokens per second of steps with and without drafting, the time of the proposer itself included.

    A policy weighs what one request gains; this sees what all of them together really got, with the time that choosing
    and drafting for each of them takes. Kinds of batches are judged apart, but begin with what is known of others: a
    segment with that of all segments, a batch with that of smaller ones. Not thread-safe.

    Args:
        plain_seconds: what plain steps take by their requests, as far as known, in batches sampled like the one that is
            observed. Of a kind not all batches have the same number: steps are compared by what they took of these.
    """

    def __init__(self, plain_seconds: PlainSeconds) -> None:
        self._plain_seconds = plain_seconds
        self._places: dict[Hashable, _Place] = {}

    def is_on(self, kind: Kind) -> bool:
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

    def observe(self, kind: Kind, num_tokens: int, seconds: float, *, num_requests: int, was_on: bool) -> None:
        """What a step came to.

        Args:
            kind: of the batch, as `is_on` was told.
            num_tokens: committed, of all requests.
            seconds: from step to step. Stalls are cut before, by whoever knows how wide the step was.
            num_requests: that got tokens.
            was_on: it might have drafts.
        """
        if seconds <= 0.0 or num_requests < 1:
            return
        step = _Step(num_tokens, seconds, num_requests)
        place = self._place(kind)
        place.note(step, was_on=was_on)
        if kind != kind.all_segments:
            self._place(kind.all_segments).note(step, was_on=was_on)
        if was_on:
            place.num_tried += 1
            is_time = place.num_tried % LOOK_EVERY == 0
        else:
            is_time = place.num_wanted == 1
            place.num_wanted = max(0, place.num_wanted - 1)
            if is_time:
                place.left_closed = 0
        if is_time and place.num_tried >= LOOK_EVERY:
            self._judge(kind, place)

    def _judge(self, kind: Kind, place: _Place) -> None:
        is_tried_again = place.pause > 0
        seen = place if is_tried_again or len(place.opened) >= LEAST_OWN else self._place(kind.all_segments)
        if not seen.loses(self._plain_seconds):
            if place.num_tried >= LEAST_OWN:
                place.pause = 0
            return
        if len(seen.closed) < SURE:
            place.probe(SURE - len(seen.closed))  # a few steps may be fast by chance
            return
        place.go_off()
        place.opened.clear()

    def _place(self, kind: Kind) -> _Place:
        place = self._places.pop(kind, None)
        if place is None:
            place = _Place()
            like = [self._places[each] for each in (kind.all_segments, *kind.smaller()) if each in self._places]
            if any(each.pause or each.loses(self._plain_seconds) for each in like):
                place.go_off()
        self._places[kind] = place
        if len(self._places) > MOST_KINDS:
            del self._places[next(iter(self._places))]
        return place


def _goodput(
    steps: deque[_Step], plain_seconds: PlainSeconds, num_errors: float, *, is_rough: bool = False
) -> tuple[float, float]:
    """Tokens of a request per plain step's time, and by what share that may be off.

    Args:
        steps: of one kind.
        plain_seconds: by which they are compared where requests are not as many.
        num_errors: standard errors of what was seen that it may be off by.
        is_rough: drafts hit in bursts, so that a few steps alike say little: as if there were one more, in which a
            request got a token more or less by chance.
    """
    usual = {num: plain_seconds(num) for num in {step.num_requests for step in steps}}
    tokens = [step.num_tokens / step.num_requests for step in steps]
    times = [step.seconds / usual[step.num_requests] for step in steps]
    mean, time = sum(tokens) / len(steps), sum(times) / len(steps)
    if not mean:
        return 0.0, 0.0
    # of a ratio: what each step got beyond what its time should bring
    squares = sum(((num - mean * each / time) / mean) ** 2 for num, each in zip(tokens, times, strict=True))
    rough = len(steps) / sum(step.num_requests for step in steps) if is_rough else 0.0
    return mean / time, math.sqrt(num_errors**2 * squares + rough) / len(steps)
