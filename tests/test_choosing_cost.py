"""What makes choosing quicker changes no choice (experiments/16_choosing and 22_micro say what it takes)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from autospec.costs import CostModel, CostTable, Curve
from autospec.costs.model import SETTLE_EVERY
from autospec.decoding.tally import Tally
from autospec.policies import goodput
from autospec.policies.confidence import Confidence
from autospec.types import OFF, BlockOutcome

EXPERIMENT = "16_choosing"
SEGMENTS, REQUESTS = 6, 60


def test_choices_are_those_of_a_policy_that_remembers_no_price(experiment: ModuleType) -> None:
    makes = experiment.policies()
    quick, forgetful = makes["goodput"](), makes["goodput"]()
    traffics = [experiment.Traffic(SEGMENTS, seed=3) for _ in range(2)]
    rng = np.random.default_rng(5)
    kinds = set()
    for _ in range(REQUESTS):
        number, start = int(rng.integers(SEGMENTS)), int(rng.integers(300))
        for block in range(experiment.BLOCKS):
            forgetful._known.clear()
            forgetful._prices._lists.clear()
            actions = []
            for policy, traffic in zip((quick, forgetful), traffics, strict=True):
                context, right = traffic.block(number, start + 3 * block)
                actions.append(policy.choose(context))
                policy.observe(traffic.outcome(context, actions[-1], right))
            assert actions[0] == actions[1]
            kinds.add(actions[0].reason_kind)
    assert quick.state() == forgetful.state()
    assert {"best", "kept"} <= kinds


def test_a_block_s_rates_and_confidence_are_those_asked_for_one_by_one(experiment: ModuleType) -> None:
    policy, traffic = experiment.policies()["goodput"](), experiment.Traffic(2, seed=1)
    for block in range(60):
        context, right = traffic.block(block % 2, 1 + block)
        policy.observe(traffic.outcome(context, policy.choose(context), right))
    known = policy._acceptance
    for source in experiment.DRAFTS:
        rates, confident = known.of_a_block("segment 1", source, 0.8, 20, 12)
        assert rates == known.rates("segment 1", source, 12)
        alone = known.confident("segment 1", source, 0.8, 20, 12)
        asked = [(position, margin, 1.5) for position in range(12) for margin in (0.05, 0.5, 0.95)]
        assert [confident(*each) for each in asked] == [alone(*each) for each in asked]


class InArrays(Confidence):
    """The same lesson, with arrays for all tokens of a proposal at once."""

    def learn(
        self,
        base: Sequence[float],
        values: Sequence[Sequence[float]],
        scores: Sequence[float] | None,
        num_accepted: int,
    ) -> None:
        state = self.state()
        weights, precision = np.array(state["weights"]), 0.99 * np.array(state["precision"]) + 0.01 * np.eye(7)
        columns = [np.zeros(len(base)) if scores is None else scores, base, np.ones(len(base))]
        rows = np.column_stack([np.array(values), *columns])
        expected = 1.0 / (1.0 + np.exp(-rows[:, -2] - np.clip(rows @ weights, -6.0, 6.0)))
        surprise = (np.arange(len(base)) < num_accepted) - expected
        precision += (rows.T * (expected * (1.0 - expected))) @ rows
        step = np.linalg.solve(precision, surprise @ rows)
        weights += step * min(1.0, 0.5 / np.abs(step).max())
        learned = Confidence.restored({"weights": weights.tolist(), "precision": precision.tolist()})
        self._weights, self._precision = learned._weights, learned._precision


def test_lessons_in_plain_numbers_are_those_of_arrays(experiment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    makes = experiment.policies()
    plain, arrays = makes["auto"](), makes["auto"]()
    traffics = [experiment.Traffic(SEGMENTS, seed=4) for _ in range(2)]
    rng = np.random.default_rng(6)
    seen: set[str] = set()
    for _ in range(REQUESTS):
        number, start = int(rng.integers(SEGMENTS)), int(rng.integers(300))
        for block in range(experiment.BLOCKS):
            said = []
            for policy, traffic, kind in zip((plain, arrays), traffics, (Confidence, InArrays), strict=True):
                monkeypatch.setattr("autospec.policies.acceptance.Confidence", kind)
                context, right = traffic.block(number, start + 3 * block)
                action = policy.choose(context)
                policy.observe(traffic.outcome(context, action, right))
                said.append((action.source, action.block_length, str(action.reason)))
            assert said[0] == said[1]
            seen.add(action.source)
    known, other = (policy.policy._acceptance._confidence for policy in (plain, arrays))
    assert {type(each) for each in other.values()} == {InArrays}
    for source, confidence in known.items():
        for name, learned in confidence.state().items():
            np.testing.assert_allclose(learned, other[source].state()[name], rtol=1e-6, atol=1e-9)
    assert {"ngram", "suffix", "assistant"} <= seen


def test_the_words_of_a_reason_are_made_when_they_are_read(
    experiment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    usual = goodput._words

    def words(kind: str, *rest: Any) -> str:
        said.append(kind)
        return usual(kind, *rest)

    monkeypatch.setattr(goodput, "_words", words)
    policy, traffic = experiment.policies()["auto"](), experiment.Traffic(2, seed=1)
    for block in range(40):
        context, right = traffic.block(block % 2, 1 + block)
        action = policy.choose(context)
        policy.observe(traffic.outcome(context, action, right))
        tally = Tally()
        tally.add(traffic.outcome(context, action, right))
        assert list(tally.decisions) == [f"{action.label} {action.reason_kind}"]
    assert said == []
    text = str(action.reason)
    assert (text, str(action.reason)) == (action.reason, text)
    assert text.startswith(f"{action.reason_kind}: ")
    assert len(said) == 1


def test_costs_take_in_blocks_when_they_look_at_them() -> None:
    """Estimates stand still between two looks, so that what was measured can wait until then."""
    read: list[BlockOutcome] = []

    class Seen(CostModel):
        def _read(self, outcome: BlockOutcome) -> None:
            read.append(outcome)
            super()._read(outcome)

    costs = Seen(CostTable((1, 4), Curve((100,), (1, 2, 5), ((0.04, 0.041, 0.05),)), {}))
    outcomes = [BlockOutcome("s", OFF, 100 + i, 0, 0, 0, 1, verify_seconds=0.08) for i in range(2 * SETTLE_EVERY + 1)]
    for number, outcome in enumerate(outcomes, start=1):
        costs.observe(outcome)
        assert read == outcomes[: number // SETTLE_EVERY * SETTLE_EVERY]
    assert costs.verify_seconds(1, 100) > 0.07
    costs.recalibrate(costs.table, is_asynchronous=False)
    for outcome in outcomes[: SETTLE_EVERY - 1]:
        costs.observe(outcome)
    assert len(read) == 2 * SETTLE_EVERY  # what was measured beside the old table is forgotten


@pytest.mark.parametrize("size", [1.0, 1e14, 5e14])
def test_a_lesson_after_a_state_of_very_large_numbers(size: float) -> None:
    """Rounding leaves little of pivots that are differences of such numbers."""
    precision = size * np.ones((7, 7)) + np.eye(7)
    made = Confidence.restored({"weights": [0.0] * 7, "precision": precision.tolist()})
    rng = np.random.default_rng(0)
    for _ in range(300):
        base, scores = rng.normal(size=(2, 2)).tolist()
        made.learn(base, [[0.1, 0.2, 0.3, 0.4]] * 2, scores, 1)
    assert np.isfinite(made.state()["weights"]).all()
