"""Stored states with one wrong number: refused, or harmless to every block that comes after."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autospec.errors import ConfigurationError
from autospec.policies import UCB, EpsilonGreedy, Exp3, Goodput, Guard, Hedge, LinUCB, Policy, Thompson
from autospec.policies.merging import merge
from autospec.policies.states import check
from autospec.types import BlockContext, BlockOutcome, Offer, OfferOutcome, RequestContext
from tests.test_goodput import Costs

COSTS = Costs(draft_per_token=0.004)
SOURCES = ("ngram", "assistant")
REQUEST = RequestContext("s", 20, 200, do_sample=True, sources=SOURCES, temperature=0.8)
MAKE: dict[str, Callable[[], Policy]] = {
    "auto": lambda: Guard(Goodput(COSTS), COSTS, name="auto"),
    "exp3": lambda: Exp3(COSTS),
    "ucb": lambda: UCB(COSTS),
    "thompson": lambda: Thompson(COSTS),
    "linucb": lambda: LinUCB(COSTS),
    "epsilon_greedy": lambda: EpsilonGreedy(COSTS),
    "hedge": lambda: Hedge(COSTS),
}
WRONG = [math.nan, math.inf, -1, 0, 10**400, "x", None, 1e308]
POSITIONS = 90


def shown(value: object) -> str:
    return f"{value!r:.12}"


def live(policy: Any, blocks: int, seed: int) -> None:
    """Two sources, one of which offers; catching up now and then."""
    chance = random.Random(seed)
    for number in range(blocks):
        offer = Offer(chance.choice([0, 4, 16]), 3, (), chance.random())
        offers = {"ngram": offer} if getattr(policy, "wants_offers", False) else {}
        action = policy.choose(BlockContext(REQUEST, 21 + number, 1 + number, SOURCES, offers))
        asked = action.block_length
        drafted = min(asked, offer.num_tokens) if action.source == "ngram" else asked
        accepted = chance.randint(0, drafted)
        judged = min(offer.num_tokens, accepted + 1)
        policy.observe(
            BlockOutcome(
                "s",
                action,
                context_tokens=21 + number,
                num_draft_tokens=drafted,
                num_judged_tokens=min(drafted, accepted + 1),
                num_accepted_tokens=accepted,
                num_committed_tokens=accepted + 1,
                draft_seconds=0.001,
                verify_seconds=chance.choice([0.02, 0.04, 1.0]),
                catch_up_tokens=100 if action.source == "assistant" and number % 4 == 0 else 0,
                catch_up_seconds=0.1 if action.source == "assistant" and number % 4 == 0 else 0.0,
                request=REQUEST,
                offers=tuple(
                    OfferOutcome(name, each, 1 + number, judged, min(accepted, judged)) for name, each in offers.items()
                ),
            )
        )


def numbers(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from numbers(value, (*path, key))
    elif isinstance(state, int | float):
        yield path


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(state)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    made = {}
    for kind, make in MAKE.items():
        policy: Any = make()
        live(policy, 60, seed=0)
        made[kind] = json.loads(json.dumps(policy.state()))
    return made


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.filterwarnings("error")
def test_one_wrong_number(states: dict[str, Any], kind: str) -> None:
    state = states[kind]
    paths = list(numbers(state))
    chance = random.Random(kind)
    chosen = chance.sample(paths, min(POSITIONS, len(paths)))
    refused = 0
    for path in chosen:
        for value in WRONG:
            policy: Any = MAKE[kind]()
            try:
                damaged = changed(state, path, value)
                check(policy, damaged)
                policy.restore(merge(policy, [damaged], seed=1)[0])
            except ConfigurationError:
                refused += 1
                continue
            try:
                live(policy, 50, seed=1)
                json.dumps(policy.state(), allow_nan=False)
            except Exception as error:
                raise AssertionError(f"{path} = {value!r:.20}: {error!r}") from error
    assert refused > len(chosen)


@pytest.mark.parametrize("value", WRONG, ids=shown)
def test_every_number_that_goodput_and_guard_keep(states: dict[str, Any], value: Any) -> None:
    """Not only in a sample: each kind of number once."""
    state = states["auto"]
    kinds = {tuple(key for key in path if isinstance(key, str)): path for path in numbers(state)}
    for path in kinds.values():
        policy: Any = MAKE["auto"]()
        try:
            policy.restore(changed(state, path, value))  # without a check before
        except ConfigurationError:
            continue
        live(policy, 50, seed=1)
        json.dumps(policy.state(), allow_nan=False)


@pytest.mark.parametrize(
    "path",
    [
        ("segments", "s", "brake", "seen"),
        ("policy", "segments", "s", "tried", "assistant", 0),
        ("policy", "segments", "s", "tried", "assistant", 1),
        ("policy", "segments", "s", "seconds"),
        ("policy", "catch_up", "assistant", 0),
        ("policy", "catch_up", "assistant", 1),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
@pytest.mark.parametrize("value", [-1, math.nan, 10**400, 1e308], ids=shown)
def test_out_of_range(states: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    damaged = changed(states["auto"], path, value)
    with pytest.raises(ConfigurationError, match="no state of policy"):
        check(MAKE["auto"](), damaged)
    policy: Any = MAKE["auto"]()
    before = policy.state()
    with pytest.raises(ConfigurationError, match="no state of policy"):
        policy.restore(damaged)
    assert policy.state() == before


def test_settings_of_the_brake_are_not_taken_from_a_state(states: dict[str, Any]) -> None:
    state = copy.deepcopy(states["auto"])
    brake = state["segments"]["s"]["brake"]
    assert not {"error_rate", "blocks"} & brake.keys()
    brake |= {"error_rate": 0.0, "blocks": 10**400}
    guard = Guard(Goodput(COSTS), COSTS, error_rate=0.05)
    check(guard, state)
    guard.restore(state)
    live(guard, 50, seed=1)
    assert guard._segments["s"].brake.error_rate == 0.05
    assert guard._segments["s"].brake.blocks == 256


def test_catching_up_is_merged_and_no_surer_than_the_surest(states: dict[str, Any]) -> None:
    states = [
        changed(states["auto"]["policy"], ("catch_up",), each)
        for each in ({"a": [100.0, 2.0], "b": [1.0, 1.0]}, {"a": [300.0, 2.0]})
    ]
    merged, _ = merge(Goodput(COSTS), states, seed=0)
    assert merged["catch_up"] == {"a": [300.0, 3.0], "b": [1.0, 1.0]}
    Goodput(COSTS).restore(merged)


def test_a_state_stays_as_it_is(states: dict[str, Any]) -> None:
    """Several may go on from it, each for itself."""
    state = states["auto"]
    before = copy.deepcopy(state)
    policy = MAKE["auto"]()
    policy.restore(state)  # type: ignore[attr-defined]
    live(policy, 100, seed=3)
    assert state == before


def test_more_accepted_than_judged_by_rounding(states: dict[str, Any]) -> None:
    """No odds are below zero: their logarithm would end every request after."""
    counts = copy.deepcopy(states["auto"]["policy"]["acceptance"]["by_source"]["assistant"])
    counts |= {"at_risk": [5e6], "accepted": [5e6 * 1.0000009]}
    state = changed(states["auto"], ("policy", "acceptance", "by_source"), {"assistant": counts})
    state = changed(state, ("policy", "acceptance", "by_segment"), {"s": {"assistant": counts}})
    policy: Any = MAKE["auto"]()
    policy.restore(state)
    rates = policy.policy._acceptance.rates("s", "assistant", 4)
    assert all(0.0 < rate <= 1.0 for rate in rates)
    live(policy, 50, seed=4)
