"""`autospec tune`: from a folder of traffic to a policy that `wrap` takes."""

from __future__ import annotations

import json
import signal
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import autospec
from autospec.cli.main import group
from autospec.errors import AutospecError
from autospec.scores.folder import ScoreFolder
from autospec.traffic import ShardWriter, Traffic, TrafficReader
from autospec.tune.search import Search
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny-target"
    tiny.tokenizer().save_pretrained(folder)
    tiny.llama(dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def traffic(model: str, tmp_path: Path) -> Path:
    target, tokenizer = autospec.models.load(model, dtype="float32")
    with autospec.wrap(target, tokenizer=tokenizer, policy="off", record=Traffic(tmp_path / "traffic")):
        for number in range(24):
            ids = torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4, 10 + number % 5]])
            options = {"do_sample": bool(number % 2), "max_new_tokens": 24}
            target.generate(ids, attention_mask=torch.ones_like(ids), segment=f"s{number % 2}", **options)
    return tmp_path / "traffic"


def run(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(group, [str(each) for each in args], prog_name="autospec", auto_envvar_prefix="AUTOSPEC")
    return done.exit_code, done.stdout, done.stderr


def tuned(traffic: Path, model: str, out: Path, *more: object) -> tuple[int, str, str]:
    return run("tune", traffic, "--target", model, "--dtype", "float32", "--out", out, "--trials", 6, *more)


def test_a_policy_is_found_and_used(traffic: Path, model: str, tmp_path: Path) -> None:
    out = tmp_path / "policy.toml"
    code, stdout, err = tuned(traffic, model, out)
    assert code == 0, err
    assert "24 requests walked, 0 left out" in stdout
    assert "held out" in stdout
    contents = tomllib.loads(out.read_text())
    assert contents["made"]["traffic"]["requests"] == 24
    assert {"ngram", "suffix", "ngram_pairs"} <= set(contents["made"]["drafts"])
    target, tokenizer = autospec.models.load(model, dtype="float32")
    prompt = torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    with autospec.wrap(target, tokenizer=tokenizer, drafts=["ngram", "suffix"], policy=f"tuned:{out}"):
        assert target.generate(prompt, max_new_tokens=20, do_sample=False).tolist() == plain.tolist()


def test_it_goes_on_with_scores_and_study(traffic: Path, model: str, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    first = json.loads(tuned(traffic, model, tmp_path / "a.toml", "--storage", storage, "--json")[1])
    scores = next(traffic.glob("scores/*/scores.jsonl.zst")).read_bytes()
    second = json.loads(tuned(traffic, model, tmp_path / "b.toml", "--storage", storage, "--json")[1])
    assert next(traffic.glob("scores/*/scores.jsonl.zst")).read_bytes() == scores
    assert second["tried"] == first["tried"]
    assert second["default"] == first["default"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--out", "policy.json"), "ends in .toml"),
        (("--drafts", "nothing"), "nothing"),
        (("--held-out", "0.99"), "at least 2 of each"),
        (("--scores", "SCORES"), "other settings (sampling)"),
        (("--out", "nodir/p.toml"), "no folder that can be written to"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    traffic: Path, model: str, tmp_path: Path, more: tuple[Any, ...], said: str
) -> None:
    if "sampling" in said:
        code, _, err = tuned(traffic, model, tmp_path / "p.toml", "--scores", tmp_path / "s")
        assert code == 0, err
        more = ("--scores", tmp_path / "s", "--sampling", "maximal")
    code, _, err = tuned(traffic, model, tmp_path / "p.toml", *more)
    assert code != 0
    assert said in err


def test_requests_that_cannot_be_scored_cost_themselves_alone(traffic: Path, model: str, tmp_path: Path) -> None:
    """Redacted ids, and options that somebody wrote: they are left out, with the reason."""
    whole = next(iter(TrafficReader(traffic)))
    writer = ShardWriter(traffic)
    writer.write(replace(whole, request_id="redacted", prompt=(1, 2**32 - 1)))
    writer.write(replace(whole, request_id="answer", output=(1, 700)))
    writer.write(replace(whole, request_id="options", options={"attention_mask": [[1]]}))
    writer.close()
    code, stdout, err = tuned(traffic, model, tmp_path / "p.toml")
    assert code == 0, err
    assert "24 requests walked, 3 left out" in stdout
    assert "2 requests left out: token ids that the target does not know" in err


def test_a_full_disk_is_no_reason_to_leave_requests_out(
    traffic: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise AutospecError("scores.jsonl.zst could not be written: the disk is full")

    monkeypatch.setattr(ScoreFolder, "add", full)
    code, _, err = tuned(traffic, model, tmp_path / "p.toml")
    assert code != 0
    assert "the disk is full" in err


def test_what_is_left_out_now_is_left_out_though_it_was_scored(traffic: Path, model: str, tmp_path: Path) -> None:
    whole = next(iter(TrafficReader(traffic)))
    writer = ShardWriter(traffic)
    writer.write(replace(whole, request_id="imported", origin="import:plain"))
    writer.close()
    assert "25 requests walked, 0 left out" in tuned(traffic, model, tmp_path / "p.toml", "--imported")[1]
    assert "24 requests walked, 1 left out" in tuned(traffic, model, tmp_path / "p.toml")[1]


def test_another_target_is_refused(traffic: Path, model: str, tmp_path: Path) -> None:
    other = tmp_path / "another"
    target, tokenizer = autospec.models.load(model, dtype="float32")
    target.save_pretrained(other)
    tokenizer.save_pretrained(other)
    code, _, err = tuned(traffic, str(other), tmp_path / "p.toml")
    assert code == 2
    assert "holds answers of tiny-target, not of another" in err
    code, _, err = tuned(traffic, str(other), tmp_path / "p.toml", "--rescore")
    assert code == 0, err


def test_several_processes_a_page_and_a_live_comparison(traffic: Path, model: str, tmp_path: Path) -> None:
    out, page = tmp_path / "policy.toml", tmp_path / "report.html"
    options = ("--jobs", 2, "--report", page, "--confirm", 4, "--json", "--no-vary")
    code, stdout, err = tuned(traffic, model, out, *options)
    assert code == 0, err
    content = json.loads(stdout)
    assert content["tried"] >= 1
    every = content["confirmed"][-1]
    assert (every["requests"], every["different"], every["errors"]) == (4, 0, [])
    assert every["off_seconds"] > 0.0
    made = tomllib.loads(out.read_text())["made"]
    assert set(made["drafts"]) == {"ngram", "suffix"}
    assert made["best_fixed"]["source"] in {"ngram", "suffix", "none"}
    assert {"target", "device", "versions", "traffic", "speed_up", "by", "at"} <= set(made)
    shown = page.read_text(encoding="utf-8")
    assert shown.startswith("<!DOCTYPE html>")
    assert made["traffic"]["digest"] in shown
    code, stdout, err = tuned(traffic, model, out, "--confirm", 2, "--no-vary")
    assert code == 0, err
    assert "2 of 2 answers were the plain one token by token" in stdout
    assert "control requests" in stdout or "plain decoding of" in stdout


def test_memory_that_is_too_small_for_any_source(traffic: Path, model: str, tmp_path: Path) -> None:
    code, stdout, err = tuned(traffic, model, tmp_path / "policy.toml", "--memory", 1e-5)
    assert (code, stdout) == (2, "")
    assert "more memory" in err.splitlines()[-1]
    assert not (tmp_path / "policy.toml").exists()


def test_a_report_that_cannot_be_written_is_known_at_once(traffic: Path, model: str, tmp_path: Path) -> None:
    code, _, err = tuned(traffic, model, tmp_path / "policy.toml", "--report", tmp_path / "nowhere" / "page.html")
    assert code == 2
    assert "no folder that can be written to" in err


def test_ctrl_c_ends_the_search_between_two_policies(
    traffic: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not lost within a database's code, nothing half is written, and the same command goes on."""
    real = Search._walk
    walked: list[object] = []

    def walk(self: Search, trial: Any, part: Any) -> Any:
        walked.append(part)
        if len(walked) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(self, trial, part)

    monkeypatch.setattr(Search, "_walk", walk)
    out = tmp_path / "policy.toml"
    storage = ("--storage", f"sqlite:///{tmp_path / 'study.db'}", "--no-vary")
    code, _, err = tuned(traffic, model, out, *storage)
    assert code == 1
    assert "stopped: scores are kept" in err
    assert len(walked) == 2
    assert not out.exists()
    code, _, err = tuned(traffic, model, out, *storage)
    assert code == 0, err
    assert out.exists()
