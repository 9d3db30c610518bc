"""`autospec segments`: explain and fit, on prompts in a file and a tiny model from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_tokenizers
import torch
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.segments.clusters import Clusters

WORDS = ("dog", "fox", "cat", "owl", "hen", "cow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and prompts: some repeat themselves, and so does the answer to them."""
    made = tmp_path_factory.mktemp("segments")
    target, tokenizer = tiny.llama(seed=1, vocab_size=320, dtype=torch.float32), tiny_tokenizers.byte_level(320)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    target.save_pretrained(made / "target")
    tokenizer.save_pretrained(made / "target")
    lines = [
        json.dumps({"prompt": text, "segment": segment, "prompt_id": f"{segment}-{word}", "max_new_tokens": 16})
        for word in WORDS
        for segment, text in (("repeat", f"{word} over the {word} " * 6), ("ask", f"Where is the {word}?"))
    ]
    (made / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return made


def run(*args: str) -> Any:
    return CliRunner().invoke(group, ["segments", *args], prog_name="autospec")


def fit(folder: Path, *args: str) -> Any:
    call = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl"), "--dtype", "float32"]
    return run("fit", *call, *args)


class TestExplain:
    def test_text(self) -> None:
        result = run("explain", "--text", "Write a Python function.")
        assert result.exit_code == 0, result.output
        first, second = result.stdout.splitlines()
        assert first == "code (built-in)"
        assert "word 'python' (code +1.5)" in second

    def test_prompts(self, folder: Path) -> None:
        path = str(folder / "prompts.jsonl")
        result = run("explain", "--prompts", path)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert len(lines) == 2 * 2 * len(WORDS)
        assert lines[2].split() == ["ask-dog", "dialogue", "built-in"]
        rows = json.loads(run("explain", "--prompts", path, "--json").stdout)["prompts"]
        assert rows[1]["prompt_id"] == "ask-dog"
        assert rows[1]["segment"] == "dialogue"
        assert set(rows[1]) == {"prompt_id", "segment", "origin", "why", "prompt_tokens"}

    def test_with_the_target_tokens_are_counted(self, folder: Path) -> None:
        options = ["--tokenizer", str(folder / "target"), "--json"]
        found = json.loads(run("explain", "--text", "Where is the dog?", *options).stdout)["prompts"][0]
        tokenizer = tiny_tokenizers.byte_level(320)
        assert found["prompt_tokens"] == len(tokenizer("Where is the dog?")["input_ids"])
        assert found["segment"] == "dialogue"

    def test_rules(self, tmp_path: Path) -> None:
        path = tmp_path / "segments.toml"
        path.write_text(
            "[[segments.rules]]\nname = 'acme'\ntenant = 'acme'\n"
            "[[segments.rules]]\nname = 'hot'\ndo_sample = true\ndecoding = 'temperature=1'\n",
            encoding="utf-8",
        )
        call = ["explain", "--config", str(path), "--text", "Write a Python function."]
        assert run(*call).stdout.startswith("default (default)\n    no label, and no rule that fits")
        assert run(*call, "--tenant", "acme").stdout.startswith("acme (rule)\n    rule 1: tenant = 'acme'")
        assert run(*call, "--decoding", "sample temperature=1.5").stdout.startswith("hot (rule)\n    rule 2: ")

    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            ([], 2, "give either --text or --prompts"),
            (["--text", "a", "--prompts", "{prompts}"], 2, "give either --text or --prompts"),
            (["--text", "a", "--config", "none.toml"], 2, "none.toml: cannot read the rules"),
            (["--text", "a", "--clusters", "none.npz"], 2, "none.npz: cannot read the clusters"),
            (["--text", "a", "--tenant", ""], 2, "tenant=''"),
            (["--text", "a", "--tokenizer", "/no/folder"], 1, "does not exist"),
        ],
    )
    def test_bad_input_is_one_line(self, folder: Path, args: list[str], code: int, message: str) -> None:
        result = run("explain", *(a.format(prompts=folder / "prompts.jsonl") for a in args))
        assert result.exit_code == code
        assert message in result.stderr
        assert "Traceback" not in result.stderr

    def test_hostile_text_is_made_visible(self, tmp_path: Path) -> None:
        path = tmp_path / "segments.toml"
        path.write_text(
            "[[segments.rules]]\nname = 'a\\u202e'\n".replace("'", '"') + 'text = "\\u001b?x"\n', encoding="utf-8"
        )
        result = run("explain", "--config", str(path), "--text", "\x1b[31mx")
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.stdout
        assert "\u202e" not in result.stdout


class TestFit:
    def test_clusters_that_separate_acceptance(self, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "c.npz"
        result = fit(folder, "--out", str(out), "--counts", "2,3", "--block-lengths", "2,4")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].split() == ["clusters", "separation"]
        assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
        assert sum("kept" in line for line in lines[1:4]) == 1
        clusters = Clusters.load(out)
        assert clusters.notes["drafts"] == ["ngram", "suffix"]
        assert set(clusters.notes["separation"]) == {"2", "3"}
        call = [
            "--clusters",
            str(out),
            "--prompts",
            str(folder / "prompts.jsonl"),
            "--tokenizer",
            str(folder / "target"),
        ]
        found = run("explain", *call, "--json")
        rows = json.loads(found.stdout)["prompts"]
        assert {row["origin"] for row in rows} == {"cluster"}
        assert len({row["segment"] for row in rows}) == len(clusters)

    def test_json(self, folder: Path, tmp_path: Path) -> None:
        call = ["--out", str(tmp_path / "c.npz"), "--counts", "2", "--block-lengths", "2,4", "--json"]
        found = json.loads(fit(folder, *call).stdout)
        assert found["prompts"] == 12
        assert [row["clusters"] for row in found["candidates"]] == [2]
        assert sum(found["sizes"].values()) == 12

    def test_where_nothing_separates_nothing_is_written(self, folder: Path, tmp_path: Path) -> None:
        lines = [json.dumps({"prompt": "the dog and the fox", "max_new_tokens": 12})] * 12
        (tmp_path / "same.jsonl").write_text("\n".join(lines), encoding="utf-8")
        out = tmp_path / "c.npz"
        call = ["--prompts", str(tmp_path / "same.jsonl"), "--out", str(out), "--counts", "2", "--block-lengths", "2"]
        result = fit(folder, *call)
        assert result.exit_code == 1
        assert "nothing is written" in result.stderr
        assert "kept" in result.stdout.splitlines()[1]
        assert not out.exists()

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--counts", "1,2"], "whole numbers of 2 to 256"),
            (["--counts", "two"], "whole numbers of 2 to 256"),
            (["--block-lengths", "0"], "whole numbers of at least 1"),
            (["--drafts", "none"], "no draft source"),
            (["--drafts", "magic"], "unknown draft source 'magic'"),
            (["--limit", "9"], "9 prompts are too few"),
            (["--out", "/no/folder/c.npz"], "there is no folder /no/folder"),
        ],
    )
    def test_bad_input_is_refused_before_work(self, folder: Path, args: list[str], message: str) -> None:
        result = fit(folder, *args)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "loading" not in result.stderr
