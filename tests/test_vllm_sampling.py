"""How requests are sampled is read off what calls the proposer, and unknown where that shows nothing."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autospec.costs.batches import BatchCosts
from autospec.integrations.vllm import Proposer, proposer
from autospec.integrations.vllm.sampling import GREEDY, UNKNOWN, Rows, rows_of_caller
from autospec.telemetry import Store
from tests.vllm_driver import Asked, Engine, config, cycle


class Runner:
    """A model runner with one row of each kind."""

    def __init__(self, **changes: Any) -> None:
        self.input_batch = SimpleNamespace(
            temperature_cpu=np.array([0.0, 0.8, 1.0, -1.0, np.nan], dtype=np.float32),
            top_p_cpu=np.array([1.0, 0.95, 1.0, 1.0, 1.0], dtype=np.float32),
            top_k_cpu=np.array([100, 100, 20, 100, 100], dtype=np.int32),
            repetition_penalties_cpu=np.array([1.0, 1.0, 1.1, 1.0, 1.0], dtype=np.float32),
            vocab_size=100,
        )
        vars(self.input_batch).update(changes)

    def rows(self) -> Rows | None:
        return rows_of_caller(inspect.currentframe())


def test_rows_are_read_as_vllm_keeps_them() -> None:
    runner = Runner()
    rows = runner.rows()
    assert rows is not None
    assert rows(0) == GREEDY
    assert (rows(1).do_sample, rows(1).temperature) == (True, 0.8)
    assert rows(1).decoding == "sample temperature=0.8 top_p=0.95"
    assert rows(2).decoding == "sample top_k=20 repetition_penalty=1.1"
    assert rows(2).temperature == 1.0
    assert [rows(row) for row in (3, 4, 5)] == [UNKNOWN] * 3
    runner.input_batch = Runner(temperature_cpu=np.zeros(1, dtype=np.float32)).input_batch  # made anew
    assert rows(0) == GREEDY
    assert rows(1) == UNKNOWN
    del runner
    assert rows(0) == UNKNOWN


def test_what_is_neutral_is_left_out() -> None:
    runner = Runner(top_k_cpu=None, repetition_penalties_cpu=np.array([1.2, 0.0, 1.0], dtype=np.float32))
    rows = runner.rows()
    assert rows is not None
    assert [rows(row).decoding for row in range(3)] == [
        "greedy repetition_penalty=1.2",
        "sample temperature=0.8 top_p=0.95",
        "sample",
    ]
    assert [rows(row).do_sample for row in range(3)] == [False, True, True]
    runner.input_batch.repetition_penalties_cpu = [1.5] * 3  # no column
    assert rows(0) == GREEDY


class Slotted:
    """Of a class without weak references."""

    __slots__ = ("input_batch",)

    def __init__(self) -> None:
        self.input_batch = Runner().input_batch

    def rows(self) -> Rows | None:
        return rows_of_caller(inspect.currentframe())


class Failing:
    @property
    def input_batch(self) -> Any:
        raise RuntimeError("planted")

    def rows(self) -> Rows | None:
        return rows_of_caller(inspect.currentframe())


def test_whatever_calls_looking_at_it_raises_nothing() -> None:
    assert Slotted().rows() is None
    assert Failing().rows() is None


@pytest.mark.parametrize("shown", [None, [0.0], np.zeros((2, 2)), np.array(["a"])])
def test_a_batch_of_another_shape_shows_nothing(shown: Any) -> None:
    assert Runner(temperature_cpu=shown).rows() is None
    rows = Runner().rows()
    assert rows is not None


def test_a_call_may_be_wrapped() -> None:
    def called(depth: int) -> Rows | None:
        return called(depth - 1) if depth else rows_of_caller(inspect.currentframe())

    class Calling(Runner):
        def call(self, depth: int) -> Rows | None:
            return called(depth)

    calling = Calling()
    assert [calling.call(depth) is not None for depth in range(5)] == [True, True, True, False, False]


def test_a_function_that_calls_shows_nothing() -> None:
    assert rows_of_caller(inspect.currentframe()) is None
    assert rows_of_caller(None) is None


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "tokenizer_of", lambda config: None)


def records_of(engine: Engine, made: Proposer, url: str) -> dict[str, tuple[bool, str]]:
    """Of one greedy and one sampled request: what was recorded, by segment."""
    engine.add(
        Asked("greedy", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4)),
        Asked("sampled", [5, 6, 7, 8, 5], cycle(5, 6, 7, 8), temperature=0.8),
    )
    engine.run()
    made.close()
    with Store(url, readonly=True) as store:
        return {record.segment: (record.do_sample, record.decoding) for record in store.requests()}


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Proposer, str]:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[segments.rules]]\nname = "plainly"\ndo_sample = false\n'
        '[[segments.rules]]\nname = "by-chance"\ndo_sample = true\n'
    )
    url = f"sqlite:///{tmp_path}/store.db"
    for name, value in {"STORE": url, "SEGMENTS": str(rules), "POLICY": "fixed:ngram:4"}.items():
        monkeypatch.setenv(f"AUTOSPEC_VLLM_{name}", value)
    made = Proposer(config())
    made.load_model(torch.nn.Linear(4, 4))
    return made, url


def test_records_and_segments_say_how_a_request_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, url = make(tmp_path, monkeypatch)
    found = records_of(Engine(made.propose), made, url)
    assert found == {"plainly": (False, "greedy"), "by-chance": (True, "sample temperature=0.8")}


def test_an_engine_that_shows_nothing_is_served_as_one_that_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, url = make(tmp_path, monkeypatch)
    engine = Engine(made.propose)
    del engine.input_batch.temperature_cpu
    engine.input_batch.__dict__["temperature_cpu"] = {}  # the driver writes to it
    assert records_of(engine, made, url) == {"by-chance": (True, UNKNOWN.decoding)}


def test_steps_in_which_any_request_is_sampled_are_priced_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = make(tmp_path, monkeypatch)
    engine = Engine(made.propose)
    engine.add(*(Asked(f"{i}", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), temperature=0.8 * i) for i in range(2)))
    engine.run()
    costs = made._costs
    assert costs.points(is_sampled=True)
    assert not costs.points()
    made.close()


def test_sampled_steps_cost_what_they_were_seen_to_cost() -> None:
    costs = BatchCosts((1, 2, 4, 8), ["ngram"])
    for is_sampled, slope in ((False, 0.001), (True, 0.01)):
        costs.serve(4, is_sampled=is_sampled)
        if is_sampled:
            assert costs.step_seconds(20) == pytest.approx(0.05 + 0.02, rel=0.02)  # nothing better is known
        for _ in range(32):
            for width in (4, 8, 20):
                costs.observe(width, 0.05 + slope * width)
    version = costs.version
    assert costs.step_seconds(20) == pytest.approx(0.05 + 0.2, rel=0.02)
    costs.serve(4)
    assert costs.version > version
    assert costs.step_seconds(20) == pytest.approx(0.05 + 0.02, rel=0.02)
    assert [tokens for tokens, _ in costs.points(is_sampled=True)] == [4, 8, 20]
