"""The cost model in service: what it learns from blocks, what it does not, and when it asks to be calibrated again."""

from __future__ import annotations

import logging
import math
import random
import sys
import threading
from typing import Any

import pytest
import tiny
import torch

import autospec
from autospec.costs import CostModel, CostTable, Curve
from autospec.costs import upkeep as costs_upkeep
from autospec.costs.correction import Correction, winsorised_mean
from autospec.costs.measuring import Measured
from autospec.costs.upkeep import LEAST_SECONDS_BETWEEN, Upkeep
from autospec.policies.base import CostEstimates
from autospec.types import OFF, Action, BlockOutcome, RequestContext

TABLE = CostTable(
    (1, 4, 16),
    Curve((100, 1100), (1, 2, 5, 17), ((0.040, 0.042, 0.045, 0.060), (0.050, 0.060, 0.065, 0.080))),
    {"ngram": Curve((100,), (1, 16), ((1e-5, 2e-5),)), "assistant": Curve((100,), (1, 16), ((0.004, 0.064),))},
)


def block(
    model: CostModel, drafted: int, verify: float, *, draft: float = 1.0, source: str = "assistant"
) -> BlockOutcome:
    """A block that took so many times what the table says. Args: drafted: 0 is a plain step."""
    action = Action(source, drafted) if drafted else OFF
    return BlockOutcome(
        "s",
        action,
        context_tokens=100,
        num_draft_tokens=drafted,
        num_judged_tokens=drafted,
        num_accepted_tokens=drafted,
        num_committed_tokens=drafted + 1,
        draft_seconds=draft * TABLE.draft_seconds(source, drafted, 100) if drafted else 0.0,
        verify_seconds=verify * TABLE.verify_seconds(drafted + 1, 100),
    )


def lived(model: CostModel, drafted: int, blocks: int, factor: float, *, noise: float = 0.03, seed: int = 0) -> None:
    generator = random.Random(seed)
    for _ in range(blocks):
        model.observe(block(model, drafted, factor * math.exp(generator.gauss(0.0, noise))))


def test_it_answers_as_calibrated_until_it_has_seen_something() -> None:
    model = CostModel(TABLE)
    estimates: CostEstimates = model
    assert estimates.verify_seconds(5, 100) == pytest.approx(0.045)
    assert estimates.draft_seconds("assistant", 16, 100) == pytest.approx(0.064)
    assert estimates.draft_seconds("heads", 4, 100) == math.inf
    assert estimates.block_lengths == (1, 4, 16)
    assert estimates.version == 0
    assert estimates.is_extrapolated(18, 100)
    assert not estimates.is_extrapolated(17, 1100)
    assert model.cheapest_width(1, 100) == 1


def test_readers_never_see_parts_of_two_calibrations() -> None:
    """A source that only one of them has is either priced or not: table and corrections change at once."""
    without = CostTable(TABLE.block_lengths, TABLE.verify, {"ngram": TABLE.drafts["ngram"]})
    model = CostModel(without)
    errors: list[Exception] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                model.draft_seconds("assistant", 4, 100)
            except Exception as error:  # noqa: BLE001
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=read) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        for number in range(6_000):
            model.recalibrate(without if number % 2 else TABLE, is_asynchronous=False)
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert errors == []


def test_one_stall_changes_nothing() -> None:
    model = CostModel(TABLE)
    lived(model, 4, 160, 1.0)
    before = [model.verify_seconds(w, 100) for w in (1, 2, 5, 17)]
    model.observe(block(model, 4, 40.0, draft=40.0))
    lived(model, 4, 47, 1.0, seed=1)
    assert [model.verify_seconds(w, 100) for w in (1, 2, 5, 17)] == pytest.approx(before, rel=0.01)
    assert model.draft_seconds("assistant", 4, 100) == pytest.approx(TABLE.draft_seconds("assistant", 4, 100), rel=0.01)
    assert not model.needs_calibration


@pytest.mark.parametrize("blocks", [1, 2, 5, 16])
def test_not_even_among_the_first(blocks: int) -> None:
    model = CostModel(TABLE)
    model.observe(block(model, 4, 40.0))
    lived(model, 4, 15 + blocks, 1.0)
    assert model.verify_seconds(5, 100) == pytest.approx(0.045, rel=0.02)


