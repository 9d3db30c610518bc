"""Measured costs on disk: found again where everything is the same, and never trusted blindly."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from autospec.costs import CostTable, Curve
from autospec.costs.cache import costs_file, costs_folder, load, save
from autospec.costs.fingerprint import describe, digest
from autospec.costs.measuring import measure
from autospec.drafts import Assistant, Blend, NGram, Suffix

CURVE = Curve((10, 20), (1, 2), ((1.0, 2.0), (1.5, 2.5)), frozenset({(20, 2)}))
TABLE = CostTable((1,), CURVE, {"ngram": CURVE}, measured_at="2026-01-02T03:04:05+00:00", calibration_seconds=3.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSPEC_COSTS", str(tmp_path / "costs"))
    return tmp_path / "costs"


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOSPEC_COSTS", "~/costs")
    assert costs_folder() == Path.home() / "costs"
    monkeypatch.delenv("AUTOSPEC_COSTS")
    monkeypatch.setenv("AUTOSPEC_CACHE", str(tmp_path))
    assert costs_folder() == tmp_path / "costs"
    monkeypatch.delenv("AUTOSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert costs_folder() == tmp_path / "x" / "autospec" / "costs"


def test_what_is_saved_is_loaded(folder: Path) -> None:
    path = save({"device": "a"}, TABLE)
    assert path == costs_file({"device": "a"})
    assert load({"device": "a"}) == TABLE
    assert load({"device": "b"}) is None
    assert [each.name for each in folder.iterdir()] == [path.name]  # nothing half written is left


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 2}', "NaN", "[" * 20_000],
    ids=["empty", "cut", "list", "null", "bare", "newer", "nan", "deep"],
)
def test_a_damaged_file_is_named_and_not_used(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save({"device": "a"}, TABLE)
    assert path is not None
    path.write_text(damage, encoding="utf-8")
    with caplog.at_level(logging.WARNING, "autospec"):
        assert load({"device": "a"}) is None
    assert path.name in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"block_lengths": [0, 1]},
        {"block_lengths": [-3, 1]},
        {"block_lengths": [1, 3_000_000]},
        {"measured_at": "2026-01-01T00:00:00"},
        {"measured_at": 5},
        {"calibration_seconds": 10**400},
        {"calibration_seconds": float("nan")},
        {"spread": float("inf")},
        {"verify": {"seconds": [[1.0, 10**400], [1.0, 2.0]]}},
        {"verify": {"seconds": [[1.0, 1e308], [1.0, 2.0]]}},
        {"verify": {"seconds": [[1e-320, 1.0], [1.0, 2.0]]}},
        {"verify": {"composed": [[float("inf"), 1]]}},
        {"verify": {"composed": [[10**400, 1, 2]]}},
        {"verify": {"contexts": [10, 10**400]}},
        {"verify": {"tokens": [-1, 2]}},
        {"drafts": None},
    ],
    ids=lambda change: f"{change!r:.50}",
)
def test_wrong_values_are_named_and_not_used(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    path = save({"device": "a"}, TABLE)
    assert path is not None
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, value in change.items():
        content["table"][name] = {**content["table"][name], **value} if name == "verify" else value
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load({"device": "a"}) is None
    assert path.name in caplog.text
    assert "measured again" in caplog.text


@pytest.mark.parametrize("variable", ["AUTOSPEC_COSTS", "AUTOSPEC_CACHE"])
def test_a_folder_of_nobody(variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("AUTOSPEC_COSTS")
    monkeypatch.setenv(variable, "~nobodyhere/x")
    assert load({"device": "a"}) is None
    assert save({"device": "a"}, TABLE) is None
    assert "~nobodyhere/x" in caplog.text


def test_bytes_that_are_no_text(caplog: pytest.LogCaptureFixture) -> None:
    path = save({"device": "a"}, TABLE)
    assert path is not None
    path.write_bytes(b"\xff\xfe\x00")
    assert load({"device": "a"}) is None


def test_a_file_of_another_device_under_this_ones_name(caplog: pytest.LogCaptureFixture) -> None:
    foreign = save({"device": "b"}, TABLE)
    assert foreign is not None
    foreign.rename(costs_file({"device": "a"}))
    assert load({"device": "a"}) is None
    assert "another device" in caplog.text


def test_a_folder_that_cannot_be_written_costs_no_calibration(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file", encoding="utf-8")
    assert save({"device": "a"}, TABLE) is None
    assert "cannot be kept" in caplog.text


def test_the_fingerprint_follows_what_seconds_depend_on() -> None:
    model = tiny.llama()
    small = tiny.near_copy(model)
    seen = {digest(describe(model, {}))}

    def is_new(target: Any, sources: Any) -> bool:
        found = digest(describe(target, sources))
        is_first = found not in seen
        seen.add(found)
        return is_first

    assert not is_new(tiny.llama(seed=7), {})  # other numbers of the same shape take the same time
    assert is_new(tiny.llama(dtype=torch.float32), {})
    assert is_new(tiny.llama(num_hidden_layers=1), {})
    assert is_new(tiny.llama(attn_implementation="eager"), {})
    assert is_new(model, {"ngram": NGram()})
    assert not is_new(model, {"ngram": NGram()})
    assert is_new(model, {"ngram": NGram(max_ngram=5)})
    assert is_new(model, {"suffix": Suffix()})
    assert is_new(model, {"assistant": Assistant(small)})
    assert is_new(model, {"assistant": Assistant(small, min_margin=0.2)})
    assert is_new(model, {"blend": Blend(Assistant(small))})
    assert is_new(model, {"blend": Blend(Assistant(small), [Suffix(), NGram()])})
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert is_new(model, {})
    finally:
        torch.set_num_threads(threads)
    json.dumps(describe(model, {"blend": Blend(Assistant(small))}))


class TestMeasure:
    def count(self, monkeypatch: pytest.MonkeyPatch, table: CostTable = TABLE) -> list[int]:
        calls: list[int] = []

        def calibrate(*args: Any, **options: Any) -> CostTable:
            calls.append(1)
            return table

        monkeypatch.setattr("autospec.costs.measuring.calibrate", calibrate)
        return calls

    def test_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.count(monkeypatch)
        first = measure(tiny.llama(), {"ngram": NGram()})
        second = measure(tiny.llama(), {"ngram": NGram()})
        assert len(calls) == 1
        assert not first.is_from_disk
        assert second.is_from_disk
        assert first.table == second.table
        assert first.path == second.path
        assert measure(tiny.llama(), {"ngram": NGram()}, fresh=True).is_from_disk is False
        assert len(calls) == 2

    def test_what_could_not_be_timed_is_tried_again(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        calls = self.count(monkeypatch)
        for _ in range(2):
            assert measure(tiny.llama(), {"ngram": NGram(), "suffix": Suffix()}).path is None
        assert len(calls) == 2
        assert not folder.exists()

    def test_a_noisy_calibration_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count(monkeypatch, CostTable((1,), CURVE, {}, spread=0.5))
        assert measure(tiny.llama(), {}).path is None


def test_where_a_model_lies_is_no_matter() -> None:
    here, there = tiny.llama(), tiny.llama()
    here.config._name_or_path, there.config._name_or_path = "/one/place/tiny", "/another/place/tiny"
    assert describe(here, {"assistant": Assistant(here)}) == describe(there, {"assistant": Assistant(there)})
