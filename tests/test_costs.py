"""Cost curves, how they are fitted to samples, and their calibration."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from autospec.costs.calibration import calibrate
from autospec.costs.fitting import MOMENT, fit, monotone, spread, steadied
from autospec.costs.probes import filled_cache, some_tokens
from autospec.costs.table import CostTable, Curve
from autospec.drafts import Assistant, NGram, Proposal

CURVE = Curve((100, 300), (1, 2, 3, 5), ((1.0, 2.0, 1.5, 1.7), (2.0, 3.0, 2.5, 2.7)))


def test_measured_points_are_returned_as_measured() -> None:
    for i, context in enumerate(CURVE.contexts):
        for j, tokens in enumerate(CURVE.tokens):
            assert CURVE.at(tokens, context) == pytest.approx(CURVE.seconds[i][j])


def test_between_and_beyond() -> None:
    assert CURVE.at(1, 200) == pytest.approx(1.5)
    assert CURVE.at(4, 100) == pytest.approx(1.6)
    assert CURVE.at(1, 10) == pytest.approx(1.0)
    assert CURVE.at(1, 500) == pytest.approx(3.0)  # on along the last slope
    assert CURVE.at(7, 100) == pytest.approx(1.9)
    assert CURVE.at(2, 100) > CURVE.at(3, 100)  # a step is kept as a step, also where the curve falls


def test_what_lies_beyond_the_measured_says_so() -> None:
    table = CostTable((1, 2, 4), CURVE, {"ngram": CURVE})
    assert not table.is_extrapolated(5, 300)
    assert not table.is_extrapolated(4, 10)
    assert table.is_extrapolated(6, 300)
    assert table.is_extrapolated(5, 301)
    assert table.is_extrapolated(1, 100, "assistant")
    assert not table.is_extrapolated(1, 100, "ngram")
    assert CURVE.at(7, 900) > CURVE.at(5, 900) > CURVE.at(5, 300)


def test_a_falling_curve_is_not_believed_to_fall_on() -> None:
    falling = Curve((10, 20), (1, 2), ((3.0, 2.0), (2.5, 1.5)))
    assert falling.at(9, 10) == pytest.approx(2.0)
    assert falling.at(1, 90) == pytest.approx(2.5)


def test_one_point_is_a_constant() -> None:
    assert Curve((10,), (1,), ((3.0,),)).at(4, 500) == 3.0


def test_padding_only_where_a_wider_forward_was_measured_to_be_cheaper() -> None:
    table = CostTable((1, 2, 4), CURVE, {})
    assert table.cheapest_width(2, 100) == 3
    assert table.cheapest_width(1, 100) == 1
    assert table.cheapest_width(5, 100) == 5
    level = CostTable((1,), Curve((10,), (1, 2), ((1.0, 0.99),)), {})
    assert level.cheapest_width(1, 10) == 1  # within what is noise


def test_fit_keeps_steps_rises_with_context_and_marks_what_it_composed() -> None:
    first = {(10, 1): [1.0, 9.0, 1.0], (10, 2): [2.0], (10, 3): [1.5, 1.5], (10, 5): [1.8]}
    curve = fit({**first, (50, 1): [1.4], (50, 5): [3.0], (90, 1): [1.2, 1.2, 1.2], (90, 5): [4.0]})
    assert curve.seconds[0] == (1.0, 2.0, 1.5, 1.8)  # as measured; of repeats the median
    assert curve.at(1, 50) == curve.at(1, 90) == pytest.approx(1.25)  # 1.4 and three times 1.2
    assert curve.at(3, 90) == pytest.approx(1.5 + (0.25 + 2.2) / 2)  # what a context adds, between 1 and 5 tokens
    assert curve.composed == {(50, 2), (50, 3), (90, 2), (90, 3)}
    assert monotone([1.0, 0.99, 2.0], [1, 1, 1]) == [1.0, 0.99, 2.0]  # a fall that decides nothing


def test_spread_says_how_far_repeats_lie_apart() -> None:
    assert spread({(1, 1): [1.0, 1.1, 1.0]}) == pytest.approx(0.05)
    assert spread({(1, 1): [2.0]}) == 1.0  # unknown


def test_a_table_survives_json() -> None:
    table = CostTable((1, 2, 4), CURVE, {"ngram": CURVE}, measured_at="2026-01-02T03:04:05+00:00", spread=0.01)
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table


@pytest.mark.parametrize(
    "damage",
    [
        {"verify": {"contexts": [1], "tokens": [1], "seconds": [[0.0]], "composed": []}},
        {"verify": {"contexts": [1], "tokens": [1, 2], "seconds": [[1.0]], "composed": []}},
        {"verify": {"contexts": [2, 1], "tokens": [1], "seconds": [[1.0], [1.0]], "composed": []}},
        {"verify": {"contexts": [1], "tokens": [1], "seconds": [[float("nan")]], "composed": []}},
        {"block_lengths": []},
        {"block_lengths": [True]},
        {"drafts": []},
        {"measured_at": "yesterday"},
        {"spread": None},
    ],
)
def test_damaged_json_is_no_table(damage: dict[str, Any]) -> None:
    values = CostTable((1,), CURVE, {}).to_json()
    with pytest.raises(ValueError):  # noqa: PT011
        CostTable.from_json({**values, **damage})
    del values["verify"]
    with pytest.raises(ValueError, match="no cost table"):
        CostTable.from_json(values)


@pytest.mark.parametrize("model", [tiny.llama(), tiny.mistral(window=8)], ids=["full", "window"])
def test_calibration_measures_every_point_and_leaves_no_trace(model: Any) -> None:
    sources = {"ngram": NGram(), "assistant": Assistant(tiny.near_copy(model))}
    state = torch.get_rng_state()
    costs = calibrate(model, sources, block_lengths=(1, 4), contexts=(16, 64, 100_000), repeats=2, extra_widths=0)
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


def test_widths_between_are_measured_where_the_device_has_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that changes at 15 tokens shows at none of the widths of the block lengths."""

    def seconds(probe: Any, width: int) -> float:
        return 0.2 if 12 <= width <= 15 else 0.1

    monkeypatch.setattr("autospec.costs.calibration.VerifyProbe.seconds", seconds)
    costs = calibrate(tiny.llama(), {}, contexts=(16, 64))
    assert costs.verify_seconds(15, 16) == costs.verify_seconds(12, 40) == pytest.approx(0.2)
    assert costs.verify_seconds(16, 16) == costs.verify_seconds(11, 16) == pytest.approx(0.1)
    assert 6 not in costs.verify.tokens  # nothing to see there
    assert (64, 15) in costs.verify.composed


