"""vLLM's per-request metrics as records: counts as they were, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.telemetry import Store
from autospec.types import RequestRecord


def response(**changes: Any) -> dict[str, Any]:
    """As `vllm serve --per-request-spec-decode-metrics detailed --enable-per-request-metrics` gives it."""
    counts = {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 1, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 8,
        "num_spec_tokens": 4,
        "per_step_accepted": [0, 2, 1],
        "per_step_drafted": [4, 2, 2],
    }
    return {
        "id": "chatcmpl-1",
        "model": "org/model",
        "created": 1_790_000_000,
        "temperature": 0,
        "usage": {"prompt_tokens": 30, "completion_tokens": 10},
        "metrics": {
            "time_to_first_token_ms": 100.0,
            "generation_time_ms": 900.0,
            "speculative_decoding": {**counts, **changes.pop("counts", {})},
        },
        **changes,
    }


def ingest(folder: Path, entries: list[Any], *options: str, code: int = 0) -> tuple[list[RequestRecord], str]:
    file, url = folder / "responses.jsonl", f"sqlite:///{folder}/store.db"
    file.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    done = CliRunner().invoke(group, ["ingest", "vllm", str(file), "--store", url, *options])
    assert done.exit_code == code, done.output
    with Store(url) as store:
        return list(store.requests()), done.output


def test_steps_are_blocks_and_those_without_drafts_follow_from_the_length(tmp_path: Path) -> None:
    (record,), said = ingest(tmp_path, [response()], "--source", "ngram", "--name", "engine-1", "--run", "night")
    assert "1 requests from 1 files, 0 lines left out" in said
    assert record.acceptance_lengths == {
        1: 4,
        3: 1,
        2: 1,
    }  # 6 tokens of three steps, and three plain ones after the first
    assert record.actions == {"ngram:4": 3, "none": 3}
    assert (record.num_draft_tokens, record.num_judged_tokens, record.num_accepted_tokens) == (8, 5, 3)
    assert record.at_risk == (3, 2)
    assert record.accepted == (2, 1)
    assert record.output_tokens == 10 == 1 + record.block_tokens
    assert record.seconds.prefill == pytest.approx(0.1)
    assert record.total_seconds == pytest.approx(1.0)
    assert not record.do_sample
    assert record.run == "night"
    assert record.deployment is not None
    assert (record.deployment.host, record.deployment.device) == ("engine-1", "vllm")
    assert record.deployment.target == "org/model"


def test_the_same_file_again_changes_nothing(tmp_path: Path) -> None:
    ingest(tmp_path, [response(), response(temperature=0.5)])
    records, _ = ingest(tmp_path, [response(), response(temperature=0.5)])
    assert len(records) == 2
    assert [record.decoding for record in records] == ["greedy", "sample temperature=0.5"]


def test_summaries_are_taken_where_all_drafts_were_full(tmp_path: Path) -> None:
    counts = {"per_step_accepted": None, "per_step_drafted": None, "num_draft_tokens": 12}
    (record,), _ = ingest(tmp_path, [response(counts=counts)])
    assert (record.num_draft_tokens, record.num_accepted_tokens, record.num_judged_tokens) == (12, 3, 6)


def test_requests_and_offline_outputs_are_understood(tmp_path: Path) -> None:
    body = response()
    del body["temperature"]
    nested = {"request": {"body": {"temperature": 0.8, "metadata": {"segment": "chat"}}}, "response": {"body": body}}
    offline = {
        "prompt_token_ids": [1] * 7,
        "outputs": [{"token_ids": [1] * 5, "spec_decode_metrics": {"per_step_drafted": [3], "per_step_accepted": [3]}}],
    }
    records, _ = ingest(tmp_path, [nested, offline], "--segment", "rest")
    first, second = sorted(records, key=lambda record: -record.prompt_tokens)
    assert (first.segment, first.decoding) == ("chat", "sample temperature=0.8")
    assert (second.segment, second.prompt_tokens, second.output_tokens) == ("rest", 7, 5)
    assert second.acceptance_lengths == {4: 1}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (response(metrics={}), "no metrics.speculative_decoding: start vLLM with"),
        (response(usage={}), "neither usage nor token ids say how long"),
        (response(counts={"per_step_accepted": [0, 2]}), "are of different lengths"),
        (response(counts={"per_step_accepted": [0, 3, 1]}), "accepted more than was drafted"),
        (response(counts={"per_step_drafted": [9, 2, 2]}), "a step with 9 drafts, where 4 is the most"),
        (response(counts={"per_step_accepted": None, "per_step_drafted": None}), "drafts of different lengths"),
        (response(counts={"per_step_accepted": [-1, 2, 1]}), "per_step_accepted has -1, where a count is needed"),
        (response(counts={"per_step_drafted": 4}), "per_step_drafted is 4, a list of counts is needed"),
        ("text", "not an object"),
    ],
)
def test_what_says_too_little_is_left_out_with_the_reason(tmp_path: Path, entry: Any, reason: str) -> None:
    records, said = ingest(tmp_path, [entry, response()], code=2)
    assert records == []
    assert reason in said.replace("\n", " ")
    records, said = ingest(tmp_path, [entry, response()], "--tolerate", "0.5")
    assert len(records) == 1
    assert reason in said
