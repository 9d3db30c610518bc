"""What steps cost, greedy and sampled, on the way into the store and out of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autospec.controller import Controller
from autospec.costs.batches import SAMPLED, BatchCosts
from autospec.errors import ConfigurationError, StoreError
from autospec.export.batch_sizes import measured_steps
from autospec.integrations.vllm.telemetry import EngineTelemetry
from autospec.policies.fixed import Fixed
from autospec.telemetry import Recorder, Store, calibrations
from autospec.telemetry.calibrations import newest_steps
from autospec.telemetry.dashboard.segment import ActionSums, Position, _predict
from autospec.types import CalibrationSample, Deployment

HERE = Deployment("host", "vllm: cpu", "model", "float32", ("ngram",), {})
GREEDY_STEPS, SAMPLED_STEPS = {1: 0.05, 9: 0.08}, {1: 0.06, 9: 0.2}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def engine(url: str) -> EngineTelemetry:
    policy = Fixed()
    return EngineTelemetry(url, HERE, policy, Controller(policy, None))


def note(url: str, *, greedy: bool = True, sampled: bool = True) -> None:
    """An engine that saw steps of these kinds, until it ended."""
    costs = BatchCosts((1, 2, 4, 8), ["ngram"])
    for is_sampled, points in ((False, GREEDY_STEPS if greedy else {}), (True, SAMPLED_STEPS if sampled else {})):
        costs.serve(1, is_sampled=is_sampled)
        for _ in range(16):
            for tokens, seconds in points.items():
                costs.observe(tokens, seconds)
    telemetry = engine(url)
    telemetry.note_costs(costs)
    telemetry.close()


def stored(url: str, source: str) -> dict[int, float]:
    with Store(url, readonly=True) as store:
        return dict(newest_steps(store, source))


@pytest.mark.parametrize(("greedy", "sampled"), [(True, True), (True, False), (False, True)])
def test_each_kind_is_stored_under_its_own_name_alone(url: str, greedy: bool, sampled: bool) -> None:
    note(url, greedy=greedy, sampled=sampled)
    assert stored(url, "target") == pytest.approx(GREEDY_STEPS if greedy else {})
    assert stored(url, SAMPLED) == pytest.approx(SAMPLED_STEPS if sampled else {})
    found = engine(url)
    assert dict(found.known_steps[False]) == pytest.approx(GREEDY_STEPS if greedy else {})
    assert dict(found.known_steps[True]) == pytest.approx(SAMPLED_STEPS if sampled else {})
    found.close()


def test_one_kind_that_cannot_be_read_loses_not_the_other(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    note(url)

    def failing(store: Any, source: str, **named: Any) -> Any:
        if source != SAMPLED:
            raise StoreError("planted")
        return newest_steps(store, source, **named)

    monkeypatch.setattr(calibrations, "newest_steps", failing)
    found = engine(url)
    assert list(found.known_steps) == [True]
    assert dict(found.known_steps[True]) == pytest.approx(SAMPLED_STEPS)
    assert caplog.text.count("what steps cost other engines could not be read: planted") == 1
    found.close()


def test_draft_lengths_by_batch_size_go_by_sampled_steps_where_there_are_no_greedy_ones(url: str) -> None:
    note(url, greedy=False)
    with Store(url, readonly=True) as store:
        assert measured_steps(store)(9) == pytest.approx(0.2)
    note(url)
    with Store(url, readonly=True) as store:
        assert measured_steps(store)(9) == pytest.approx(0.08)


def test_where_no_engine_told_of_either_it_is_said(url: str) -> None:
    with Recorder(url) as recorder:
        recorder.note(CalibrationSample(HERE, datetime.now(UTC), SAMPLED, 1, 0, 0.05))
    with Store(url, readonly=True) as store, pytest.raises(ConfigurationError, match="no engine has told"):
        measured_steps(store)


def test_the_dashboard_predicts_from_sampled_steps_where_there_are_no_greedy_ones() -> None:
    survival = {"ngram": [Position(1, 100, 80, 0.8)]}
    actions = [ActionSums("ngram", 1, 100, 100, 80, 180, 0.1, 6.0, 0.0)]
    greedy, sampled, drafts = {1: 0.05, 2: 0.06}, {1: 0.06, 2: 0.08}, {"ngram": {1: 0.001}}
    by_sampled = {
        (each.source, each.block_length): each.goodput
        for each in _predict(survival, actions, {SAMPLED: sampled, **drafts})
    }
    assert by_sampled == pytest.approx({("ngram", 1): 1.8 / 0.081, ("none", 0): 1.0 / 0.06})
    both = _predict(survival, actions, {"target": greedy, SAMPLED: sampled, **drafts})
    assert both == _predict(survival, actions, {"target": greedy, **drafts})
    assert _predict(survival, actions, drafts) == []