def test_a_calibration_ends_with_its_budget() -> None:
    costs = calibrate(tiny.llama(), {"ngram": NGram()}, contexts=(16, 64), budget_seconds=0.0, repeats=1000)
    assert costs.calibration_seconds < 5.0
    assert set(costs.verify.tokens) >= {1, 2, 3, 5, 9, 17}
    assert costs.draft_seconds("ngram", 16, 64) > 0


@pytest.mark.parametrize("model", [tiny.llama(), tiny.mistral(window=8)], ids=["full", "window"])
def test_a_cache_is_filled_to_any_length(model: Any) -> None:
    with torch.no_grad():
        assert filled_cache(model, some_tokens(model, 200)).get_seq_length() == 200


def test_a_target_that_cannot_be_rolled_back_has_its_plain_step_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autospec.costs.probes.why_not_rollback", lambda cache: "no")
    costs = calibrate(tiny.llama(), {}, contexts=(16,), repeats=2)
    assert costs.verify_seconds(17, 16) > 0


def test_catching_up_is_no_part_of_drafting() -> None:
    class Slow(NGram):
        def start(self, request: Any) -> Any:
            inner = super().start(request)

            class Session:
                def propose(self, committed: Any, block_length: int) -> Proposal:
                    time.sleep(0.02)
                    return replace(inner.propose(committed, block_length), catch_up_seconds=0.02)

            return Session()

    costs = calibrate(tiny.llama(), {"ngram": Slow()}, block_lengths=(1,), contexts=(16,), repeats=3)
    assert costs.draft_seconds("ngram", 1, 16) < 0.015


def test_a_slow_moment_is_not_taken_for_slow_points() -> None:
    """Five points timed within one burst, as the widths in the middle were, between others that were timed before."""
    seconds = {width: 0.04 + 0.001 * width for width in range(1, 18)}
    early = [(width, seconds[width]) for width in (1, 2, 3, 5, 9, 17)] * 3
    burst = [(w, 1.7 * seconds[w]) for gap in ((3, 4, 5), (5, 7, 9), (9, 13, 17), (5, 6, 7), (7, 8, 9)) for w in gap]
    timings = early + early[: -len(early) % MOMENT] + burst
    found = dict(zip((width for width, _ in timings), steadied(timings), strict=True))
    assert max(abs(found[width] / seconds[width] - 1.0) for width in found) < 0.1
    raw = dict(timings)
    assert max(abs(raw[width] / seconds[width] - 1.0) for width in raw) > 0.6
    assert steadied([]) == []
    lookups = [("ngram", 2e-5), ("ngram", 9e-5)]
    assert steadied(lookups) == [2e-5, 9e-5]


def test_what_takes_microseconds_never_falls_to_nothing() -> None:
    """A fall of some microseconds decides nothing and is left; what is composed of it is a time all the same."""
    samples = {(64, 1): [12e-6], (64, 4): [60e-6], (64, 8): [14e-6], (512, 4): [15e-6]}
    curve = fit(samples)
    assert all(seconds > 1e-6 for row in curve.seconds for seconds in row)
    lengths = (1, 4, 8)
    table = CostTable(block_lengths=lengths, verify=curve, drafts={"ngram": curve})
    assert CostTable.from_json(table.to_json()) == table