def test_c06_one_constant_width_does_not_bend_the_curve() -> None:
    """A policy that always uses one width moves all widths alike: slope and intercept stay in the ratio calibrated."""
    model = CostModel(TABLE)
    lived(model, 4, 500, 1.15)
    assert model.verify_seconds(5, 100) == pytest.approx(0.045 * 1.15, rel=0.02)
    for width in (1, 2, 17):
        ratio = model.verify_seconds(width, 100) / model.verify_seconds(5, 100)
        assert ratio == pytest.approx(TABLE.verify_seconds(width, 100) / 0.045, rel=0.01)


def test_a_width_that_differs_is_learnt_by_itself() -> None:
    model = CostModel(TABLE)
    for number in range(40):
        lived(model, 4, 4, 1.0, seed=number)
        lived(model, 0, 4, 1.2, seed=number)
    assert model.verify_seconds(1, 100) == pytest.approx(0.040 * 1.2, rel=0.04)
    assert model.verify_seconds(5, 100) == pytest.approx(0.045, rel=0.04)


def test_what_was_learnt_of_a_width_long_ago_follows_the_others() -> None:
    model = CostModel(TABLE)
    lived(model, 16, 64, 1.0)
    lived(model, 4, 1500, 1.6)
    assert model.verify_seconds(17, 100) == pytest.approx(0.060 * 1.6, rel=0.08)


def test_a_draft_that_is_cheap_in_some_blocks_keeps_its_mean() -> None:
    model = CostModel(TABLE)
    for number in range(200):
        model.observe(block(model, 4, 1.0, draft=0.02 if number % 2 else 1.0))
    assert model.draft_seconds("assistant", 4, 100) == pytest.approx(
        0.51 * TABLE.draft_seconds("assistant", 4, 100), rel=0.1
    )


def test_between_versions_every_answer_is_the_same_and_noise_makes_no_version() -> None:
    model = CostModel(TABLE)
    answers: dict[int, float] = {}
    generator = random.Random(3)
    for _ in range(640):
        model.observe(block(model, 4, math.exp(generator.gauss(0.0, 0.02))))
        assert answers.setdefault(model.version, model.verify_seconds(5, 100)) == model.verify_seconds(5, 100)
    assert model.version <= 20
    before = model.version
    lived(model, 4, 100, 1.3)
    assert model.version > before


def test_the_first_block_of_an_answer_teaches_nothing() -> None:
    model = CostModel(TABLE)
    request = RequestContext("s", prompt_tokens=99, max_new_tokens=9, do_sample=False, sources=("assistant",))
    for _ in range(100):
        first = block(model, 4, 3.0)
        model.observe(BlockOutcome(**{**{n: getattr(first, n) for n in first.__slots__}, "request": request}))
    assert model.verify_seconds(5, 100) == pytest.approx(0.045)


def test_catch_up_and_choosing_tokens_are_not_charged() -> None:
    model, accelerated = CostModel(TABLE), CostModel(TABLE, is_asynchronous=True)
    for _ in range(100):
        plain = block(model, 4, 0.5)
        outcome = BlockOutcome(
            **{
                **{n: getattr(plain, n) for n in plain.__slots__},
                "catch_up_seconds": 5.0,
                "correction_seconds": 0.0225,
            }
        )
        model.observe(outcome)
        accelerated.observe(outcome)
    assert model.draft_seconds("assistant", 4, 100) == pytest.approx(TABLE.draft_seconds("assistant", 4, 100))
    assert model.verify_seconds(5, 100) == pytest.approx(0.0225, rel=0.07)
    assert accelerated.verify_seconds(5, 100) == pytest.approx(
        0.045, rel=0.01
    )  # the forward ends while it is waited for


def test_drift_is_seen_and_ends_with_hysteresis() -> None:
    model = CostModel(TABLE)
    lived(model, 4, 200, 1.0)
    assert model.drift == pytest.approx(1.0, abs=0.02)
    lived(model, 4, 60, 1.5)
    lived(model, 4, 100, 1.0)
    assert not model.needs_calibration  # it was over soon
    lived(model, 4, 160, 1.5)
    assert model.drift == pytest.approx(1.5, rel=0.02)
    assert model.needs_calibration
    lived(model, 4, 160, 1.2)
    assert model.needs_calibration  # not yet
    lived(model, 4, 160, 1.05)
    assert not model.needs_calibration


