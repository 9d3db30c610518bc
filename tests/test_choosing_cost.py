"""What makes choosing quicker changes no choice (experiments/16_choosing and 22_micro say what it takes)."""

from __future__ import annotations

from types import ModuleType

import numpy as np

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
