"""The controller's own policy, its guard, and what they learn: on traffic whose truth is known."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from autospec.costs import CostModel, CostTable, Curve
from autospec.errors import ConfigurationError
from autospec.policies import Goodput, Guard
from autospec.policies.acceptance import AcceptanceModel
from autospec.policies.brake import Brake
from autospec.policies.serial import dump, load
from autospec.types import Action, BlockContext, BlockOutcome, Offer, OfferOutcome, RequestContext


@dataclass(frozen=True)
class Costs:
    """Seconds as numbers one can reckon with: a verification, and so much more for each further token."""

    step: float = 0.040
    per_token: float = 0.0005
    draft_per_token: float = 0.0
    block_lengths: tuple[int, ...] = (1, 2, 4, 8, 16)
    version: int = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return self.step + self.per_token * (num_tokens - 1)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return self.draft_per_token * block_length if source == "assistant" else 1e-5

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


REQUEST = RequestContext("s", 50, 1000, do_sample=False, sources=("assistant",))


def context(segment: str = "s", sources: tuple[str, ...] = ("assistant",), left: int = 1000) -> BlockContext:
    request = RequestContext(segment, prompt_tokens=50, max_new_tokens=left, do_sample=False, sources=sources)
    return BlockContext(request, context_tokens=100, output_tokens=0, sources=sources)


def live(
    policy: Any,
    rate: float,
    blocks: int,
    *,
    costs: Any = None,
    seed: int = 0,
    where: BlockContext | None = None,
    stall_at: int = -1,
) -> list[BlockOutcome]:
    """Blocks whose draft tokens are each accepted with probability `rate`. Args: costs: what is measured."""
    rng = np.random.default_rng(seed)
    where = where or context()
    outcomes = []
    for number in range(blocks):
        action = policy.choose(where)
        k = action.block_length
        accepted = int(np.cumprod(rng.random(k) < rate).sum())
        seconds = 0.0
        if costs is not None:
            seconds = costs.verify_seconds(k + 1, 100) + (costs.draft_seconds(action.source, k, 100) if k else 0.0)
            seconds *= 40 if number == stall_at else 1
        outcome = BlockOutcome(
            where.segment, action, 100, k, min(k, accepted + 1), accepted, accepted + 1, verify_seconds=seconds
        )
        policy.observe(outcome)
        outcomes.append(outcome)
    return outcomes


def lengths(outcomes: list[BlockOutcome]) -> list[int]:
    return [outcome.action.block_length for outcome in outcomes]


def lost_steps(outcomes: list[BlockOutcome], costs: Costs) -> float:
    """Plain steps that these blocks lost against plain decoding."""
    seconds = sum(
        costs.verify_seconds(o.action.block_length + 1, 100)
        + (costs.draft_seconds(o.action.source, o.action.block_length, 100) if o.action.block_length else 0.0)
        for o in outcomes
    )
    return seconds / costs.step - sum(o.num_committed_tokens for o in outcomes)


class TestGoodput:
    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("goodput", "acceptance", "guard"):
            monkeypatch.setattr(f"autospec.policies.{module}.MAX_SEGMENTS", 10)
        policy = Goodput(Costs())
        guard = Guard(policy, Costs())
        for number in range(50):
            live(guard, 0.9, 3, where=context(f"segment {number}"))
        assert len(policy._segments) == 10
        assert len(guard._segments) == 10
        assert len(policy._acceptance._by_segment) == 10
        assert "segment 49" in policy._segments

    def test_long_blocks_when_everything_is_accepted(self) -> None:
        assert Counter(lengths(live(Goodput(Costs()), 0.98, 200)[100:])).most_common(1)[0][0] == 16

    @pytest.mark.parametrize("seed", range(5))
    def test_a_draft_half_as_expensive_and_seldom_right_ends_off_within_30_blocks(self, seed: int) -> None:
        costs = Costs(draft_per_token=0.020)
        outcomes = live(Goodput(costs), 0.3, 400, seed=seed)
        late = Counter(outcome.action.reason_kind for outcome in outcomes[30:])
        assert set(late) <= {"off", "explore"}
        assert late["explore"] <= 0.1 * 370
        assert str(outcomes[-1].action.reason).startswith(("off: assistant:1 0.", "explore: assistant:1 0."))
        assert lost_steps(outcomes, costs) <= 0.02 * 400 + 3

    def test_goodput_decides_not_acceptance(self) -> None:
        """Case C02: a draft that is always right but slow loses to one that is half right and free."""
        policy = Goodput(Costs(draft_per_token=0.040))
        both = context(sources=("assistant", "ngram"))
        rng = np.random.default_rng(0)
        chosen = Counter[str]()
        for _ in range(300):
            action = policy.choose(both)
            k = action.block_length
            accepted = k if action.source == "assistant" else int(np.cumprod(rng.random(k) < 0.5).sum())
            policy.observe(BlockOutcome("s", action, 100, k, min(k, accepted + 1), accepted, accepted + 1))
            chosen[action.source] += 1
        assert chosen["ngram"] > 280

    def test_few_switches_when_the_optimum_lies_between_two_lengths(self) -> None:
        """Case C04."""
        actions = lengths(live(Goodput(Costs(per_token=0.004)), 0.72, 3000)[1000:])
        assert sum(a != b for a, b in pairwise(actions)) / 2 <= 20  # per 1,000 blocks

    @pytest.mark.parametrize("seed", range(5))
    def test_acceptance_that_returns_is_found_again(self, seed: int) -> None:
        """Case C05."""
        costs = Costs(per_token=0.002, draft_per_token=0.004)
        policy = Goodput(costs)
        live(policy, 0.02, 400, seed=seed)
        late = lengths(live(policy, 0.9, 400, seed=seed + 100))
        assert sum(k > 0 for k in late[200:]) >= 190

    @pytest.mark.parametrize("seed", range(3))
    def test_looking_again_has_a_bounded_price(self, seed: int) -> None:
        """Case C05: one plain step in a hundred, and what the first blocks cost."""
        costs = Costs(per_token=0.002, draft_per_token=0.010)
        outcomes = live(Goodput(costs), 0.02, 3000, seed=seed)
        assert sum(k > 0 for k in lengths(outcomes[1000:])) >= 5
        assert lost_steps(outcomes, costs) <= 0.015 * 3000 + 4

    def test_segments_are_kept_apart(self) -> None:
        policy = Goodput(Costs(per_token=0.004))
        live(policy, 0.95, 150, where=context("copying"))
        live(policy, 0.02, 150, where=context("creative"))
        assert policy.choose(context("copying")).block_length >= 8
        assert policy.choose(context("creative")).block_length == 0

    def test_near_the_end_only_what_still_fits(self) -> None:
        policy = Goodput(Costs())
        live(policy, 0.9, 20)
        assert policy.choose(context(left=1)).block_length == 0
        assert policy.choose(context(left=3)).block_length <= 2

    def test_a_source_that_could_not_be_timed_is_left_out_and_said(self) -> None:
        @dataclass(frozen=True)
        class Untimed(Costs):
            def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
                return math.inf if source == "suffix" else 1e-5

        action = Goodput(Untimed()).choose(context(sources=("suffix", "ngram")))
        assert action.source == "ngram"
        assert str(action.reason).endswith("; left out: suffix (not timed)")

    def test_the_reason_has_the_numbers_of_the_best_of_each_source(self) -> None:
        policy = Goodput(Costs(draft_per_token=0.01))
        both = context(sources=("assistant", "ngram"))
        for _ in range(40):
            action = policy.choose(both)
            k = action.block_length
            policy.observe(BlockOutcome("s", action, 100, k, k, k, k + 1))
        action = policy.choose(both)
        kind, _, rest = str(action.reason).partition(": ")
        assert kind == action.reason_kind == "best"
        first, second = rest.split(", ")
        assert first.startswith(f"{action.label} ")
        assert first.endswith("x")
        assert {words.split(":")[0] for words in (first, second)} == {"assistant", "ngram"}
        assert action.gain is not None
        assert f"{action.gain:.2f}x" in first

    def test_catching_up_is_weighed(self) -> None:
        """A cache that is far behind costs before it brings anything, which is no part of the block's own seconds."""
        costs = Costs(draft_per_token=0.004)
        policy = Goodput(costs)
        live(policy, 0.8, 100)
        up_to_date = context()
        assert policy.choose(up_to_date).source == "assistant"
        slow = BlockOutcome(
            "s", Action("assistant", 2), 900, 2, 2, 2, 3, 0.008, 0.041, catch_up_seconds=0.9, catch_up_tokens=900
        )
        assert slow.seconds == pytest.approx(0.049)
        for _ in range(5):
            policy.observe(slow)
        assert policy.choose(up_to_date).source == "assistant"
        assert policy.choose(replace(up_to_date, backlogs={"assistant": 900})).source == "none"  # a second
        assert policy.choose(replace(up_to_date, backlogs={"assistant": 3})).source == "assistant"

    def test_costs_that_change_are_looked_up_again(self) -> None:
        class Changing:
            block_lengths = (1, 4)
            version = 0
            price = 0.001

            def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
                return 0.04 + self.price * (num_tokens - 1)

            def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
                return 1e-5

            def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
                return False

        costs = Changing()
        policy = Goodput(costs)
        live(policy, 0.9, 50)
        assert policy.choose(context()).block_length == 4
        costs.price, costs.version = 0.2, 1
        assert policy.choose(context()).block_length == 0


