"""experiments/25_gpu on the CPU, with tiny shapes, through its command line and without what a bare machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from autospec.decoding import decoder
from autospec.decoding.selection import Greedy, Selection
from autospec.drafts.early_exit import first_layers_of

FOLDER = Path(__file__).parent.parent / "experiments" / "25_gpu"
MODULES = ("budget", "exactness", "foretelling", "phases", "playing", "processing", "report", "run", "shapes", "timing")
ABSENT = [
    "accelerate",
    "alembic",
    "click",
    "gguf",
    "jinja2",
    "optuna",
    "plotly",
    "prometheus_client",
    "pyarrow",
    "sqlalchemy",
    "starlette",
    "tomli_w",
    "uvicorn",
    "zstandard",
]
HIDING = f"""
from importlib.machinery import PathFinder

absent, find = {ABSENT!r}, PathFinder.find_spec


def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in absent else find(name, path, target)


PathFinder.find_spec = find_spec
"""


class Bare(NamedTuple):
    """A machine without the packages above, and a folder to work in."""

    folder: Path

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    def script(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python(str(FOLDER / "run.py"), "--out", str(self.folder / "out"), *arguments)

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / "results.json").read_text(encoding="utf-8"))
        return found


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    (tmp_path / "sitecustomize.py").write_text(HIDING, encoding="utf-8")
    return Bare(tmp_path)


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    """The script's modules, which find each other in its own folder."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield {name: import_module(name) for name in MODULES}
    sys.path[:] = before
    for name in MODULES:
        del sys.modules[name]


def test_a_run_on_the_cpu(bare: Bare) -> None:
    run = bare.script("--device", "cpu", "--shapes", "tiny", "--quick", "--backends", "eager", "--minutes", "4")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FAIL" not in run.stdout + run.stderr
    results = bare.results()
    assert results["is_smoke_test"]
    assert "say nothing about a GPU" in results["says"]
    assert not results["failures"]
    assert all(check["is_ok"] for check in results["checks"])
    target = results["targets"]["tiny"]
    assert [(cell["prompt"], cell["context"], cell["wanted_agreement"]) for cell in target["cells"]] == [
        ("random", 32, 0.8),
        ("random", 64, 0.8),
        ("repetitive", 32, 0.8),
        ("random", 32, 0.6),
    ]
    for cell in target["cells"]:
        arms = {arm["arm"]: arm for arm in cell["arms"]}
        assert {"plain", "eager off", "eager auto"} < set(arms)
        assert all(len(arm["seconds"]) == cell["rounds"] == 2 for arm in arms.values())
        assert arms["plain"]["speed_up"] == 1.0
        assert arms["eager off"]["acceptance"] is None
        for arm in arms.values():
            assert f" {arm['arm']} " in run.stdout
    assistant = next(a for a in target["cells"][0]["arms"] if a["arm"] == "eager assistant:4")
    assert assistant["acceptance"] > 0.0
    assert set(target["costs"]["eager"]["errors"]) == {"verify", "assistant", "early_exit", "ngram"}
    assert target["bandwidth"]["share"] > 0.0
    assert any("synchronisations" in text for text in results["left_out"])
    assert not list((bare.folder / "out").glob("*.partial"))


def test_without_what_it_must_not_need(bare: Bare) -> None:
    for name in ABSENT:
        assert "ModuleNotFoundError" in bare.python("-c", f"import {name}").stderr


def test_the_time_is_kept(bare: Bare) -> None:
    """A run that is cut off says where, and leaves what it has."""
    run = bare.script("--device", "cpu", "--quick", "--minutes", "0.1")
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "0.1 minutes were over" in run.stdout
    assert bare.results()["left_out"]


