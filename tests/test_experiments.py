"""What experiments share: prompts are asked for in one line, scripts find one another, noise passes no bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What a script changes of the way to modules is set back."""
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    monkeypatch.delenv("AUTOSPEC_PROMPTS", raising=False)
    import common

    yield common
    sys.path[:] = path


def asked(common: ModuleType, *arguments: str) -> Path:
    parser = argparse.ArgumentParser(prog="run.py")
    common.add_prompts(parser)
    options = parser.parse_args(arguments)
    common.need_prompts(parser, options.prompts)
    found: Path = options.prompts
    return found


def test_a_file_of_prompts_is_an_option_or_from_the_environment(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.touch()
    other.touch()
    assert asked(common, "--prompts", str(one)) == one
    monkeypatch.setenv("AUTOSPEC_PROMPTS", str(other))
    assert asked(common) == other
    assert asked(common, "--prompts", str(one)) == one


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "error: no prompts: give --prompts FILE or set AUTOSPEC_PROMPTS: questions of Spec-Bench, JSON lines"),
        (("--prompts", "nowhere.jsonl"), "error: --prompts nowhere.jsonl: no such file; wanted are questions of"),
    ],
)
def test_without_it_one_line_says_what_is_wanted(
    common: ModuleType, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        asked(common, *arguments)
    assert raised.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ")
    assert said in line
    assert "question_id, segment and turns" in line


def test_every_script_that_takes_prompts_looks_for_them() -> None:
    scripts = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*/*.py")}
    taking = [text for text in scripts.values() if "add_prompts(parser)" in text]
    assert len(taking) >= 8
    assert all("need_prompts(parser, " in text for text in taking)
    assert [path for path, text in scripts.items() if "spec_bench.jsonl" in text.split('"""', 2)[2]] == []


@pytest.mark.parametrize(("folder", "bar", "over"), [("21_off_is_free", 1.0, "met"), ("22_micro", 2.0, "missed")])
def test_what_noise_could_have_made_is_undecided(common: ModuleType, folder: str, bar: float, over: str) -> None:
    module = common.script(folder)
    assert common.script(folder) is module
    names = list(module.Row.__dataclass_fields__)

    def verdict(ratio: float, low: float, high: float) -> str:
        values = {**dict.fromkeys(names, 0), "ratio": bar * ratio, "low": bar * low, "high": bar * high}
        found: str = module.Row(**values).verdict
        return found

    under = {"met": "missed", "missed": "met"}[over]
    assert verdict(1.05, 1.02, 1.1) == over
    assert verdict(0.95, 0.9, 0.98) == under
    assert verdict(1.05, 0.99, 1.1) == verdict(0.99, 0.9, 1.01) == "undecided"