class TestOffers:
    """What retrieval sources offer is known before the choice, and learnt from whether it is used or not."""

    def blocks(self, policy: Any, count: int, *, seed: int = 0) -> list[tuple[Offer, Action]]:
        """Offers with a match of 8 tokens are right, those of 1 wrong; only the suffix source has a use for them."""
        rng = np.random.default_rng(seed)
        request = RequestContext("s", 50, 10_000, do_sample=False, sources=("suffix",))
        made = []
        for _ in range(count):
            match = int(rng.choice([1, 8]))
            offer = Offer(num_tokens=8, match_length=match)
            where = BlockContext(request, 100, 10, ("suffix",), {"suffix": offer})
            action = policy.choose(where)
            run = int(np.cumprod(rng.random(8) < (0.95 if match == 8 else 0.03)).sum())
            k = min(action.block_length, 8)
            accepted = min(k, run)
            settled = (OfferOutcome("suffix", offer, 10, min(8, run + 1), run),)
            policy.observe(
                BlockOutcome(
                    "s", action, 100, k, min(k, accepted + 1), accepted, accepted + 1, request=request, offers=settled
                )
            )
            made.append((offer, action))
        return made

    def test_the_match_decides(self) -> None:
        late = self.blocks(Goodput(Costs(per_token=0.004)), 500)[300:]
        long = [action.block_length for offer, action in late if offer.match_length == 8]
        short = [action.block_length for offer, action in late if offer.match_length == 1]
        assert sum(k >= 8 for k in long) >= 0.95 * len(long)
        assert sum(k == 0 for k in short) >= 0.95 * len(short)

    def test_offers_are_learnt_from_without_being_used(self) -> None:
        model = AcceptanceModel()
        for _ in range(100):
            model.add_offer(REQUEST, OfferOutcome("ngram", Offer(4), 10, 4, 4))
        assert model.survival("s", "ngram", 4)[-1] > 0.9

    def test_an_offer_of_nothing_is_no_candidate(self) -> None:
        policy = Goodput(Costs())
        request = RequestContext("s", 50, 1000, do_sample=False, sources=("ngram",))
        action = policy.choose(BlockContext(request, 100, 1, ("ngram",), {"ngram": Offer(0)}))
        assert action.block_length == 0
        assert action.reason == "off: nothing to choose from; left out: ngram (nothing found)"

    def test_confidence_is_calibrated(self) -> None:
        """Of the offers thought to be right with probability p, a share p is; over blocks not learnt from yet."""
        rng = np.random.default_rng(3)
        model = AcceptanceModel()
        pairs = []
        for number in range(6000):
            match = int(rng.integers(1, 30))
            temperature = float(rng.choice([0.0, 1.0]))
            rate = 1 / (1 + math.exp(-(0.6 * math.log2(1 + match) - 2.0 - temperature)))
            offer = Offer(4, match, recent_acceptance=0.5)
            request = replace(REQUEST, temperature=temperature)
            where = BlockContext(request, 100, 10, ("ngram",), {"ngram": offer})
            run = int(np.cumprod(rng.random(4) < rate).sum())
            if number >= 1000:
                pairs.append((float(model.offer_survival(where, "ngram")[0]), run > 0))
            model.add_offer(request, OfferOutcome("ngram", offer, 10, min(4, run + 1), run))
        expected = np.array([p for p, _ in pairs])
        actual = np.array([float(is_right) for _, is_right in pairs])
        bins = np.minimum((expected * 10).astype(int), 9)
        error = sum(
            abs(expected[bins == b].mean() - actual[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)
        )
        assert error <= 0.03
        assert expected.std() > 0.15  # it says more than the mean

    @pytest.mark.parametrize("cut", ["policy", "answer ends"])
    def test_blocks_cut_short_do_not_bias(self, cut: str) -> None:
        """Drafts are judged as far as the block goes, and where it ends has nothing to do with how they would go on."""
        rng = np.random.default_rng(1)
        model = AcceptanceModel(discount=1.0)
        for _ in range(5000):
            run = int(np.cumprod(rng.random(8) < 0.7).sum())
            room = int(rng.integers(0, 9))
            judged, accepted = min(8, run + 1, room), min(run, room)
            if cut == "policy":
                model.add(BlockOutcome("s", Action("assistant", 8), 100, room, judged, accepted, accepted + 1))
            else:
                model.add_offer(REQUEST, OfferOutcome("assistant", Offer(8), 10, judged, accepted))
        np.testing.assert_allclose(model.survival("s", "assistant", 4), 0.7 ** np.arange(1, 5), atol=0.02)


class TestGuard:
    def test_it_lets_choose_what_pays(self) -> None:
        costs = Costs()
        guard = Guard(Goodput(costs), costs)
        outcomes = live(guard, 0.9, 1000, costs=costs)
        assert guard.trips == {}
        assert sum(k > 0 for k in lengths(outcomes)) > 980

    def test_it_stops_a_policy_that_loses(self) -> None:
        """Estimates say that drafting is free, and it takes as long as half a step."""
        believed, true = Costs(), Costs(draft_per_token=0.020)
        guard = Guard(Goodput(believed), believed, pause_blocks=100)
        outcomes = live(guard, 0.3, 2000, costs=true)
        assert guard.trips["s"] >= 2
        assert str(outcomes[-1].action.reason).startswith("guard: it lost, ") or guard.trips["s"] >= 3
        assert sum(k > 0 for k in lengths(outcomes[1000:])) < 400  # pauses grow

    def test_false_alarms_are_as_rare_as_promised(self) -> None:
        """Blocks that gain nothing and lose nothing: at most one test in a hundred may stop them."""
        alarms = 0
        for seed in range(300):
            rng = np.random.default_rng(seed)
            brake = Brake(error_rate=0.01)
            gains = np.where(rng.random(256) < 0.25, 3.0, -1.0)  # mean 0
            alarms += any(brake.add(float(gain), 4.0) for gain in gains)
        assert alarms <= 7  # 3 expected at most; 7 has a probability of 1 %

    def test_a_loss_is_found(self) -> None:
        """A tenth of a step per block, among gains and losses of one step."""
        blocks = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            brake = Brake(error_rate=0.01)
            gains = rng.choice([-0.6, 0.9], p=[0.8, 0.2], size=2000)
            blocks.append(next(number for number, gain in enumerate(gains) if brake.add(float(gain), 2.0)))
        assert np.median(blocks) < 100

    def test_one_stall_stops_nothing(self) -> None:
        costs = Costs()
        guard = Guard(Goodput(costs), costs)
        live(guard, 0.8, 400, costs=costs, stall_at=200)
        assert guard.trips == {}

    def test_plain_steps_are_measured(self) -> None:
        """All takes twice as long as estimated, plain steps, too: nothing is lost by that."""
        believed, true = Costs(), Costs(step=0.080, per_token=0.001)
        guard = Guard(Goodput(believed), believed, control_share=0.0)
        for _ in range(30):
            guard.observe(BlockOutcome("s", Action(reason="control"), 100, 0, 0, 0, 1, verify_seconds=0.080))
        live(guard, 0.5, 500, costs=true)
        assert guard.trips == {}

    def test_controls_are_a_share_of_the_requests(self) -> None:
        guard = Guard(Goodput(Costs()), Costs(), control_share=0.1)
        assert 60 <= sum(guard.is_control(REQUEST) for _ in range(1000)) <= 140
        assert not any(Guard(Goodput(Costs()), Costs(), control_share=0.0).is_control(REQUEST) for _ in range(100))

    def test_what_is_predicted_to_gain_little_is_left(self) -> None:
        class Says:
            name = "says"
            gain = 1.01

            def choose(self, context: BlockContext) -> Action:
                return Action("assistant", 2, "best: so", self.gain)

            def observe(self, outcome: BlockOutcome) -> None:
                """It says the same again."""

        inner = Says()
        guard = Guard(inner, Costs(), minimum_gain=0.05, hysteresis=0.04)
        assert guard.choose(context()).reason == "guard: less than 1.05x plain is predicted; best: so"
        inner.gain = 1.06
        assert guard.choose(context()).block_length == 2
        inner.gain = 1.02
        assert guard.choose(context()).block_length == 2  # once on, it takes less
        inner.gain = 1.0
        assert guard.choose(context()).block_length == 0


@pytest.mark.parametrize("make", [Goodput, lambda costs: Guard(Goodput(costs), costs)], ids=["goodput", "guard"])
def test_state_survives_as_json(make: Any) -> None:
    costs = Costs(per_token=0.004, draft_per_token=0.004)
    first = make(costs)
    TestOffers().blocks(first, 200)
    live(first, 0.6, 150)
    second = make(costs)
    second.restore(json.loads(json.dumps(first.state())))
    one, other = live(first, 0.6, 100, seed=9), live(second, 0.6, 100, seed=9)
    assert [o.action for o in one] == [o.action for o in other]
    assert json.dumps(first.state()) == json.dumps(second.state())
    with pytest.raises(ConfigurationError, match="this is no state of"):
        second.restore({"segments": 3})


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Goodput(Costs(), exploration=2), "exploration=2"),
        (lambda: Goodput(Costs(), hysteresis=float("nan")), "hysteresis=nan"),
        (lambda: Guard(Goodput(Costs()), Costs(), control_share=-0.1), "control_share=-0.1"),
        (lambda: Guard(Goodput(Costs()), Costs(), error_rate=0), "error_rate=0"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, setting: str) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        make()


