"""Is a differing greedy token a numerical tie or a fault?"""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

from autospec.decoding.ties import examine, first_difference, tolerance


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_difference(a: list[int], b: list[int], position: int | None) -> None:
    assert first_difference(a, b) == position


def test_tolerance_is_a_few_units_of_the_last_place() -> None:
    assert tolerance(20.0, torch.bfloat16) == 1.0
    assert tolerance(20.0, torch.float32) < 0.002
    assert tolerance(20.0, torch.float64) < 1e-11


def test_a_fault_is_no_tie_and_a_tie_is_none() -> None:
    model = copy.deepcopy(tiny.llama())
    with torch.no_grad():
        model.lm_head.weight[32:] = model.lm_head.weight[:32]  # ids 32 apart have equal logits
    ids = tiny.prompt(20)
    answer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 20:].tolist()
    assert examine(model, ids, answer, answer) is None
    tied = [*answer[:4], answer[4] + 32, *answer[5:]]
    difference = examine(model, ids, answer, tied)
    assert difference is not None
    assert (difference.position, difference.is_tie) == (4, True)
    fault = examine(model, ids, answer, [*answer[:4], (answer[4] + 1) % 32, *answer[5:]])
    assert fault is not None
    assert not fault.is_tie
    assert fault.logit_gap > 0
    shorter = examine(model, ids, answer, answer[:6])
    assert shorter is not None
    assert not shorter.is_tie
