"""The main job on the demonstration model, and on a tiny one; a demonstration that is killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import tiny
import torch

import autospec
from autospec import models
from autospec.data import DemoPrompt, encode, interleaved, load_prompts
from autospec.decoding.ties import examine
from autospec.demo import run_demo
from autospec.drafts import Assistant
from autospec.drafts.early_exit import first_layers_of
from autospec.telemetry.report import build_report
from autospec.telemetry.store import Store

ROOT = Path(__file__).parent.parent


def chat_tokenizer() -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def some_prompts() -> list[DemoPrompt]:
    return [
        DemoPrompt(f"{segment}-{i}", segment, ({"role": "user", "content": "abcabdabcabe" * (i + 1)},), 16)
        for segment in ("one", "two")
        for i in range(3)
    ]


def test_records_pairs_and_report(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/demo.db"
    model = tiny.llama()
    run_demo(model, chat_tokenizer(), some_prompts(), store=url, run="r", show_progress=False)
    assert "generate" not in vars(model)
    with Store(url, readonly=True) as store:
        requests, comparisons = list(store.requests(run="r")), store.comparisons(run="r")
    assert len(requests) == 24
    assert len(comparisons) == 12
    report = build_report(requests, comparisons)
    assert [row.group["segment"] for row in report.segments] == ["one", "two"]
    for row in report.segments:
        assert (row.requests, row.control_requests, row.paired_requests) == (6, 6, 6)
        assert (row.greedy_identical, row.greedy_compared) == (3, 3)
        assert (row.sampled_identical, row.sampled_compared) == (3, 3)
        assert row.speed_up is not None
    in_order = sorted(requests, key=lambda r: r.started_at)
    firsts = [in_order[i].is_control for i in range(0, 24, 2)]
    assert firsts == [True, False] * 6  # the order alternates


def test_segments_take_turns() -> None:
    assert [p.prompt_id for p in interleaved(some_prompts())] == ["one-0", "two-0", "one-1", "two-1", "one-2", "two-2"]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_killed_half_way_it_leaves_a_readable_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/demo.db"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}.", "max_new_tokens": 8}) + "\n" for i in range(200)))
    command = [sys.executable, "-c", "from autospec.cli import main; main()", "demo", "--store", url]
    process = subprocess.Popen(
        [*command, "--prompts", str(prompts), "--policy", "fixed:ngram:4", "--html", str(tmp_path / "r.html")],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        deadline = time.monotonic() + 240
        while _rows(tmp_path / "demo.db") < 6:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with sqlite3.connect(tmp_path / "demo.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Store(url, readonly=True) as store:
        assert len(list(store.requests())) >= 6


@pytest.mark.model
@pytest.mark.timeout(300)
def test_its_last_line_opens_the_dashboard_when_it_is_pasted(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Say it.", "max_new_tokens": 4, "segment": "said"}) + "\n")
    autospec_ = str(Path(sys.executable).parent / "autospec")
    command = [autospec_, "demo", "--prompts", str(prompts), "--policy", "fixed:ngram:4", "--dtype", "float32"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    title, _, pasted = shown.splitlines()[-1].partition(" ")
    assert title == "dashboard:"
    assert pasted.endswith(" --open")
    words = shlex.split(pasted.removesuffix("--open"))
    with Store(f"sqlite:///{tmp_path / 'autospec-demo.db'}", readonly=True) as store:
        treated = next(record.request_id for record in store.requests() if not record.is_control)
    with subprocess.Popen(
        [*words, "--port", "0"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            address = next(word for word in server.stderr.readline().split() if word.startswith("http://"))
            with urlopen(address, timeout=60) as answer:
                assert "said" in answer.read().decode()
            with urlopen(f"{address}request?id={treated}", timeout=60) as answer:
                assert 'class="strip"' in answer.read().decode()
        finally:
            server.terminate()
            server.wait(60)


def _rows(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT count(*) FROM requests").fetchone()[0])
    except sqlite3.OperationalError:  # not yet migrated
        return 0


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return models.load("smollm2-135m", dtype="float32")


@pytest.mark.model
@pytest.mark.compat
@pytest.mark.parametrize("source", ["ngram", "assistant"])
def test_greedy_outputs_equal_generate_on_demonstration_prompts(smollm2: Any, source: str) -> None:
    """In float32, one short prompt of each segment; experiments/02_demo_exactness runs them all."""
    model, tokenizer = smollm2
    drafts = ["ngram", Assistant(first_layers_of(model, 6), tokenizer=tokenizer)]
    by_segment = {p.segment: p for p in sorted(load_prompts(), key=lambda p: -len(p.messages[0]["content"]))}
    for number, prompt in enumerate(by_segment.values()):
        inputs = encode(tokenizer, prompt, model)
        plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        block_length = (1, 2, 4, 8, 16)[number % 5]
        with autospec.wrap(model, tokenizer=tokenizer, drafts=drafts, policy=f"fixed:{source}:{block_length}"):
            found = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        length = inputs["input_ids"].shape[1]
        difference = examine(model, inputs["input_ids"], plain[0, length:].tolist(), found[0, length:].tolist())
        assert difference is None or difference.is_tie, difference


@pytest.mark.model
@pytest.mark.compat
def test_sampled_text_follows_the_seed_on_the_demonstration_model(smollm2: Any) -> None:
    model, tokenizer = smollm2
    drafts = ["ngram", Assistant(first_layers_of(model, 6), tokenizer=tokenizer)]
    prompt = next(p for p in load_prompts() if p.segment == "write")
    inputs = encode(tokenizer, prompt, model)
    for policy in ("fixed:ngram:4", "fixed:assistant:3"):
        torch.manual_seed(7)
        plain = model.generate(**inputs, max_new_tokens=24, do_sample=True, temperature=0.8, top_p=0.95)
        with autospec.wrap(model, tokenizer=tokenizer, drafts=drafts, policy=policy):
            torch.manual_seed(7)
            found = model.generate(**inputs, max_new_tokens=24, do_sample=True, temperature=0.8, top_p=0.95)
        assert torch.equal(plain, found)