def test_a_device_that_became_faster_has_drifted_too() -> None:
    model = CostModel(TABLE)
    lived(model, 4, 400, 0.6)
    assert model.needs_calibration
    model.recalibrate(TABLE, is_asynchronous=False)
    assert not model.needs_calibration
    assert model.drift == 1.0
    assert model.verify_seconds(5, 100) == pytest.approx(0.045)


def test_seconds_of_nothing_are_not_learnt_from() -> None:
    model = CostModel(TABLE)
    for _ in range(64):
        model.observe(block(model, 4, 0.0, draft=0.0))
        model.observe(block(model, 4, 0.0, source="heads", draft=0.0))
    assert model.version == 0


def test_winsorised_mean() -> None:
    assert winsorised_mean([1.0, 2.0, 3.0, 900.0]) == pytest.approx(2.5)
    assert winsorised_mean([4.0]) == 4.0
    correction = Correction()
    assert correction.factor(3) == correction.common == 1.0
    assert correction.median() is None


class TestUpkeep:
    def upkeep(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Upkeep, list[dict[str, Any]], list[float]]:
        calls: list[dict[str, Any]] = []
        clock = [0.0]

        def measure(target: Any, sources: Any, **options: Any) -> Measured:
            calls.append(options)
            clock[0] += 2.0
            return Measured(TABLE, None, is_from_disk=False, seconds=2.0)

        monkeypatch.setattr("autospec.costs.measuring.measure", measure)
        monkeypatch.setattr("autospec.costs.upkeep.measure", measure)
        return Upkeep(tiny.llama(), {}, clock=lambda: clock[0]), calls, clock

    def test_drift_is_met_by_calibrating_but_not_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        upkeep, calls, clock = self.upkeep(monkeypatch)
        upkeep.before_request()
        lived(upkeep.costs, 4, 400, 1.6)
        upkeep.before_request()
        assert len(calls) == 1  # calibrated a moment ago
        clock[0] += LEAST_SECONDS_BETWEEN
        upkeep.before_request()
        assert len(calls) == 2
        assert calls[-1]["fresh"]
        assert not upkeep.costs.needs_calibration
        lived(upkeep.costs, 4, 400, 1.6)
        upkeep.before_request()
        assert len(calls) == 2

    def test_a_target_that_moved_and_could_not_be_measured_is_measured_later(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        upkeep, calls, clock = self.upkeep(monkeypatch)
        succeeding = costs_upkeep.measure

        def fail(*args: Any, **options: Any) -> Measured:
            calls.append(options)
            raise RuntimeError("out of memory")

        monkeypatch.setattr("autospec.costs.upkeep.measure", fail)
        upkeep._target.to(torch.float32)
        for _ in range(3):
            upkeep.before_request()
        assert len(calls) == 2  # not before every request
        assert "out of memory" in caplog.text
        monkeypatch.setattr("autospec.costs.upkeep.measure", succeeding)
        version = upkeep.costs.version
        clock[0] += LEAST_SECONDS_BETWEEN
        for _ in range(2):
            upkeep.before_request()
        assert len(calls) == 3
        assert upkeep.costs.version > version

    def test_a_target_that_moved_is_measured_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        upkeep, calls, _ = self.upkeep(monkeypatch)
        version = upkeep.costs.version
        upkeep._target.to(torch.float32)
        upkeep.before_request()
        upkeep.before_request()
        assert len(calls) == 2
        assert upkeep.costs.version > version

    def test_a_failure_costs_no_answer(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        upkeep, _, _ = self.upkeep(monkeypatch)

        def fail(*args: Any, **options: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("autospec.costs.upkeep.measure", fail)
        upkeep._target.to(torch.float32)
        with caplog.at_level(logging.WARNING, "autospec"):
            upkeep.before_request()
        assert "out of memory" in caplog.text
        assert upkeep.costs.verify_seconds(1, 100) == pytest.approx(0.040)

    def test_a_wrapped_model_teaches_its_costs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[BlockOutcome] = []
        monkeypatch.setattr(CostModel, "observe", lambda self, outcome: seen.append(outcome))
        target = tiny.llama()
        with autospec.wrap(target, drafts=["ngram"]) as wrapped:
            target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
            assert wrapped.last_request is not None
            assert len(seen) == wrapped.last_request.blocks > 0
            target.to(torch.float32)
            place = wrapped._upkeep._place  # type: ignore[union-attr]
            target.generate(tiny.prompt(20), max_new_tokens=3, do_sample=False)
            assert wrapped._upkeep._place != place  # type: ignore[union-attr]
