"""Cost curves and their calibration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
import torch

from autospec.costs.calibration import calibrate
from autospec.costs.table import CostTable, Curve
from autospec.drafts import Assistant, NGram

CURVE = Curve((100, 300), (1, 2, 3, 5), ((1.0, 2.0, 1.5, 1.7), (2.0, 3.0, 2.5, 2.7)))


def test_measured_points_are_returned_as_measured() -> None:
    for i, context in enumerate(CURVE.contexts):
        for j, tokens in enumerate(CURVE.tokens):
            assert CURVE.at(tokens, context) == pytest.approx(CURVE.seconds[i][j])


def test_between_and_beyond() -> None:
    assert CURVE.at(1, 200) == pytest.approx(1.5)
    assert CURVE.at(4, 100) == pytest.approx(1.6)
    assert CURVE.at(1, 10) == pytest.approx(1.0)
    assert CURVE.at(1, 9000) == pytest.approx(2.0)
    assert CURVE.at(7, 100) == pytest.approx(1.9)
    assert CURVE.at(2, 100) > CURVE.at(3, 100)  # a step is kept as a step, also where the curve falls


@pytest.mark.parametrize("model", [tiny.llama(), tiny.mistral(window=8)], ids=["full", "window"])
def test_calibration_measures_every_point_and_leaves_no_trace(model: Any) -> None:
    sources = {"ngram": NGram(), "assistant": Assistant(tiny.near_copy(model))}
    state = torch.get_rng_state()
    costs = calibrate(model, sources, block_lengths=(1, 4), contexts=(16, 64, 100_000), repeats=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(costs, CostTable)
    assert costs.verify.contexts == (16, 64)  # beyond the window there is nothing to measure
    assert costs.verify.tokens == (1, 2, 5)
    assert all(seconds > 0 for row in costs.verify.seconds for seconds in row)
    assert costs.draft_seconds("assistant", 4, 20) > costs.draft_seconds("ngram", 4, 20) > 0


def test_a_source_that_cannot_be_timed_is_never_chosen() -> None:
    model = tiny.llama()
    broken = tiny.near_copy(model)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    costs = calibrate(model, {"assistant": Assistant(broken)}, block_lengths=(1, 4), contexts=(16,), repeats=1)
    assert costs.draft_seconds("assistant", 4, 16) == math.inf


def test_a_short_window_is_timed_where_it_reaches() -> None:
    model = tiny.llama()
    short = Assistant(tiny.llama(seed=3, max_position_embeddings=60))
    costs = calibrate(model, {"assistant": short}, block_lengths=(1, 4), contexts=(16, 200), repeats=1)
    assert costs.drafts["assistant"].contexts == (16,)
    assert costs.draft_seconds("assistant", 4, 200) > 0


def test_plug_ins_that_raise_or_draw_do_not_disturb_calibration() -> None:
    class Wild(NGram):
        def start(self, request: Any) -> Any:
            torch.manual_seed(5)
            raise RuntimeError("wild")

    model = tiny.llama()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    costs = calibrate(model, {"ngram": Wild()}, block_lengths=(1,), contexts=(16,), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert costs.drafts == {}
