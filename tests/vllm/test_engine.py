"""vLLM itself, on the CPU, one engine after the other (make test-vllm)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autospec.data import load_prompts
from autospec.models import resolve
from autospec.telemetry import Store
from autospec.types import RequestRecord
from tests.postgres_server import fresh_database

HERE = Path(__file__).parent
SECONDS = 600
NUM_PROMPTS = 24
MAX_TOKENS = 48
PROPOSER = "autospec.integrations.vllm.Proposer"

GREEDY = [
    {
        "messages": [dict(message) for message in prompt.messages],
        "sampling": {"temperature": 0, "max_tokens": MAX_TOKENS},
    }
    for prompt in load_prompts()[:NUM_PROMPTS]
]
SEEDED = [
    {
        "messages": request["messages"],
        "sampling": {"temperature": 0.8, "top_p": 0.95, "seed": number, "max_tokens": MAX_TOKENS},
    }
    for number, request in enumerate(GREEDY[:8])
]

_CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "top_k": 40},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"bad_words": ["the", " the"], "min_tokens": 20},
    {"allowed_token_ids": list(range(100, 20_000))},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 5},
]
SHAPED = [
    {"messages": request["messages"], "sampling": request["sampling"] | changes}
    for request, changes in zip(SEEDED, _CHANGES, strict=True)
]


class Ran:
    """What an engine answered, and what it said meanwhile."""

    def __init__(self, found: dict[str, Any], said: str) -> None:
        self.answers: list[list[list[int]]] = found["rounds"]
        self.counts: dict[str, int] = found["counts"]  # vLLM's own
        self.said = said


def run(
    rounds: list[list[dict[str, Any]]],
    model: str | None = PROPOSER,
    engine: dict[str, Any] | None = None,
    **settings: str,
) -> Ran:
    """Start an engine, let it answer, end it. Args: model: the proposer; None: no speculation."""
    config = {"method": "custom_class", "model": model, "num_speculative_tokens": 8} if model else None
    job = {"model": resolve("smollm2-135m"), "speculative": config, "rounds": rounds, "engine": engine or {}}
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment |= {f"AUTOSPEC_VLLM_{name.upper()}": value for name, value in settings.items()}
    environment["PYTHONPATH"] = str(HERE.parent.parent)
    done = subprocess.run(
        [sys.executable, str(HERE / "run_engine.py")],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Ran(json.loads(done.stdout), done.stderr)


@cache
def plain_answers() -> list[list[int]]:
    return run([GREEDY], None).answers[0]


def stored(url: str) -> list[RequestRecord]:
    with Store(url, readonly=True) as store:
        return list(store.requests())


def check_counts(record: RequestRecord) -> None:
    assert record.num_draft_tokens >= record.num_judged_tokens >= record.num_accepted_tokens >= 0
    assert record.blocks == sum(record.acceptance_lengths.values()) == sum(record.actions.values())
    outside = int(record.notes.split()[0]) if record.notes else 0
    assert 0 <= 1 + outside + record.block_tokens - record.output_tokens <= 8  # the last block, where no end is seen
    assert record.deployment is not None
    assert record.deployment.device.startswith("vllm: cpu")
    assert record.deployment.versions["vllm"]


def test_greedy_answers_are_those_without_speculation_and_sampled_ones_are_accepted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    ran = run([GREEDY, SEEDED], store=url, drafts="ngram,suffix", name="engine-1", run="greedy")
    assert ran.answers[0] == plain_answers()
    assert [1 <= len(answer) <= MAX_TOKENS for answer in ran.answers[1]] == [True] * len(SEEDED)
    records = stored(url)
    assert len(records) == NUM_PROMPTS + len(SEEDED)
    for record in records:
        check_counts(record)
        assert record.run == "greedy"
        assert record.deployment is not None
        assert record.deployment.host == "engine-1"
    assert len({record.segment for record in records}) > 2
    decodings = sorted(record.decoding for record in records)
    assert decodings == ["greedy"] * NUM_PROMPTS + ["sample temperature=0.8 top_p=0.95"] * len(SEEDED)
    treated = [record for record in records if not record.is_control]
    assert sum(record.num_accepted_tokens for record in treated) > 0.1 * sum(r.num_judged_tokens for r in treated)
    lengths = sorted(len(answer) for answers in ran.answers for answer in answers)
    missing = [long - short for long, short in zip(lengths, sorted(r.output_tokens for r in records), strict=True)]
    assert min(missing) >= 0  # the cut at max_tokens is not seen: of the last block one token is certain
    assert max(missing) <= 8
    ours = {
        name: sum(getattr(record, name) for record in records) for name in ("num_draft_tokens", "num_accepted_tokens")
    }
    assert ours["num_draft_tokens"] == ran.counts["num_draft_tokens"]
    behind_ends = ran.counts["num_accepted_draft_tokens"] - ours["num_accepted_tokens"]
    assert 0 <= behind_ends <= 8 * sum(length < MAX_TOKENS for length in lengths)


def test_without_drafts_every_token_is_that_of_an_engine_without_speculation() -> None:
    logprobs = [{**SEEDED[0], "sampling": {**SEEDED[0]["sampling"], "logprobs": 1}}]
    rounds = [GREEDY[:4], SEEDED, SHAPED, logprobs]
    ran = run(rounds, "tests.vllm.planted.Telling", policy="off")
    assert ran.answers == run(rounds, None).answers
    (found,) = re.findall(r"planted: (\d+) steps were sampled plainly", ran.said)
    assert int(found) > 2 * MAX_TOKENS
    without = run([SHAPED], "tests.vllm.planted.Telling", policy="off", plain_sampler="no")
    assert without.answers[0] == ran.answers[2]
    assert "were sampled plainly" not in without.said


def test_a_proposer_that_raises_takes_no_engine_down() -> None:
    ran = run([GREEDY], "tests.vllm.planted.Raising", policy="fixed:ngram:4", drafts="ngram")
    assert ran.answers[0] == plain_answers()
    assert ran.said.count("a step goes without drafts: RuntimeError: planted") == 1
    assert "Traceback" in ran.said
    ran = run([GREEDY[:4]], "tests.vllm.planted.RaisingAtStart")
    assert [len(answer) > 0 for answer in ran.answers[0]] == [True] * 4
    assert ran.said.count("RuntimeError: planted at the start") >= 1


def test_a_setting_that_there_is_not_is_refused_at_the_start() -> None:
    with pytest.raises(AssertionError, match="AUTOSPEC_VLLM_POLICYY: no such setting"):
        run([GREEDY[:1]], policyy="off")


@pytest.fixture
def database() -> Iterator[str]:
    with fresh_database() as url:
        yield url


def test_two_engines_share_what_they_learn(database: str) -> None:
    """The second begins with what the first has learned, and adds to it."""
    first = run([GREEDY], store=database, policy="goodput", name="engine-1")
    with Store(database, readonly=True) as store:
        (learned,) = all_states(store)
    assert "had learned" not in first.said
    second = run([GREEDY[:12]], store=database, policy="goodput", name="engine-2")
    with Store(database, readonly=True) as store:
        (gone_on,) = all_states(store)  # the first one is part of it
        records = list(store.requests())
    assert second.answers[0] == plain_answers()[:12]
    assert gone_on.process != learned.process
    assert learned.process in gone_on.inherited
    assert {record.deployment.host for record in records if record.deployment} == {"engine-1", "engine-2"}
    assert len(records) == NUM_PROMPTS + 12
    before, after = (sum(each["blocks"] for each in s.state["segments"].values()) for s in (learned, gone_on))
    assert after > before > 0


def all_states(store: Store) -> list[Any]:
    from datetime import UTC, datetime

    place = next(record.deployment for record in store.requests() if record.deployment)
    version = next(record.policy_version for record in store.requests() if record.policy_version)
    found, num_damaged = store.policy_states(place, version, datetime.fromtimestamp(0, UTC))
    assert num_damaged == 0
    return found


def test_a_database_that_is_away_stops_no_engine() -> None:
    ran = run([GREEDY[:4]], store="postgresql://nobody@127.0.0.1:1/none", policy="fixed:ngram:4", drafts="ngram")
    assert ran.answers[0] == plain_answers()[:4]
    assert "the store cannot be used, requests are kept in memory" in ran.said
