"""`autospec calibrate`: the table, the file, the plot, and errors in one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import tiny
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.costs import CostTable, Curve
from autospec.costs.plot import page, panel, sparkline


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AUTOSPEC_COSTS", str(tmp_path / "costs"))
    folder = tmp_path / "model"
    tiny.llama().float().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(group, ["calibrate", *args], prog_name="autospec", auto_envvar_prefix="AUTOSPEC")
    return result.exit_code, result.stdout, result.stderr


def test_table_json_and_plot(target: str, tmp_path: Path) -> None:
    plot = tmp_path / "costs.html"
    code, out, err = run("--target", target, "--dtype", "float32", "--plot", str(plot))
    assert code == 0, err
    assert "verification, milliseconds by tokens verified" in out
    assert "ngram, milliseconds by tokens drafted" in out
    assert re.search(r"(kept in .*\.json|not kept on disk)", out)
    assert plot.read_text(encoding="utf-8").count("<svg") == 3
    code, out, _ = run("--target", target, "--dtype", "float32", "--json", "--fresh", "--drafts", "ngram")
    assert code == 0
    found = json.loads(out)
    assert found["is_from_disk"] is False
    assert list(found["drafts"]) == ["ngram"]
    assert found["verify"]["tokens"][0] == 1


def test_backend(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` prepares, times what was prepared, and keeps it apart; here nothing is really compiled."""
    from autospec.backends.plain import PlainRunner

    class Pretended(PlainRunner):
        name = "inductor"

    monkeypatch.setattr("autospec.backends.making.InductorRunner", Pretended)
    monkeypatch.setattr("autospec.backends.making.COMPILED_CAPACITIES", (128, 256))
    # a busy machine's costs are not kept, and this is about where they are
    monkeypatch.setattr("autospec.costs.measuring.MOST_SPREAD", math.inf)
    monkeypatch.setattr("autospec.costs.measuring._is_upside_down", lambda table: False)
    files = []
    for backend, name in (("eager", "eager"), ("compile", "inductor")):
        code, out, err = run("--target", target, "--dtype", "float32", "--json", "--backend", backend)
        assert code == 0, err
        assert f"backend: {name} (" in err
        assert json.loads(out)["backend"] == name
        files.append(Path(json.loads(out)["file"]))
    assert files[0] != files[1]
    assert all(file.is_file() for file in files)


def test_used_wrongly(target: str, tmp_path: Path) -> None:
    code, _, err = run("--target", target, "--plot", str(tmp_path / "costs.png"))
    assert code == 2
    assert ".html" in err
    (tmp_path / "file").touch()
    for folder in ("missing", "file"):
        code, _, err = run("--target", target, "--plot", str(tmp_path / folder / "costs.html"))
        assert code == 2
        assert folder in err
        assert "loading" not in err
    for seconds in ("nan", "inf", "0"):
        code, _, err = run("--target", target, "--seconds", seconds)
        assert code == 2
        assert "--seconds" in err
        assert "loading" not in err
    code, _, err = run("--target", target, "--drafts", "nothing")
    assert code == 2
    assert "unknown draft source" in err


def test_plots() -> None:
    curve = Curve((10, 20), (1, 2), ((1.0, 2.0), (1.5, 2.5)), frozenset({(20, 2)}))
    assert panel(curve, "a < b").count("<circle") == 3  # what was composed has no dot
    assert "a &lt; b" in page(CostTable((1,), curve, {}), "a < b")
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_help() -> None:
    code, out, _ = run("--help")
    assert code == 0
    shown = out.replace("\n", "").replace(" ", "")
    command = group.get_command(None, "calibrate")  # type: ignore[arg-type]
    assert command is not None
    options = [each for each in command.params if each.name != "help"]
    assert all(each.help for each in options)  # type: ignore[attr-defined]
    assert shown.count("envvar:AUTOSPEC_CALIBRATE_") == len(options)
