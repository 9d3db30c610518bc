"""experiments/06_paired_acceptance: the formula for two exponential races won by the same token."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

EXPERIMENT = "06_paired_acceptance"


def some_probs(seed: int, zeros: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(12, generator=generator, dtype=torch.float64) ** 4
    probs[torch.randperm(12, generator=generator)[:zeros]] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize("zeros", [0, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_sorted_sums_are_the_plain_ones(experiment: Any, seed: int, zeros: int) -> None:
    p, q = some_probs(seed, zeros), some_probs(seed + 50, zeros)
    found = experiment.paired_tokens(p, q)
    for x in range(12):
        if p[x] == 0 or q[x] == 0:
            assert found[x] == 0
        else:
            assert found[x] == pytest.approx(float(1 / torch.maximum(p / p[x], q / q[x]).sum()), rel=1e-9)
    at = experiment.acceptance(p, q, int(p.argmax()))
    assert at.bound <= at.paired + 1e-12
    assert at.paired <= at.maximal + 1e-12
    assert at.maximal == pytest.approx(float(torch.minimum(p, q).sum()))
    of_token = [experiment.acceptance(p, q, x) for x in range(12) if p[x] > 0]
    weights = p[p > 0].tolist()
    for name in ("maximal", "paired"):  # given the target's token, then averaged over it
        mean = sum(w * getattr(a, f"{name}_of_token") for w, a in zip(weights, of_token, strict=True))
        assert mean == pytest.approx(getattr(at, name))


def test_alike_and_disjoint(experiment: Any) -> None:
    p = some_probs(0)
    assert experiment.acceptance(p, p, 0)[:3] == pytest.approx((1.0, 1.0, 1.0))
    left, right = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    assert experiment.acceptance(left, right, 0) == (0.0, 0.0, 0.0, 0.0, 0.0)


def test_simulations_agree(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "SIMULATED_DRAWS", 20_000)
    assert all(row["standard_errors"] < 4.0 for row in experiment.simulations())


def test_survival_is_a_mean_of_products(experiment: Any) -> None:
    assert experiment.survival([[0.5, 0.5, 1.0], [1.0, 0.0]], 2) == pytest.approx([2 / 3, 0.75 / 3])


def test_rounding_keeps_the_largest_weight_and_few_levels(experiment: Any) -> None:
    model = tiny.llama()
    draft = experiment.rounded(model, 3)
    weight = draft.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight.abs().amax(dim=1), model.model.layers[0].mlp.up_proj.weight.abs().amax(dim=1))
    assert max(len(row.unique()) for row in weight) <= 7
    assert torch.equal(draft.get_output_embeddings().weight, model.get_output_embeddings().weight)
