"""experiments/01_worked_examples: runs, reproduces its results, and notices a wrong rule."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

Dist = tuple[Fraction, ...]
FOLDER = Path(__file__).parent.parent / "experiments" / "01_worked_examples"


@pytest.fixture
def worked_examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("worked_examples_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_script_holds_and_reproduces_the_committed_results(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FAIL" not in run.stdout
    results = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert results == (FOLDER / "results.json").read_text(encoding="utf-8")
    checks = sum(len(section["checks"]) for section in json.loads(results)["sections"])
    assert run.stdout.count("\nok ") == checks


def test_readme_shows_the_results() -> None:
    rows = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    sections = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["sections"]
    expected = [f"| {check['name']} | {check['shown']} |" for section in sections for check in section["checks"]]
    assert [row for row in rows if row.startswith("|") and row not in ("| check | value |", "|---|---|")] == expected


def _normalised(weights: list[Fraction]) -> Dist:
    return tuple(weight / sum(weights) for weight in weights)


def _upside_down(p: Dist, q: Dist) -> Dist:
    return tuple(min(Fraction(1), b / a) if a else Fraction(1) for a, b in zip(p, q, strict=True))


def _swapped(p: Dist, q: Dist) -> Dist:
    return _normalised([max(Fraction(0), b - a) for a, b in zip(p, q, strict=True)])


FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "residual forgotten, p instead": ("residual", lambda p, q: p),
    "residual of q over p": ("residual", _swapped),
    "everything accepted": ("acceptance", lambda p, q: tuple(Fraction(1) for _ in p)),
    "ratio upside down": ("acceptance", _upside_down),
    "bonus token not counted": ("expected_committed", lambda a, k: sum(a**j for j in range(1, k + 1))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_noticed(
    fault: str,
    worked_examples: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(worked_examples, name, wrong)
    assert worked_examples.main(["--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("FAIL ")
    assert captured.err.splitlines()[0] in captured.out
    assert not (tmp_path / "results.json").exists()


def test_unfaulted_module_passes(worked_examples: ModuleType, tmp_path: Path) -> None:
    assert worked_examples.main(["--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_exact_rule_gives_the_target_whatever_the_draft(worked_examples: ModuleType, seed: int) -> None:
    p = _normalised([Fraction((seed * 7 + 3 * i * i + i) % 11) for i in range(5)])
    q = _normalised([Fraction((seed * 5 + 2 * i) % 7 + 1) for i in range(5)])
    assert worked_examples.speculative_output(p, q) == p
    assert worked_examples.total_acceptance(p, q) == sum(map(min, p, q))


def test_expected_committed_is_one_plus_the_survivals(worked_examples: ModuleType) -> None:
    for rate in (Fraction(0), Fraction(1, 3), Fraction(4, 5), Fraction(1)):
        assert worked_examples.expected_committed(rate, 5) == 1 + sum(rate**j for j in range(1, 6))
