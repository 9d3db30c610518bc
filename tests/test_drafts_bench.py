"""`autospec drafts bench` on a tiny model from a folder, and what memory it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.memory import held_bytes

TEXTS = {"letters": "abcabcabcabc", "words": "hellohellohello"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one to draft for it, and prompts."""
    made = tmp_path_factory.mktemp("models")
    target = tiny.llama(dtype=torch.float32, num_hidden_layers=4)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for name, model in (("target", target), ("draft", tiny.near_copy(target))):
        model.save_pretrained(made / name)
        tokenizer.save_pretrained(made / name)
    lines = [json.dumps({"prompt": text, "segment": segment, "max_new_tokens": 16}) for segment, text in TEXTS.items()]
    (made / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return made


def bench(folder: Path, *args: str) -> Any:
    call = ["drafts", "bench", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    return CliRunner().invoke(group, [*call, "--dtype", "float32", *args], prog_name="autospec")


def test_rows_for_each_source_segment_and_block_length(folder: Path) -> None:
    result = bench(
        folder, "--assistant", str(folder / "draft"), "--early-exit", "1,2", "--block-lengths", "2,4", "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = found["rows"]
    names = ["ngram", "suffix", "early_exit_1", "early_exit_2", "assistant"]
    assert [(r["source"], r["block_length"], r["segment"]) for r in rows] == [
        (name, length, segment) for name in names for length in (2, 4) for segment in ("letters", "words", "all")
    ]
    for row in rows:
        assert row["acceptance_length"] == pytest.approx(1 + row["accepted_per_block"], abs=0.3)
        assert len(row["acceptance_by_position"]) <= row["block_length"]
        assert row["draft_ms"] >= 0
        assert row["memory_bytes"] > 0
        assert row["expected_speed_up"] > 0
    assistant = next(r for r in rows if r["source"] == "assistant" and r["segment"] == "all")
    assert sum(assistant["accepted"]) > 0


def test_the_table_says_what_its_columns_are(folder: Path) -> None:
    result = bench(folder, "--drafts", "ngram", "--block-lengths", "2", "--temperature", "0.8", "--limit", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["source", "segment", "length"]
    assert [line.split()[:3] for line in lines[1:3]] == [["ngram", "letters", "2"], ["ngram", "all", "2"]]
    assert "+1 included" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafts", "magic"], "unknown draft source 'magic'"),
        (["--drafts", "assistant"], "needs settings"),
        (["--block-lengths", "0,2"], "whole numbers of at least 1"),
        (["--early-exit", "two"], "numbers of layers"),
        (["--early-exit", "9"], "early_exit of 9 layers"),
        (["--assistant", "/no/folder"], "does not exist"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_input_is_one_line(folder: Path, args: list[str], message: str) -> None:
    result = bench(folder, *args)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


class TestHeldBytes:
    def test_tensors_arrays_and_containers_once_each(self) -> None:
        tensor, array = torch.zeros(1000), np.zeros(500)
        alone = held_bytes([tensor])
        assert alone == 4000
        assert held_bytes([tensor, tensor[10:], tensor.view(10, 100)]) == 4000
        assert held_bytes([[array, array[3:]]]) == pytest.approx(4000, abs=200)
        assert held_bytes([{"a": list(range(1000, 2000))}]) > 8 * 1000

    def test_what_others_hold_is_left_out(self) -> None:
        model, other = tiny.llama(), tiny.llama(seed=1)
        size = sum(p.nbytes for p in model.parameters())
        assert held_bytes([model], shared=model.parameters()) < size / 2
        assert size < held_bytes([model, other], shared=model.parameters()) < 2 * size

    def test_code_is_not_counted(self) -> None:
        assert held_bytes([torch, np.zeros, str]) == 0
