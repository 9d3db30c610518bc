"""The bars of `auto` on simulated traffic, at a size that a test can afford (experiment 13 has them at full size)."""

from __future__ import annotations

from types import ModuleType

import pytest

EXPERIMENT = "13_policy_regret"


@pytest.mark.parametrize("device", ["bfloat16", "float32"])
class TestBars:
    def test_stationary(self, experiment: ModuleType, device: str) -> None:
        found = experiment.one(("stationary", device, 0, 1_300, False))
        assert found["share"]["auto"] >= 0.97
        assert found["share"]["auto"] >= 1.1 * found["best_fixed"][1]

    def test_a_switch(self, experiment: ModuleType, device: str) -> None:
        found = experiment.one(("switching", device, 0, 1_600, False))
        after = found["after_switch"]["auto"]
        assert sum(after[key] for key in ("200", "250", "300")) / 3 >= 0.95

    def test_where_nothing_pays(self, experiment: ModuleType, device: str) -> None:
        found = experiment.one(("never pays", device, 0, 1_500, False))
        assert found["against_off"]["auto"] >= 0.98


def test_luck_is_the_same_for_every_policy(experiment: ModuleType) -> None:
    traffic = experiment.Traffic(experiment.MIXED, 300)
    one, other = (list(experiment.blocks(traffic, experiment.FLOAT32, 3)) for _ in range(2))
    assert one == other
    assert {block.segment for block in one} == set(experiment.MIXED)


def test_fixed_actions_are_priced_as_they_are_played(experiment: ModuleType) -> None:
    device = experiment.FLOAT32
    met = list(experiment.blocks(experiment.Traffic(experiment.MIXED, 200), device, 1))
    for action, expected in experiment.goodputs(met, device).items():
        played = experiment.run(experiment.Oracle(lambda segment, block, action=action: action), met, device)
        assert experiment.goodput(played) == pytest.approx(expected)
