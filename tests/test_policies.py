"""Policies: what each chooses, and the faults that adaptive controllers are known for."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from test_goodput import Costs

from autospec.certify.cases import POLICIES
from autospec.controller import Controller
from autospec.errors import ConfigurationError, ExactnessError
from autospec.policies import Fixed, make_policy
from autospec.policies.acceptance import AcceptanceModel
from autospec.types import OFF, Action, BlockContext, BlockOutcome, RequestContext


def context(segment: str = "s", sources: tuple[str, ...] = ("ngram",), left: int = 1000) -> BlockContext:
    request = RequestContext(segment, prompt_tokens=50, max_new_tokens=left, do_sample=False, sources=sources)
    return BlockContext(request, context_tokens=100, output_tokens=0, sources=sources)


def live(policy: Any, rate: float, blocks: int, *, seed: int = 0, where: BlockContext | None = None) -> list[Action]:
    """Blocks whose draft tokens are each accepted with probability `rate`."""
    rng = np.random.default_rng(seed)
    where = where or context()
    actions = []
    for _ in range(blocks):
        action = policy.choose(where)
        k = action.block_length
        accepted = int(np.cumprod(rng.random(k) < rate).sum())
        judged = min(k, accepted + 1)
        policy.observe(BlockOutcome(where.segment, action, 100, k, judged, accepted, accepted + 1))
        actions.append(action)
    return actions


@pytest.mark.parametrize("name", POLICIES)
class TestContract:
    """Every policy."""

    def test_has_a_name_and_chooses_what_is_usable(self, name: str) -> None:
        policy = POLICIES[name]()
        assert isinstance(policy.name, str)
        assert policy.name
        for _ in range(60):
            where = context(sources=("assistant", "ngram"))
            action = policy.choose(where)
            assert isinstance(action, Action)
            assert action.source in ("none", *where.sources)
            assert type(action.block_length) is int
            assert action.block_length >= 0
            k = action.block_length
            policy.observe(BlockOutcome("s", action, 100, k, min(k, 1), 0, 1))

    def test_the_same_outcomes_lead_to_the_same_choices(self, name: str) -> None:
        where = context(sources=("assistant", "ngram"))
        chosen = [[a.label for a in live(POLICIES[name](), 0.6, 80, where=where)] for _ in range(2)]
        assert chosen[0] == chosen[1]


class TestFixed:
    def test_chooses_what_it_was_given(self) -> None:
        assert Fixed("ngram", block_length=5).choose(context()).label == "ngram:5"
        assert Fixed("ngram", block_length=5).name == "fixed:ngram:5"

    def test_is_off_where_the_source_is_not_usable(self) -> None:
        assert Fixed("assistant", block_length=5).choose(context()) is OFF

    @pytest.mark.parametrize("block_length", [-1, 2.5, "4", True, None])
    def test_bad_block_length(self, block_length: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"block_length=.*a whole number of at least 0 is needed"):
            Fixed("ngram", block_length=block_length)


class TestMakePolicy:
    def test_forms(self) -> None:
        assert make_policy("fixed:ngram:5", ["ngram"], Costs).name == "fixed:ngram:5"
        assert make_policy("off", ["ngram"], Costs).name == "off"
        assert make_policy("auto", ["ngram"], Costs).name == "auto"
        own = Fixed("ngram", block_length=2)
        assert make_policy(own, ["ngram"], Costs) is own

    def test_costs_are_measured_only_when_needed(self) -> None:
        def never() -> Any:
            raise AssertionError

        make_policy("fixed:ngram:5", ["ngram"], never)
        assert make_policy("auto", [], never).name == "off"

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ("fast", r"unknown policy 'fast': known are 'auto', 'off', 'fixed:SOURCE:BLOCK_LENGTH'"),
            ("fixed:ngram", "the form is fixed:SOURCE:BLOCK_LENGTH"),
            ("fixed:ngram:many", "block length 'many' is not a whole number"),
            ("fixed:ngram:-2", "block_length=-2"),
            ("fixed:suffix:4", "needs draft source 'suffix', which is not among drafts=none, ngram"),
            (Fixed("assistant", block_length=3), "needs draft source 'assistant'"),
            ("fixed:magic:0", "needs draft source 'magic'"),
            (object(), "is no policy"),
        ],
    )
    def test_errors(self, policy: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make_policy(policy, ["ngram"], Costs)


def test_each_auto_draws_controls_of_its_own() -> None:
    """A fleet that starts together would else measure the same requests everywhere."""
    request = RequestContext("s", 50, 1000, do_sample=False, sources=("ngram",))
    drawn = set()
    for _ in range(5):
        policy: Any = make_policy("auto", ["ngram"], Costs)
        drawn.add(tuple(policy.is_control(request) for _ in range(500)))
    assert len(drawn) > 1


class TestAcceptanceModel:
    def test_learns_the_true_rate_though_blocks_are_cut_short(self) -> None:
        """EOS, length and the policy cut blocks; what was cut off is neither accepted nor rejected."""
        rng = np.random.default_rng(0)
        model = AcceptanceModel(discount=1.0)
        for _ in range(4000):
            k = int(rng.integers(1, 9))
            accepted = int(np.cumprod(rng.random(k) < 0.6).sum())
            judged = min(k, accepted + 1)
            cut = int(rng.integers(0, 9))
            judged, accepted = min(judged, cut), min(accepted, cut)
            model.add(BlockOutcome("s", Action("ngram", 8), 100, k, judged, accepted, accepted + 1))
        np.testing.assert_allclose(model.survival("s", "ngram", 4), 0.6 ** np.arange(1, 5), atol=0.02)

    def test_a_new_segment_starts_from_what_the_source_did_elsewhere(self) -> None:
        model = AcceptanceModel()
        for _ in range(100):
            model.add(BlockOutcome("old", Action("ngram", 4), 100, 4, 1, 0, 1))
        assert model.survival("new", "ngram", 1)[0] < 0.1
        assert model.survival("new", "assistant", 1)[0] == pytest.approx(0.8)

    def test_misses_count_as_misses_not_as_rejections(self) -> None:
        model = AcceptanceModel()
        for _ in range(200):
            model.add(BlockOutcome("s", Action("ngram", 4), 100, 0, 0, 0, 1))
        assert model.hit_rate("s", "ngram") < 0.05
        assert model.survival("s", "ngram", 1)[0] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: AcceptanceModel(discount=3), "discount=3"),
        (lambda: AcceptanceModel(strength=-1), "strength=-1"),
        (lambda: AcceptanceModel(prior_acceptance=float("nan")), "prior_acceptance=nan"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, setting: str) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        make()


class TestController:
    @pytest.mark.parametrize(
        "counts", [(4, 5, 5, 5, 6), (4, 4, 5, 4, 5), (4, 4, 3, 4, 5), (4, 4, 4, 2, 4), (4, 4, 4, 2, 0)]
    )
    def test_counts_that_contradict_each_other_stop_the_request(self, counts: tuple[int, int, int, int, int]) -> None:
        """Case C10."""
        asked, drafted, judged, accepted, committed = counts
        controller = Controller(Fixed("ngram", block_length=4))
        with pytest.raises(ExactnessError, match="contradict"):
            controller.observe(BlockOutcome("s", Action("ngram", asked), 10, drafted, judged, accepted, committed))

    def test_a_draft_that_is_never_accepted_is_said_aloud_once(self) -> None:
        controller = Controller(Fixed("ngram", block_length=4))
        useless = BlockOutcome("s", Action("ngram", 4), 10, 4, 1, 0, 1)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(300):
                controller.observe(useless)
        assert [str(w.message) for w in heard] == [
            "autospec: none of the first 100 draft tokens of 'ngram' was accepted: is it made for this model? "
            "Answers stay right, but nothing is gained"
        ]

    def test_a_draft_that_is_sometimes_accepted_is_not(self) -> None:
        controller = Controller(Fixed("ngram", block_length=4))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for number in range(300):
                accepted = int(number == 50)
                controller.observe(BlockOutcome("s", Action("ngram", 4), 10, 4, 1 + accepted, accepted, 1 + accepted))
        assert heard == []
