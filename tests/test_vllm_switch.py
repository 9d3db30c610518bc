"""Drafting is on where it brings something, by what all requests of a batch got together."""

from __future__ import annotations

import random
from collections.abc import Callable

from autospec.integrations.vllm.switch import LEAST_OPEN, PAUSE, PROBE, Switch


def drive(switch: Switch, steps: int, gain: Callable[[int], float], num_requests: int = 16) -> list[bool]:
    """Steps with drafting commit `gain` times as many tokens per second. Returns: whether each had drafting."""
    chance = random.Random(3)
    was_on = []
    for step in range(steps):
        on = switch.is_on(num_requests)
        noise = 1.0 + 0.2 * chance.random() + (20.0 if chance.random() < 0.01 else 0.0)
        tokens = num_requests + (chance.randrange(2 * num_requests) if on else 0)
        seconds = 2.0 / gain(step) if on else 1.0
        switch.observe(num_requests, tokens, noise * seconds, was_on=on)
        was_on.append(on)
    return was_on


def test_it_stays_on_where_drafting_gains_and_plain_steps_are_few() -> None:
    on = drive(Switch(), 4000, lambda step: 1.3)
    assert on[0]
    assert sum(on) > 0.98 * len(on)


def test_it_goes_off_where_drafting_loses_and_tries_again_ever_less() -> None:
    on = drive(Switch(), 6000, lambda step: 0.7)
    assert all(on[:LEAST_OPEN])
    assert sum(on[100:]) < 0.05 * len(on)
    assert sum(on[1000:]) > 0  # it is tried again


def test_it_comes_back_when_drafting_gains_again() -> None:
    on = drive(Switch(), 8000, lambda step: 0.7 if step < 1000 else 1.5)
    assert sum(on[2500:]) > 0.95 * len(on[2500:])


def test_batches_of_other_sizes_are_judged_apart() -> None:
    switch = Switch()
    drive(switch, 1000, lambda step: 0.7, num_requests=16)
    assert not switch.is_on(16)
    assert switch.is_on(1)


def test_the_first_plain_steps_come_once_something_can_be_compared() -> None:
    on = drive(Switch(), LEAST_OPEN + PROBE + 1, lambda step: 1.3)
    assert on == [True] * LEAST_OPEN + [False] * PROBE + [True]
    assert PAUSE > 10 * PROBE
