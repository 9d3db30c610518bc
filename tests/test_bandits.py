"""Comparison and bandit policies: what each finds, and the faults that bandits in other decoders are known for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from autospec.errors import ConfigurationError
from autospec.policies import TransformersConstant, TransformersHeuristic, make_policy
from autospec.policies.arms import Arms, BySegment, Pending, PlainSteps
from autospec.policies.evidence import Evidence, Sums
from autospec.policies.registry import KINDS, LEARNING, build_policy
from autospec.policies.scale import Scale
from autospec.policies.serial import dump, load
from autospec.types import OFF, Action, BlockContext, BlockOutcome, Offer, OfferOutcome, RequestContext

STEP = 0.040  # seconds of a plain step
SEEDED = ("epsilon_greedy", "thompson", "exp3", "hedge")
MEASURING = ("epsilon_greedy", "ucb", "thompson", "exp3", "linucb")  # seconds; hedge goes by predicted ones


@dataclass(frozen=True)
class Costs:
    """Made-up seconds. Bandits take block lengths and the plain step from them, and nothing else."""

    block_lengths: tuple[int, ...] = (2, 4, 8)
    per_token: float = 0.001
    draft_per_token: float = 0.004

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return STEP + self.per_token * (num_tokens - 1)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return (
            float("inf")
            if source == "broken"
            else self.draft_per_token * block_length
            if source == "assistant"
            else 0.0001
        )


def context(
    segment: str = "s",
    sources: tuple[str, ...] = ("ngram",),
    *,
    left: int = 1000,
    output: int = 0,
    temperature: float = 0.0,
    offers: Mapping[str, Offer] | None = None,
) -> BlockContext:
    request = RequestContext(segment, 50, left, temperature > 0.0, sources, temperature)
    return BlockContext(request, 50 + output, output, sources, offers or {})


def made(kind: str, seed: int = 0, costs: Costs | None = None, **settings: Any) -> Any:
    if kind in SEEDED:
        settings["seed"] = seed
    return build_policy(kind, settings, lambda: costs or Costs())


World = Mapping[str, tuple[float, float]]
"""By label: tokens committed on average, seconds."""

FOUR: World = {"none": (1.0, STEP), "ngram:2": (1.5, 0.045), "ngram:4": (2.2, 0.055), "ngram:8": (3.0, 0.060)}
"""25, 33, 40 and 50 tokens per second."""


def play(
    policy: Any,
    world: World | Callable[[int], World],
    blocks: int,
    seed: int = 0,
    *,
    where: BlockContext | None = None,
    stalls: Sequence[int] = (),
    noise: float = 0.1,
) -> list[str]:
    """Labels of what was chosen. Args: stalls: blocks that take 40 times as long."""
    rng = np.random.default_rng(seed)
    where = where or context()
    labels = []
    for number in range(blocks):
        action = policy.choose(where)
        tokens, seconds = (world(number) if callable(world) else world)[action.label]
        k = action.block_length
        accepted = min(k, int(tokens - 1.0) + int(rng.random() < (tokens - 1.0) % 1.0))
        seconds *= float(np.exp(noise * rng.standard_normal())) * (40.0 if number in stalls else 1.0)
        policy.observe(outcome(where, action, accepted, seconds))
        labels.append(action.label)
    return labels


def outcome(
    where: BlockContext,
    action: Action,
    accepted: int,
    seconds: float,
    *,
    drafted: int | None = None,
    offers: tuple[OfferOutcome, ...] = (),
) -> BlockOutcome:
    drafted = action.block_length if drafted is None else drafted
    return BlockOutcome(
        where.segment,
        action,
        where.context_tokens,
        drafted,
        min(drafted, accepted + 1),
        accepted,
        accepted + 1,
        verify_seconds=seconds,
        request=where.request,
        offers=offers,
    )


@pytest.mark.parametrize("kind", LEARNING)
class TestEveryBandit:
    """Those that learn from what they choose; `hedge` among them, where no source makes offers."""

    @pytest.mark.parametrize("seed", range(3))
    def test_the_best_of_four_arms_is_played(self, kind: str, seed: int) -> None:
        labels = play(made(kind, seed), FOUR, 200, seed)
        assert labels.count("ngram:8") >= 140  # case C08: 70 %

    @pytest.mark.parametrize("stall", [0, 3, 4, 7, 12, 40])
    def test_one_stall_flattens_nothing(self, kind: str, stall: int) -> None:
        """Case C08: also when it meets the first block of the best arm (3), or its second (7)."""
        labels = play(made(kind), FOUR, 200, stalls=[stall])
        assert labels.count("ngram:8") >= 140

    def test_off_is_played_where_nothing_pays(self, kind: str) -> None:
        """Case C03."""
        losing = {"none": (1.0, STEP), "ngram:2": (1.1, 0.08), "ngram:4": (1.1, 0.08), "ngram:8": (1.1, 0.08)}
        policy = made(kind, costs=Costs(per_token=0.02))
        assert play(policy, losing, 300)[100:].count("none") >= 150
        assert "off" in {policy.choose(context()).reason_kind for _ in range(5)}

    def test_goodput_decides_not_acceptance(self, kind: str) -> None:
        """Case C02: a draft that is always right but slow loses to one that is half right and free."""
        costs = Costs(draft_per_token=STEP)
        world = {"none": (1.0, STEP)}
        for k in (2, 4, 8):
            verify = costs.verify_seconds(k + 1, 50)
            world[f"assistant:{k}"] = (1.0 + k, verify + costs.draft_seconds("assistant", k, 50))
            world[f"ngram:{k}"] = (2.0, verify)
        labels = play(made(kind, costs=costs), world, 400, where=context(sources=("assistant", "ngram")))[200:]
        assert sum(label.startswith("ngram") for label in labels) >= 150

    def test_prefill_and_catch_up_are_never_charged(self, kind: str) -> None:
        """Case C01."""
        policy = made(kind)
        where = context()
        action = policy.choose(where)
        block = BlockOutcome("s", action, where.context_tokens, 0, 0, 0, 1, verify_seconds=STEP, catch_up_seconds=50.0)
        policy.observe(block)
        other = made(kind)
        other.choose(where)
        other.observe(outcome(where, action, 0, STEP, drafted=0))
        assert json.dumps(policy.state()) == json.dumps(other.state())

    def test_a_new_segment_starts_from_what_others_learned(self, kind: str) -> None:
        """Case C09."""
        policy = made(kind)
        for segment in range(4):
            play(policy, FOUR, 150, segment, where=context(f"segment {segment}"))
        labels = play(policy, FOUR, 40, where=context("new"))
        assert labels.count("ngram:8") >= 22

    def test_mixed_traffic_beats_the_best_fixed_arm(self, kind: str) -> None:
        """Case C09: the best arm for all brings 59 tokens per second, each segment's own 70."""
        copying = {**FOUR, "ngram:8": (6.0, 0.060)}
        creative = {"none": (1.0, STEP), "ngram:2": (1.05, 0.045), "ngram:4": (1.05, 0.055), "ngram:8": (1.05, 0.060)}
        policy, tokens, seconds = made(kind), 0.0, 0.0
        for turn in range(30):
            for segment, world in (("copying", copying), ("creative", creative)):
                for label in play(policy, world, 20, turn, where=context(segment)):
                    tokens += world[label][0]
                    seconds += world[label][1]
        fixed = [(copying[each][0] + creative[each][0]) / (copying[each][1] + creative[each][1]) for each in FOUR]
        assert tokens / seconds > 1.02 * max(fixed)

    def test_state_survives_json_and_goes_on_identically(self, kind: str) -> None:
        where = context(sources=("assistant", "ngram"), offers={"ngram": Offer(6, 3, (0.9, 0.5))})
        world = {f"{source}:{k}": (1.0 + k / 3, 0.05) for source in ("assistant", "ngram") for k in (2, 4, 8)}
        world["none"] = (1.0, STEP)
        policy = made(kind, 3)
        for number in range(12):
            play(policy, world, 20, number, where=context(f"segment {number}", ("ngram", "assistant")))
        play(policy, world, 100, where=where)
        stored = json.loads(json.dumps(dump(policy), sort_keys=True, allow_nan=False))
        other = load(stored, Costs())
        assert json.dumps(other.state(), sort_keys=True) == json.dumps(policy.state(), sort_keys=True)
        for number in range(10, 15):
            there = context(f"segment {number}", ("assistant", "ngram", "suffix"))
            ahead = {**world, **{f"suffix:{k}": (2.0, 0.05) for k in (2, 4, 8)}}
            assert play(other, ahead, 60, where=there) == play(policy, ahead, 60, where=there)
        assert other.settings == policy.settings

    def test_an_empty_state_can_be_restored_too(self, kind: str) -> None:
        fresh = load(json.loads(json.dumps(dump(made(kind)))), Costs())
        assert play(fresh, FOUR, 50) == play(made(kind), FOUR, 50)

    def test_memory_is_bounded(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.policies.arms.MAX_SEGMENTS", 10)
        policy = made(kind)
        for number in range(50):
            play(policy, FOUR, 3, where=context(f"segment {number}"))
        found = json.dumps(policy.state())
        assert "segment 49" in found
        assert "segment 40" in found
        assert "segment 39" not in found

    def test_only_what_still_fits_and_can_be_used(self, kind: str) -> None:
        policy = made(kind)
        assert policy.choose(context(left=1)) is OFF
        assert policy.choose(context(left=2)) is OFF
        assert policy.choose(context(sources=())) is OFF
        assert policy.choose(context(sources=("broken",))) is OFF
        for _ in range(30):
            action = policy.choose(context(left=4))
            assert action.label in ("none", "ngram:2")
            policy.observe(outcome(context(left=4), action, 0, STEP))

    def test_reasons_say_a_kind_and_numbers(self, kind: str) -> None:
        policy = made(kind)
        play(policy, FOUR, 200)
        reasons = []
        for _ in range(100):
            action = policy.choose(context())
            reasons.append(str(action.reason))
            policy.observe(outcome(context(), action, round(FOUR[action.label][0]) - 1, FOUR[action.label][1]))
        assert {reason.split(":")[0] for reason in reasons} <= {"best", "explore", "off"}
        wanted = "best: ngram:8 has " if kind == "hedge" else "best: ngram:8 "
        assert any(reason.startswith(wanted) and reason.endswith("of 4 arms") for reason in reasons)

    def test_blocks_that_say_nothing_are_left_out(self, kind: str) -> None:
        """Without seconds, or of a block length that is no arm."""
        policy = made(kind)
        play(policy, FOUR, 20)
        policy.choose(context())
        policy.observe(outcome(context(), Action("ngram", 5), 5, 0.05))
        policy.observe(outcome(context(), Action("ngram", 8), 8, 0.0))
        assert policy.choose(context()).label in FOUR

    @pytest.mark.parametrize("damage", [None, [], {}, {"random": {}}, {"arms": [["none", 0]]}])
    def test_what_is_no_state_is_refused(self, kind: str, damage: Any) -> None:
        with pytest.raises(ConfigurationError, match=f"no state of policy '{kind}'"):
            made(kind).restore(damage)

    def test_every_damaged_entry_is_refused_and_changes_nothing(self, kind: str) -> None:
        policy = made(kind)
        play(policy, FOUR, 60)
        before = json.dumps(policy.state())
        for key in policy.state():
            for bad in ("x", {"x": 1}, [[1, 2]], None):
                with pytest.raises(ConfigurationError, match="no state of policy"):
                    policy.restore({**json.loads(before), key: bad})
        with pytest.raises(ConfigurationError, match="more"):
            policy.restore({**json.loads(before), "more": 1})
        assert json.dumps(policy.state()) == before

    def test_settings_are_plain_and_unknown_ones_are_refused(self, kind: str) -> None:
        settings = json.loads(json.dumps(made(kind).settings))
        assert build_policy(kind, settings, Costs).settings == settings
        with pytest.raises(ConfigurationError, match=f"unknown setting 'speed' of policy '{kind}': known are"):
            build_policy(kind, {"speed": 1}, Costs)
        for name in settings:
            for bad in (-1, float("nan"), "x", None):
                with pytest.raises(ConfigurationError, match=f"{name}="):
                    build_policy(kind, {name: bad}, Costs)


@pytest.mark.parametrize("kind", MEASURING)
class TestMeasuredSeconds:
    def test_a_mean_of_ratios_would_be_misled(self, kind: str) -> None:
        """Case C02: 9 tokens in 5 steps or 1 in 1 is 1.67 by sums, more than 1.5; the mean of ratios is 1.4, less."""
        policy, rng = made(kind, costs=Costs(block_lengths=(8,))), np.random.default_rng(0)
        where = context(sources=("steady", "mixed"))
        labels = []
        for _ in range(1200):
            action = policy.choose(where)
            accepted, steps = 0, 1.0
            if action.source == "mixed":
                accepted, steps = (8, 5.0) if rng.random() < 0.5 else (0, 1.0)
            elif action.source == "steady":
                accepted = int(rng.random() < 0.5)
            policy.observe(outcome(where, action, accepted, steps * STEP))
            labels.append(action.label)
        assert labels[600:].count("mixed:8") > 300

    def test_a_miss_is_a_plain_step_of_its_arm(self, kind: str) -> None:
        """Case C03: right when it has something, but it seldom has, and looking costs half a step."""
        policy, rng, where = made(kind, costs=Costs(block_lengths=(4,))), np.random.default_rng(0), context()
        labels = []
        for _ in range(300):
            action = policy.choose(where)
            drafted = accepted = 4 if action.block_length and rng.random() < 0.02 else 0
            seconds = STEP * (1.5 if action.block_length else 1.0)
            policy.observe(outcome(where, action, accepted, seconds, drafted=drafted))
            labels.append(action.label)
        assert labels[100:].count("none") >= 140


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("seed", range(2))
def test_drift_is_followed(kind: str, seed: int) -> None:
    """The best arm becomes the worst, and another one the best."""
    after: World = {"none": (1.0, STEP), "ngram:2": (2.9, 0.045), "ngram:4": (1.2, 0.055), "ngram:8": (1.0, 0.080)}
    labels = play(made(kind, seed), lambda number: FOUR if number < 400 else after, 1400, seed)
    assert labels[300:400].count("ngram:8") >= 70
    assert labels[1200:].count("ngram:2") >= 130


class TestLinUCB:
    def test_the_context_decides_within_a_segment(self) -> None:
        """What pays at temperature 0 loses at 1.2: an arm without context must be wrong half the time."""
        policy, rng = made("linucb"), np.random.default_rng(0)
        right = []
        for number in range(900):
            where = context(temperature=1.2 if rng.random() < 0.5 else 0.0)
            action = policy.choose(where)
            hot = where.request.temperature > 0
            accepted = 0 if hot or not action.block_length else action.block_length
            policy.observe(outcome(where, action, accepted, STEP * (1.0 + 0.1 * action.block_length)))
            if number >= 300:
                right.append((action.block_length == 0) == hot)
        assert np.mean(right) >= 0.85

    def test_offers_are_looked_at(self) -> None:
        policy, rng = made("linucb", costs=Costs(block_lengths=(4,))), np.random.default_rng(0)
        right = []
        for number in range(800):
            good = bool(rng.random() < 0.5)
            offer = Offer(4, 12, (0.9, 0.9, 0.9, 0.9)) if good else Offer(4, 1, (0.3, 0.2, 0.1, 0.05))
            where = context(offers={"ngram": offer})
            action = policy.choose(where)
            accepted = action.block_length if good else 0
            policy.observe(outcome(where, action, accepted, STEP * (1.8 if action.block_length else 1.0)))
            if number >= 300:
                right.append((action.block_length > 0) == good)
        assert policy.wants_offers
        assert np.mean(right) >= 0.85


class TestHedge:
    @staticmethod
    def run(policy: Any, matches: Callable[[int], Mapping[str, int]], blocks: int, offered: int = 8) -> list[Action]:
        """Args: matches: by source, how many of the offered tokens would be accepted in block i."""
        actions = []
        for number in range(blocks):
            right = matches(number)
            offers = {source: Offer(offered if source in right else 0, 3) for source in ("ngram", "suffix")}
            where = context(sources=("ngram", "suffix"), offers=offers)
            action = policy.choose(where)
            used = min(action.block_length, right.get(action.source, 0))
            drafted = min(action.block_length, offered)
            settled = tuple(
                OfferOutcome(source, offer, 0, min(offer.num_tokens, right.get(source, 0) + 1), right.get(source, 0))
                for source, offer in offers.items()
            )
            policy.observe(outcome(where, action, used, STEP, drafted=drafted, offers=settled))
            actions.append(action)
        return actions

    def test_actions_are_learned_that_were_never_played(self) -> None:
        """Full information: after a hundred plain blocks the best action is known."""
        policy = made("hedge")
        offers = {"ngram": Offer(8, 3)}
        for _ in range(100):
            settled = (OfferOutcome("ngram", offers["ngram"], 0, 8, 8),)
            policy.observe(outcome(context(offers=offers), OFF, 0, STEP, offers=settled))
        labels = Counter(policy.choose(context(offers=offers)).label for _ in range(50))
        assert labels["ngram:8"] >= 45

    def test_the_better_source_and_a_length_that_pays(self) -> None:
        policy = made("hedge", costs=Costs(per_token=0.006))
        actions = self.run(policy, lambda number: {"ngram": 0, "suffix": 2 if number % 2 else 3}, 300)
        labels = Counter(action.label for action in actions[100:])
        assert labels["suffix:2"] + labels["suffix:4"] >= 160

    def test_a_source_without_an_offer_is_not_asked_and_keeps_its_weight(self) -> None:
        policy = made("hedge")
        self.run(policy, lambda number: {"suffix": 8}, 200)
        for action in self.run(policy, lambda number: {}, 20):
            assert action.block_length == 0
        labels = Counter(action.label for action in self.run(policy, lambda number: {"suffix": 8}, 20))
        assert labels["suffix:8"] >= 15

    def test_drift_is_followed(self) -> None:
        policy = made("hedge", costs=Costs(per_token=0.004))
        actions = self.run(policy, lambda number: {"ngram": 8, "suffix": 0} if number < 300 else {"ngram": 0}, 700)
        assert sum(action.source == "ngram" for action in actions[100:300]) >= 170
        assert sum(action.block_length == 0 for action in actions[500:]) >= 170

    def test_an_answer_that_ended_says_nothing_of_longer_blocks(self) -> None:
        """Two tokens were accepted, then the answer ended: of blocks longer than that nothing is known."""
        policy = made("hedge")
        offers = {"ngram": Offer(8, 3)}
        for _ in range(60):
            settled = (OfferOutcome("ngram", offers["ngram"], 0, 2, 2),)
            policy.observe(outcome(context(offers=offers), OFF, 0, STEP, offers=settled))
        (log,) = [kept[2] for _, kept in policy.state()["segments"]]
        gains = dict(zip(map(tuple, policy.state()["arms"]), log, strict=True))
        assert gains["ngram", 2] > 1.0
        assert gains["ngram", 4] == gains["ngram", 8] == 0.0

    def test_stalls_do_not_matter(self) -> None:
        """Its seconds are predicted ones."""
        actions = []
        for factor in (1.0, 40.0):
            policy = made("hedge")
            for _ in range(50):
                where = context(offers={"ngram": Offer(8, 3)})
                action = policy.choose(where)
                settled = (OfferOutcome("ngram", Offer(8, 3), 0, 5, 4),)
                policy.observe(outcome(where, action, min(4, action.block_length), STEP * factor, offers=settled))
                actions.append(action.label)
        assert actions[:50] == actions[50:]

    def test_a_model_draft_is_tried_and_found(self) -> None:
        """It makes no offers, and it is better than the source that does."""
        policy, labels = made("hedge"), []
        for _ in range(500):
            where = context(sources=("assistant", "ngram"), offers={"ngram": Offer(8, 3)})
            action = policy.choose(where)
            accepted = action.block_length if action.source == "assistant" else 0
            settled = (OfferOutcome("ngram", Offer(8, 3), 0, 1, 0),)
            policy.observe(outcome(where, action, accepted, STEP, offers=settled))
            labels.append(action.source)
        assert labels[250:].count("assistant") >= 200


class TestTransformersSchedules:
    @staticmethod
    def block(policy: Any, where: BlockContext, accepted: int, drafted: int | None = None) -> int:
        action = policy.choose(where)
        policy.observe(outcome(where, action, accepted, STEP, drafted=drafted))
        return int(action.block_length)

    def test_constant(self) -> None:
        policy = TransformersConstant("ngram", num_assistant_tokens=5)
        assert [self.block(policy, context(), n) for n in (5, 0, 2)] == [5, 5, 5]
        assert policy.choose(context(left=3)).block_length == 2
        assert policy.choose(context(left=1)) is OFF
        assert policy.choose(context(sources=("assistant",))) is OFF
        assert TransformersConstant("ngram").choose(context()).block_length == 20

    def test_two_more_when_all_were_accepted_else_one_less(self) -> None:
        policy = TransformersHeuristic("ngram", num_assistant_tokens=3)
        asked = [self.block(policy, context(output=i), n) for i, n in enumerate((3, 5, 2, 6, 4, 0, 0, 0))]
        assert asked == [3, 5, 7, 6, 8, 7, 6, 5]

    def test_never_below_one_and_a_miss_changes_nothing(self) -> None:
        policy = TransformersHeuristic("ngram", num_assistant_tokens=2)
        assert [self.block(policy, context(), 0) for _ in range(4)] == [2, 1, 1, 1]
        assert [self.block(policy, context(), 0, drafted=0) for _ in range(2)] == [1, 1]

    def test_a_draft_that_ended_early_and_was_accepted_counts_as_whole(self) -> None:
        policy = TransformersHeuristic("ngram", num_assistant_tokens=6)
        assert self.block(policy, context(), 2, drafted=2) == 6
        assert policy.choose(context()).block_length == 8

    def test_kept_across_requests_or_not(self) -> None:
        for transient, then in ((False, [3, 5, 7, 9]), (True, [3, 5, 3, 5])):
            policy = TransformersHeuristic("ngram", num_assistant_tokens=3, transient=transient)
            places = [context(output=1), context(output=5), context(output=1), context(output=5)]
            asked = []
            for where in places:
                action = policy.choose(where)
                policy.observe(outcome(where, action, action.block_length, STEP))
                asked.append(action.block_length)
            assert asked == then

    def test_requests_that_run_at_once_are_kept_apart(self) -> None:
        policy = TransformersHeuristic("ngram", num_assistant_tokens=3, transient=True)
        first, second = context("first", output=1), context("second", output=1)
        choices = policy.choose(first), policy.choose(second)
        policy.observe(outcome(first, choices[0], 3, STEP))
        policy.observe(outcome(second, choices[1], 0, STEP))
        assert policy.choose(context("first", output=5)).block_length == 5
        assert policy.choose(context("second", output=2)).block_length == 2

    @pytest.mark.parametrize("transient", [False, True])
    def test_state_survives_json(self, transient: bool) -> None:
        policy = TransformersHeuristic("ngram", num_assistant_tokens=3, transient=transient)
        self.block(policy, context(output=1), 3)
        other = load(json.loads(json.dumps(dump(policy))), Costs())
        assert other.name == policy.name
        assert other.choose(context(output=5)).block_length == policy.choose(context(output=5)).block_length == 5

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"num_assistant_tokens": 0, "requests": []},
            {"num_assistant_tokens": 3, "requests": [[{"segment": "s"}, 1, 2]]},
            {"num_assistant_tokens": 3, "requests": 7},
        ],
    )
    def test_what_is_no_state_is_refused(self, state: Any) -> None:
        with pytest.raises(ConfigurationError):
            TransformersHeuristic("ngram").restore(state)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: TransformersConstant("none"), "source='none'"),
            (lambda: TransformersHeuristic(""), "source=''"),
            (lambda: TransformersConstant("ngram", num_assistant_tokens=0), "num_assistant_tokens=0"),
            (lambda: TransformersHeuristic("ngram", num_assistant_tokens=2.5), "num_assistant_tokens=2.5"),  # type: ignore[arg-type]
            (lambda: TransformersHeuristic("ngram", transient="no"), "transient='no'"),  # type: ignore[arg-type]
        ],
    )
    def test_settings_out_of_range_are_refused(self, make: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make()


class TestText:
    @pytest.mark.parametrize("kind", LEARNING)
    def test_a_name_is_enough(self, kind: str) -> None:
        policy = make_policy(kind, ["ngram"], Costs)
        assert policy.name == kind
        assert type(policy) is KINDS[kind]
        assert make_policy(kind, [], Costs).name == "off"

    def test_schedules(self) -> None:
        def never() -> Any:
            raise AssertionError

        forms = [
            "transformers_constant:ngram:5",
            "transformers_heuristic:ngram",
            "transformers_heuristic_transient:ngram:3",
        ]
        policies = [make_policy(form, ["ngram"], never) for form in forms]
        assert [policy.name for policy in policies] == [form.split(":")[0] for form in forms]
        assert [policy.choose(context()).block_length for policy in policies] == [5, 20, 3]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("transformers_constant", r"the form is transformers_constant:SOURCE\[:BLOCK_LENGTH\]"),
            ("transformers_constant:ngram:5:6", "the form is"),
            ("transformers_constant:ngram:many", "block length 'many' is not a whole number"),
            ("transformers_heuristic:ngram:0", "num_assistant_tokens=0"),
            ("transformers_heuristic:suffix", "needs draft source 'suffix', which is not among drafts=none, ngram"),
            ("ucb:ngram", "unknown policy 'ucb:ngram': known are .*'ucb'"),
            ("tuned", "the form is tuned:FILE"),
        ],
    )
    def test_errors(self, text: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make_policy(text, ["ngram"], Costs)

    def test_every_form_that_messages_list_exists(self) -> None:
        with pytest.raises(ConfigurationError) as error:
            make_policy("fast", ["ngram"], Costs)
        for form in str(error.value).partition("known are ")[2].partition(", or an object")[0].split(", "):
            text = (
                form.strip("'").replace("[:BLOCK_LENGTH]", ":4").replace("SOURCE", "ngram").replace("BLOCK_LENGTH", "4")
            )
            if text not in ("auto", "tuned:FILE"):
                assert make_policy(text, ["ngram"], Costs).name in (text, text.rpartition(":ngram")[0])

    def test_a_name_can_be_checked_before_costs_are_there(self) -> None:
        """As the demonstration does before it loads a model."""
        for kind in LEARNING:
            assert make_policy(kind, ["ngram"], lambda: None).name == kind  # type: ignore[arg-type, return-value]


class TestSerial:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ("ucb", "no stored policy"),
            ({"policy": "ucb"}, "no stored policy"),
            ({"policy": "ucb", "settings": {}, "more": 1}, "no stored policy.*more"),
            ({"policy": "fast", "settings": {}}, "unknown policy 'fast': known are fixed"),
            ({"policy": ["ucb"], "settings": {}}, "unknown policy"),
            ({"policy": "ucb", "settings": []}, "settings of policy 'ucb': an object is needed"),
            ({"policy": "transformers_constant", "settings": {}}, "setting 'source' .* is missing"),
            ({"policy": "fixed", "settings": {"source": "none"}, "state": {}}, "learns nothing"),
        ],
    )
    def test_errors(self, values: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            load(values, Costs())

    def test_policies_that_learn_nothing(self) -> None:
        for text in ("off", "fixed:ngram:4", "transformers_constant:ngram:3"):
            policy = make_policy(text, ["ngram"], Costs)
            other = load(json.loads(json.dumps(dump(policy))), Costs())
            assert (other.name, other.choose(context())) == (policy.name, policy.choose(context()))

    def test_a_users_own_policy_cannot_be_stored(self) -> None:
        class Own:
            name = "own"

            def choose(self, context: BlockContext) -> Action:
                return OFF

            def observe(self, outcome: BlockOutcome) -> None:
                """Nothing to learn."""

        with pytest.raises(ConfigurationError, match=r"policy 'own' \(Own\) cannot be stored"):
            dump(Own())


class TestParts:
    def test_sums_are_divided_only_then(self) -> None:
        sums = Sums()
        for tokens, seconds in ((9.0, 3.0), (1.0, 1.0)):
            sums.add(0, tokens, seconds, 1.0)
        tokens, seconds, blocks, tries = sums.read(np.array([0]), 1)[:, 0]
        assert (tokens, seconds, blocks, tries) == (10.0, 4.0, 2.0, 2.0)

    @pytest.mark.parametrize("stall", range(6))
    def test_a_stall_counts_as_a_usual_block(self, stall: int) -> None:
        sums = Sums()
        for number in range(8):
            sums.add(2, 1.0, 40.0 if number == stall else 1.0, 1.0)
        assert sums.read(np.array([2]), 3)[1, 0] == pytest.approx(8.0)

    def test_a_lasting_change_is_believed(self) -> None:
        sums = Sums()
        for number in range(30):
            sums.add(0, 1.0, 1.0 if number < 10 else 40.0, 0.9)
        tokens, seconds = sums.read(np.array([0]), 1)[:2, 0]
        assert seconds / tokens > 30.0

    def test_old_evidence_fades_and_numbers_stay_small(self) -> None:
        sums = Sums()
        for number in range(3000):
            sums.add(0, 1.0 if number < 2000 else 3.0, 1.0, 0.98)
        tokens, seconds, blocks, tries = sums.read(np.array([0]), 1)[:, 0] / np.array([sums.gain] * 3 + [1.0])
        assert (tokens, seconds, blocks, tries) == (
            pytest.approx(150.0),
            pytest.approx(50.0),
            pytest.approx(50.0),
            3000,
        )
        assert sums.gain <= 1e9

    def test_seconds_are_counted_in_plain_steps_of_their_context(self) -> None:
        """Twice the context at twice the seconds is the same goodput."""

        @dataclass(frozen=True)
        class Growing(Costs):
            def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
                return 0.001 * context_tokens * num_tokens

        evidence = Evidence(Growing(), discount=1.0, strength=1.0)
        for output, seconds in ((50, 0.1), (350, 0.4), (950, 1.0)):
            evidence.learn(outcome(context(output=output), OFF, 0, seconds))
        known = evidence.beliefs("s", np.array([0]))
        assert known.goodput[0] == pytest.approx(1.0, rel=0.05)

    def test_estimates_that_are_refined_are_looked_up_anew(self) -> None:
        class Refined(Costs):
            version = 1

            def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
                return self.version * STEP

        steps = PlainSteps(Refined())
        assert steps.unit(100) == STEP
        Refined.version = 2
        assert steps.unit(100) == 2 * STEP

    def test_the_scale_is_moved_by_no_outlier(self) -> None:
        scale = Scale()
        for number in range(300):
            scale.add(1000.0 if number % 50 == 0 else 0.5)
        assert scale.value == 0.5

    def test_what_was_never_answered_is_forgotten(self) -> None:
        pending: Pending[int] = Pending()
        for number in range(1500):
            pending.note(context(output=number), number)
        assert pending.take(outcome(context(output=100), OFF, 0, STEP)) is None
        assert pending.take(outcome(context(output=1400), OFF, 0, STEP)) == 1400
        assert pending.take(outcome(context(output=1400), OFF, 0, STEP)) is None

    def test_a_source_that_can_be_timed_at_last_is_usable(self) -> None:
        class Refined(Costs):
            version = 1

            def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
                return 0.001 if self.version > 1 else float("inf")

        arms = Arms(Refined())
        assert len(arms.usable(context())) == 1
        Refined.version = 2
        assert len(arms.usable(context())) == 4

    def test_arms_are_numbered_as_they_were(self) -> None:
        arms = Arms(Costs())
        arms.usable(context(sources=("suffix", "ngram")))
        again = arms.restored(json.loads(json.dumps(arms.state())))
        assert again.names == arms.names
        with pytest.raises(ValueError, match="arm"):
            arms.restored([["none", 0], ["ngram", 0]])
        with pytest.raises(ValueError, match="plain step"):
            arms.restored([["ngram", 4], ["ngram", 2]])

    def test_the_segment_not_seen_for_longest_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.policies.arms.MAX_SEGMENTS", 3)
        kept: BySegment[list[int]] = BySegment(list)
        for segment in ("a", "b", "c", "a", "d"):
            kept.seen(segment).append(1)
        assert [segment for segment, _ in kept.state(list)] == ["c", "a", "d"]