def test_a_guard_is_stored_and_made_again() -> None:
    costs = Costs()
    first = Guard(Goodput(costs, exploration=0.02), costs, control_share=0.1, name="mine")
    live(first, 0.5, 50)
    second = load(json.loads(json.dumps(dump(first))), costs)
    assert isinstance(second, Guard)
    assert (second.name, second.settings) == ("mine", first.settings)
    assert json.dumps(second.state()) == json.dumps(first.state())
    with pytest.raises(ConfigurationError, match="an object with policy and settings is needed"):
        load({"policy": "guard", "settings": {"policy": 3}}, costs)
    with pytest.raises(ConfigurationError, match="acceptance=3: settings of an acceptance model are needed"):
        load({"policy": "goodput", "settings": {"acceptance": 3}}, costs)
    other = load({"policy": "goodput", "settings": {"acceptance": {"discount": 0.9}}}, costs)
    assert dump(other)["settings"]["acceptance"] == {"discount": 0.9, "prior_acceptance": 0.5, "strength": 4.0}


def table(*block_lengths: int) -> CostTable:
    """Steps of 40 ms, whatever is verified."""
    widths = (1, *(length + 1 for length in block_lengths))
    verify = Curve((64, 4096), widths, ((0.04,) * len(widths),) * 2)
    return CostTable(
        block_lengths, verify, {"assistant": Curve((64, 4096), block_lengths, ((1e-4,) * len(block_lengths),) * 2)}
    )


def test_block_lengths_follow_a_new_calibration() -> None:
    costs = CostModel(table(1, 4))
    policy = Goodput(costs)
    assert set(lengths(live(policy, 0.9, 50))) <= {0, 1, 4}
    costs.recalibrate(table(2, 8), is_asynchronous=False)
    assert set(lengths(live(policy, 0.9, 50))) <= {0, 2, 8}
