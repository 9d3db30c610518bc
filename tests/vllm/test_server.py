"""A real server: its counters as they are taken in, and what its steps cost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.data import load_prompts
from autospec.models import resolve
from autospec.telemetry import Store
from autospec.telemetry.calibrations import newest_steps
from autospec.telemetry.engines import EngineSums, engine_sums

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
START_SECONDS = 300


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of vLLM's server with the demonstration model. (In the package for the CPU `vllm serve` fails.)"""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", resolve("smollm2-135m")),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2", "--enforce-eager"),
        *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--gpu-memory-utilization", "0.3"),
        *options,
    ]
    with (folder / "server.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT})
    try:
        end = time.monotonic() + START_SECONDS
        while not is_up(address):
            assert process.poll() is None, (folder / "server.log").read_text(encoding="utf-8")[-4000:]
            assert time.monotonic() < end
            time.sleep(1.0)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(address: str, content: str) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": content}], "max_tokens": 48, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(group, list(arguments), prog_name="autospec")
    assert done.exit_code == 0, done.output
    return done


def test_counters_are_those_of_the_answers_and_steps_can_be_measured(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    options = ("--speculative-config", json.dumps(SPECULATIVE), "--per-request-spec-decode-metrics", "detailed")
    with serving(tmp_path, *options) as address:
        said = [ask(address, prompt.messages[-1]["content"]) for prompt in load_prompts()[:6]]
        run("ingest", "vllm", address, "--store", url, "--name", "engine-1", "--source", "ngram")
        (first,) = sums(url)
        run("ingest", "vllm", address, "--store", url, "--name", "engine-1", "--source", "ngram")
        assert [(each.output_tokens, each.num_drafts) for each in sums(url)] == [
            (first.output_tokens, first.num_drafts)
        ]
        done = run("calibrate", "--vllm", address, "--store", url, "--most-requests", "4", "--tokens", "32")
    counts = [each["metrics"]["speculative_decoding"] for each in said]
    assert (first.engine, first.target, first.source) == ("engine-1", "smollm2", "ngram")
    assert first.requests == len(said)
    assert first.output_tokens == first.request_tokens == sum(each["usage"]["completion_tokens"] for each in said)
    assert first.prompt_tokens == sum(each["usage"]["prompt_tokens"] for each in said)
    assert first.num_drafts == sum(each["num_spec_steps"] for each in counts)
    assert first.num_draft_tokens == sum(each["num_draft_tokens"] for each in counts)
    assert first.num_accepted_tokens == sum(each["num_accepted_draft_tokens"] for each in counts) == sum(first.accepted)
    assert len(first.accepted) == 4
    assert first.request_seconds is not None
    assert 0.0 < first.request_seconds < 600.0
    assert first.steps is not None
    assert 0 < first.steps <= (first.output_tokens or 0) + len(said)
    assert "4 requests: " in done.stderr
    steps = found_steps(url)
    assert len(steps) >= 2
    assert all(0.0 < seconds < 60.0 for _, seconds in steps)


def test_an_engine_of_ones_own_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    url = f"sqlite:///{tmp_path / 't.db'}"
    run(
        *("calibrate", "--vllm", resolve("smollm2-135m"), "--store", url, "--dtype", "float32", "--most-requests", "2"),
        *("--tokens", "96", "--engine", '{"enforce_eager": true, "gpu_memory_utilization": 0.3}'),
    )
    steps = dict(found_steps(url))
    assert {1, 2, 3, 5, 9, 4, 6, 10, 18} <= set(steps)  # 0, 1, 2, 4 and 8 drafts of one request, and of two
    assert all(0.0 < seconds < 60.0 for seconds in steps.values())


def sums(url: str) -> tuple[EngineSums, ...]:
    with Store(url, readonly=True) as store:
        return engine_sums(store)


def found_steps(url: str) -> list[tuple[int, float]]:
    with Store(url, readonly=True) as store:
        return newest_steps(store, "target", device="vllm:%")
