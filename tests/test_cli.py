"""The command line: help, exit codes, one-line errors, environment variables, JSON on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from autospec.cli.main import _COMMANDS, group
from autospec.telemetry.store import Store
from autospec.types import PhaseSeconds, RequestRecord


def run(*args: str, **env: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(group, list(args), env=env, prog_name="autospec", auto_envvar_prefix="AUTOSPEC")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/a.db"
    with Store(url) as opened:
        opened.add(
            [
                RequestRecord(
                    request_id=f"{number:032x}",
                    started_at=datetime.now(UTC),
                    segment="code",
                    policy="off" if number % 2 else "auto",
                    is_control=bool(number % 2),
                    do_sample=False,
                    decoding="greedy",
                    prompt_tokens=10,
                    output_tokens=20,
                    seconds=PhaseSeconds(prefill=0.1, verify=0.4 + 0.4 * (number % 2)),
                    run=f"run-{number // 4}",
                )
                for number in range(8)
            ]
        )
    return url


class TestHelp:
    def test_group_lists_every_command_with_a_line(self) -> None:
        code, out, _ = run("--help")
        assert code == 0
        for name in _COMMANDS:
            assert f"\n  {name} " in out

    @pytest.mark.parametrize(
        "args",
        [
            ["certify"],
            ["corpus"],
            ["corpus", "add"],
            ["demo"],
            ["drafts"],
            ["drafts", "bench"],
            ["report"],
            ["metrics"],
            ["models"],
            ["models", "fetch"],
            ["segments"],
            ["segments", "explain"],
            ["segments", "fit"],
            ["verify"],
            ["version"],
        ],
        ids=" ".join,
    )
    def test_every_option_has_help_and_an_environment_variable(self, args: list[str]) -> None:
        command = group
        for name in args:
            command = (
                command.commands[name] if name in getattr(command, "commands", {}) else command.get_command(None, name)
            )  # type: ignore[arg-type, assignment, union-attr]
        assert command.help
        for option in command.params:
            if option.param_type_name == "option":
                assert option.help, option.name  # type: ignore[attr-defined]
        code, out, _ = run(*args, "--help")
        assert code == 0
        assert out.startswith("Usage: autospec " + " ".join(args))
        if args[0] in ("certify", "demo", "report", "verify"):
            prefix = "_".join(["AUTOSPEC", *args]).upper()
            assert out.replace("\n", "").replace(" ", "").count(f"envvar:{prefix}_") >= len(
                [p for p in command.params if p.name != "help"]
            )

    def test_readme_names_every_command(self) -> None:
        text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
        for name in _COMMANDS:
            assert f"`autospec {name}" in text


class TestReport:
    def test_table_and_json_say_the_same(self, store: str) -> None:
        code, text, _ = run("report", "--store", store)
        assert code == 0
        assert "code" in text
        code, out, _ = run("report", "--store", store, "--json")
        assert code == 0
        row = json.loads(out)["segments"][0]
        assert row["speed_up"] == pytest.approx(1.8)
        assert "1.80" in text

    def test_environment_variables(self, store: str) -> None:
        code, out, _ = run("report", AUTOSPEC_REPORT_STORE=store, AUTOSPEC_REPORT_JSON="1", AUTOSPEC_REPORT_RUN="last")
        assert code == 0
        assert json.loads(out)["all"]["requests"] == 2

    def test_html(self, store: str, tmp_path: Path) -> None:
        page = tmp_path / "report.html"
        assert run("report", "--store", store, "--html", str(page))[0] == 0
        assert page.read_text(encoding="utf-8").startswith("<!")

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--store", "sqlite:///{tmp}/none.db"], "none.db"),
            (["--store", "mysql://x/y"], "mysql"),
            (["--store", "{store}", "--run", "nope"], "run 'nope' is not in"),
            (["--store", "{store}", "--by", "colour"], "--by colour: known are segment, decoding, policy, device"),
        ],
    )
    def test_errors_are_one_line(self, args: list[str], message: str, store: str, tmp_path: Path) -> None:
        filled = [a.format(tmp=tmp_path, store=store) for a in args]
        code, out, err = run("report", *filled)
        assert code == (1 if "none.db" in message else 2)
        assert out == ""
        assert err.startswith("Error: ")
        assert err.count("\n") == 1
        assert message in err
        assert not (tmp_path / "none.db").exists()

    def test_a_page_that_cannot_be_written_costs_no_table(self, store: str) -> None:
        code, out, err = run("report", "--store", store, "--html", "/proc/none/a.html")
        assert code == 1
        assert "code" in out
        assert "cannot write /proc/none/a.html" in err

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--policy", "nope"], "unknown policy 'nope'"),
            (["--policy", "fixed:assistant:2"], "needs draft source 'assistant'"),
            (["--html", "/proc/none/a.html"], "cannot write"),
            (["--store", "sqlite:////proc/none/a.db"], "/proc/none"),
        ],
    )
    def test_the_demonstration_refuses_before_it_works(self, args: list[str], message: str, tmp_path: Path) -> None:
        defaults = ["--store", f"sqlite:///{tmp_path}/d.db", "--html", f"{tmp_path}/d.html", "--target", "/no/model"]
        code, _, err = run("demo", *defaults, *args)
        assert code in (1, 2)
        assert message in err
        assert "loading" not in err

    @pytest.mark.parametrize(
        "args", [["report"], ["report", "--colour"], ["nope"], ["demo", "--limit", "0"]], ids=" ".join
    )
    def test_usage_errors_exit_2(self, args: list[str]) -> None:
        assert run(*args)[0] == 2


class TestProcess:
    def test_console_script_and_debug(self, tmp_path: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        call = [sys.executable, "-c", "from autospec.cli import main; main()"]
        plain = subprocess.run([*call, "report", "--store", "x"], capture_output=True, text=True, env=env, check=False)
        assert (plain.returncode, plain.stdout) == (2, "")
        assert "Traceback" not in plain.stderr
        debug = subprocess.run(
            [*call, "--debug", "report", "--store", "x"], capture_output=True, text=True, env=env, check=False
        )
        assert debug.returncode != 0
        assert "Traceback" in debug.stderr

    def test_version(self) -> None:
        code, out, _ = run("version", "--json")
        assert code == 0
        assert set(json.loads(out)) >= {"python", "autospec-decoding", "torch", "transformers"}
        assert "torch" in run("version")[1]