def test_without_a_gpu(bare: Bare) -> None:
    run = bare.script("--device", "cuda")
    assert run.returncode == 2
    assert "--device cuda: PyTorch" in run.stderr
    assert "cannot use a GPU here" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (bare.folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "70b"], "'70b': known are 7b, 1b, 13b, tiny"),
        (["--backends", "triton"], "'triton': known are eager, compile, plain"),
        (["--minutes", "0"], "from 0.1 to 600"),
    ],
)
def test_what_cannot_begin(
    parts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        parts["run"].main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


class TestShapes:
    def test_the_draft_is_inside_the_target(self, parts: dict[str, ModuleType]) -> None:
        shapes = parts["shapes"]
        pair = shapes.build(shapes.SMALL, torch.device("cpu"), torch.float64)
        assert pair.embedding_error < 1e-12
        assert pair.entropy == pytest.approx(shapes.ENTROPY, abs=0.05)
        shapes.disturb(pair.target, pair.shape, 0.5, seed=0)
        text = shapes.some_tokens(pair, 64, 3)
        ours, whole, first = (
            model(input_ids=text, use_cache=False).logits
            for model in (pair.draft, pair.target, first_layers_of(pair.target, pair.shape.draft_layers))
        )
        assert torch.allclose(ours, first, atol=1e-10)
        assert not torch.allclose(ours, whole, atol=0.1)

    @pytest.mark.parametrize("wanted", [0.8, 0.6])
    def test_agreement_is_as_wanted(self, parts: dict[str, ModuleType], wanted: float) -> None:
        shapes = parts["shapes"]
        pair = shapes.build(shapes.SHAPES["tiny"], torch.device("cpu"), torch.bfloat16)
        pair.set_agreement(wanted)
        assert pair.agreement == pytest.approx(wanted, abs=0.03)

    def test_sizes(self, parts: dict[str, ModuleType]) -> None:
        """A quarter of everything, with the same heads to a key; so the draft fits."""
        shapes = parts["shapes"]
        for shape in (*shapes.SHAPES.values(), shapes.SMALL, shapes.FEW_TOKENS):
            draft = shape.draft()
            for name in ("hidden", "heads", "kv_heads", "intermediate"):
                assert getattr(draft, name) * shapes.NARROW == getattr(shape, name)
            assert draft.head_dim == shape.head_dim
            assert 0 < draft.layers < shape.layers
            longest = max(shape.contexts)
            assert longest + shape.new_tokens + 16 < shape.window
            pair = SimpleNamespace(shape=shape, device=torch.device("cpu"))
            assert shapes.some_tokens(pair, longest, 0).shape == (1, longest)


class EverythingAccepted(Greedy):
    """A planted fault."""

    def select(self, scores: torch.Tensor, draft_tokens: Any, draft_probs: Any) -> Selection:
        tokens = [*draft_tokens, *super().select(scores[-1:], [], None).tokens]
        return Selection(tokens[: len(scores)], min(len(draft_tokens), len(scores)))


class TestChecksCanFail:
    def test_greedy_text(self, parts: dict[str, ModuleType]) -> None:
        shapes, exactness = parts["shapes"], parts["exactness"]
        pair = shapes.build(shapes.FEW_TOKENS, torch.device("cpu"), torch.float32)
        pair.set_agreement(0.5)
        stage = parts["playing"].Stage(pair)
        stage.open("eager")
        with mock.patch.object(decoder, "make_rule", return_value=EverythingAccepted()):
            found = exactness.same_text(stage, 16, 1, lambda: True)
        stage.close()
        greedy, *_ = exactness.checks_of_text(found)
        assert not greedy.is_ok
        row = next(row for row in found["rows"] if row["arm"] == "eager assistant:4" and row["mode"] == "greedy")
        assert row["same"] == 0

    def test_answers_in_bfloat16(self, parts: dict[str, ModuleType]) -> None:
        arms = [{"arm": "plain"}, {"arm": "eager off", "verdicts": {"identical": 1, "tie": 2}, "troubles": []}]
        assert all(check.is_ok for check in parts["phases"]._checks_of_cell("cell", {"arms": arms}))
        arms[1]["verdicts"] = {"identical": 1, "different": 1}
        ties, _ = parts["phases"]._checks_of_cell("cell", {"arms": arms})
        assert not ties.is_ok
        assert ties.shown == "1 identical, 1 different"

    def test_a_phase_that_fails(self, parts: dict[str, ModuleType], tmp_path: Path) -> None:
        options = mock.Mock(device="cpu", quick=True, out=tmp_path, shapes=["tiny"], backends=["eager"], minutes=8.0)
        run = parts["phases"].Run(options, parts["budget"].Clock(8.0))
        run.check([parts["exactness"].Check("one", True, "")])
        assert run.is_fine
        with run.phase("one that fails"):
            raise ValueError("it failed")
        assert not run.is_fine
        assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["failures"] == [
            "one that fails: ValueError: it failed"
        ]


def test_synchronisations_are_counted(parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch says on CUDA is said here by every answer of the wrapped model, once a token and once besides."""
    shapes, timing = parts["shapes"], parts["timing"]
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    stage = parts["playing"].Stage(shapes.build(shapes.FEW_TOKENS, torch.device("cpu"), torch.float32), has_auto=True)
    stage.open("eager")
    answer = stage.answer

    def speaking(arm: Any, prompt: torch.Tensor, new_tokens: int) -> Any:
        for _ in range(new_tokens + 1):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
        return answer(arm, prompt, new_tokens)

    monkeypatch.setattr(stage, "answer", speaking)
    rows = timing.synchronisations(stage, 8, 16)
    stage.close()
    assert [row["per_token"] for row in rows] == [1.0] * 6
    by_arm = {row["arm"]: row["per_block"] for row in rows}
    assert by_arm["plain"] == by_arm["eager off"] == 1.0
    assert by_arm["eager assistant:4"] > 1.0  # several tokens a block
    assert modes == ["warn", "default"] * 12


def test_intervals(parts: dict[str, ModuleType]) -> None:
    median, low, high = parts["timing"].ratio([2.0, 2.2, 1.8, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert median == 2.0
    assert 1.8 <= low <= median <= high <= 2.2
    assert parts["timing"].ratio([1.0, 3.0], [1.0, 3.0]) == (1.0, 1.0, 1.0)
