"""Drafting is on where it brings something, by what all requests of a batch got together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from autospec.integrations.vllm.switch import LOOK_EVERY, MOST_KINDS, PAUSE, PROBE, SURE, Kind, Switch


def kind(num_requests: int, segment: str = "s", *, is_sampled: bool = False) -> Kind:
    return Kind.of(num_requests, is_sampled=is_sampled, segment=segment)


MANY = kind(16)


def alike(num_requests: float) -> float:
    """Plain steps take as long, whatever the number of requests."""
    return 1.0


def new() -> Switch:
    return Switch(alike)


def drive(switch: Switch, steps: int, gain: Callable[[int], float], like: Kind = MANY) -> list[bool]:
    """Steps with drafting commit `gain` times as many tokens per second. Returns: whether each had drafting."""
    chance, num_requests = random.Random(3), 1 << like.octave
    was_on = []
    for step in range(steps):
        on = switch.is_on(like)
        noise = 1.0 + 0.2 * chance.random() + (3.0 if chance.random() < 0.01 else 0.0)  # stalls are cut before
        tokens = num_requests + (chance.randrange(2 * num_requests) if on else 0)
        seconds = 2.0 / gain(step) if on else 1.0
        switch.observe(like, tokens, noise * seconds, num_requests=num_requests, was_on=on)
        was_on.append(on)
    return was_on


def test_it_stays_on_where_drafting_gains_and_plain_steps_are_few() -> None:
    on = drive(new(), 4000, lambda step: 1.3)
    assert on[0]
    assert sum(on) > 0.98 * len(on)


def test_it_goes_off_where_drafting_loses_and_tries_again_ever_less() -> None:
    on = drive(new(), 6000, lambda step: 0.7)
    assert all(on[:LOOK_EVERY])
    assert sum(on[50:]) < 0.05 * len(on)
    assert sum(on[1000:]) > 0  # it is tried again


def test_it_comes_back_when_drafting_gains_again() -> None:
    on = drive(new(), 8000, lambda step: 0.7 if step < 1000 else 1.5)
    assert sum(on[2500:]) > 0.95 * len(on[2500:])


def test_batches_of_other_sizes_are_judged_apart() -> None:
    switch = new()
    drive(switch, 1000, lambda step: 0.7)
    assert not switch.is_on(MANY)
    assert switch.is_on(kind(1))
    assert switch.is_on(kind(16, is_sampled=True))
    assert not switch.is_on(kind(13))  # counted with 16


def test_the_first_plain_steps_come_once_something_can_be_compared() -> None:
    on = drive(new(), LOOK_EVERY + PROBE + 1, lambda step: 1.3)
    assert on == [True] * LOOK_EVERY + [False] * PROBE + [True]
    assert PAUSE > 10 * PROBE


def test_what_plain_steps_cost_long_ago_is_forgotten() -> None:
    """The device was slow once, and drafting gained; now it is fast, and drafting loses."""
    switch, on = new(), []
    for step in range(22_000):
        scale, gain = (2.0, 1.3) if step < 18_000 else (1.0, 0.8)
        on.append(switch.is_on(MANY))
        seconds = scale * (2.0 / gain if on[-1] else 1.0)
        switch.observe(MANY, 32 if on[-1] else 16, seconds, num_requests=16, was_on=on[-1])
    assert sum(on[10_000:18_000]) > 0.98 * 8_000
    assert sum(on[-1000:]) < 100


def test_a_few_plain_steps_that_were_fast_by_chance_are_looked_at_again() -> None:
    switch, num_plain, on = new(), 0, []
    for _ in range(300):
        on.append(switch.is_on(MANY))
        num_plain += not on[-1]
        seconds = 2.0 / 1.2 if on[-1] else 0.5 if num_plain <= PROBE else 1.0
        switch.observe(MANY, 32 if on[-1] else 16, seconds, num_requests=16, was_on=on[-1])
    assert num_plain == SURE
    assert all(on[-200:])


def test_a_probe_lasts_until_it_has_seen_plain_steps() -> None:
    """Steps that read a prompt tell nothing: here they are two of three."""
    switch, on = new(), []
    for step in range(150):
        on.append(switch.is_on(MANY))
        if step % 3 == 0:
            switch.observe(MANY, 32 if on[-1] else 16, 2.0 / 0.7 if on[-1] else 1.0, num_requests=16, was_on=on[-1])
    assert sum(on) < 3 * LOOK_EVERY  # the last of them tells
    assert not any(on[100:])


def test_a_probe_that_sees_nothing_is_given_up() -> None:
    switch = new()
    on = [switch.is_on(MANY) for _ in range(5000)]
    assert sum(on) > 0.95 * len(on)


def test_kinds_of_batches_are_forgotten_when_there_are_too_many() -> None:
    switch = new()
    often = kind(1, "often")
    for _ in range(LOOK_EVERY):
        switch.is_on(often)
    for number in range(3 * MOST_KINDS):
        switch.is_on(kind(1, f"segment {number}"))
        if number % 100 == 0:
            switch.is_on(often)
    assert len(switch._places) == MOST_KINDS
    assert switch._places[often].since_plain > 0


def test_drafting_that_loses_much_is_off_after_a_few_steps() -> None:
    """Of an answer of sixteen requests there are not many steps: a fifth of the time lost shows in eight of them."""
    on = drive(new(), 60, lambda step: 0.8)
    assert sum(on) == LOOK_EVERY
    assert sum(drive(new(), 60, lambda step: 1.2)) >= 60 - 2 * PROBE


def test_a_larger_batch_begins_as_smaller_ones_ended() -> None:
    switch = new()
    drive(switch, 200, lambda step: 0.7, kind(4))
    assert not switch.is_on(kind(16))
    assert switch.is_on(kind(2))
    gaining = new()
    drive(gaining, 200, lambda step: 1.3, kind(4))
    assert gaining.is_on(kind(16))


def test_a_segment_begins_with_what_all_of_them_brought() -> None:
    """Of a request that is alone a step tells little; what other segments lost is known, and its own counts later."""
    switch = new()
    for number in range(4):
        drive(switch, 60, lambda step: 0.6, kind(1, f"s{number}"))
    tried = [drive(switch, 40, lambda step: 0.6, kind(1, f"t{number}")) for number in range(10)]
    assert not any(map(any, tried))
    on = drive(switch, 4000, lambda step: 1.6, kind(1, "gains"))
    assert not any(on[:PAUSE])
    assert sum(on[-3000:]) > 0.95 * 3000


def test_a_segment_that_gains_is_not_switched_off_by_others() -> None:
    switch = new()
    drive(switch, 200, lambda step: 1.6, kind(1, "gains"))
    for number in range(8):
        drive(switch, 200, lambda step: 0.6, kind(1, f"s{number}"))
    assert sum(drive(switch, 1000, lambda step: 1.6, kind(1, "gains"))) > 950


@pytest.mark.parametrize(("gain", "stays"), [(1.3, True), (0.75, False)])
def test_batches_of_one_kind_are_compared_by_request(gain: float, stays: bool) -> None:
    """Plain steps were seen of 8 requests, those with drafting are of 5: that these get fewer tokens is no loss."""

    def plain_seconds(num_requests: float) -> float:
        return 0.02 + 0.02 * num_requests

    switch, like, on = Switch(plain_seconds), kind(8), []
    for step in range(400):
        on.append(switch.is_on(like))
        num_requests = 5 if on[-1] and step > LOOK_EVERY else 8
        tokens = 2 * num_requests if on[-1] else num_requests
        seconds = plain_seconds(num_requests) * (2.0 / gain if on[-1] else 1.0)
        switch.observe(like, tokens, seconds, num_requests=num_requests, was_on=on[-1])
    assert (sum(on) > 0.9 * len(on)) is stays
    assert (sum(on) < 0.25 * len(on)) is not stays


def test_a_few_steps_that_are_all_alike_are_no_proof() -> None:
    """Without any noise eight steps of four requests that lose 3 % would be; twice as many are."""
    switch, on = new(), []
    for _ in range(100):
        on.append(switch.is_on(kind(4)))
        switch.observe(kind(4), 4, 1.0 / 0.97 if on[-1] else 1.0, num_requests=4, was_on=on[-1])
    assert sum(on) == 2 * LOOK_EVERY


def test_rare_drafts_that_cost_much_are_no_gain() -> None:
    """A tenth of the steps has them: each takes as long as five plain ones, and brings two tokens."""
    switch, chance, on = new(), random.Random(2), []
    like = kind(1)
    for _ in range(3000):
        on.append(switch.is_on(like))
        drafts = on[-1] and chance.random() < 0.1
        switch.observe(like, 2 if drafts else 1, 5.0 if drafts else 1.0, num_requests=1, was_on=on[-1])
    assert not all(on[:400])
    assert sum(on[-2000:]) < 0.4 * 2000


def bursts(chance: random.Random, miss_seconds: float, hit_seconds: float) -> Iterator[tuple[int, float]]:
    """Tokens and seconds of steps with drafting: 85 % find nothing, then a passage comes again, for three steps."""
    while True:
        hits = chance.random() < 0.15 / 3 / 0.85
        yield from [(5, hit_seconds)] * 3 if hits else [(1, miss_seconds)]


@pytest.mark.parametrize(("miss_seconds", "hit_seconds"), [(1.05, 2.25), (1.15, 1.68)])
def test_drafting_that_gains_in_bursts_stays_on(miss_seconds: float, hit_seconds: float) -> None:
    """For one request it gains a third on average, 1.6 tokens in 1.23 s, and most stretches of eight steps lose."""
    shares = []
    for seed in range(12):
        switch, chance, on = new(), random.Random(seed), []
        source = bursts(random.Random(100 + seed), miss_seconds, hit_seconds)
        for _ in range(4000):
            on.append(switch.is_on(kind(1)))
            tokens, seconds = next(source) if on[-1] else (1, 1.0)
            noise = 1.0 + 0.1 * chance.random()
            switch.observe(kind(1), tokens, noise * seconds, num_requests=1, was_on=on[-1])
        shares.append(sum(on) / len(on))
    assert min(shares) > 0.85
