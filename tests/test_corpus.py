"""Texts from files into a pool: what is read, what is refused, and that nothing is half done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.corpus import add_file
from autospec.drafts import Suffix, SuffixPool
from autospec.drafts.pool import END
from autospec.errors import ConfigurationError, DraftError

TOKENIZER = tiny.tokenizer()


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_texts_strings_and_ids(tmp_path: Path) -> None:
    pool = SuffixPool()
    lines = [{"text": "abc", "id": 7}, {"completion": "de"}, {"token_ids": [5, 6]}]
    file = written(tmp_path / "some.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert add_file(pool, file, TOKENIZER).tokens == 7
    assert add_file(pool, written(tmp_path / "one.txt", "﻿fgh"), TOKENIZER).texts == 1
    pool.build()
    assert pool.index.texts.tolist() == [0, 1, 2, END, 3, 4, END, 5, 6, END, 5, 6, 7, END]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", r"a\.txt, line 1: byte 0xe9 is not UTF-8"),
        ("a.txt", " \n", r"a\.txt: no text in it"),
        ("a.jsonl", '{"text": "a"}\n{"text"', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", "[1]", r"line 1: an object with one of text, completion, token_ids"),
        ("a.jsonl", '{"text": 3}', r"line 1: text is 3, a string"),
        ("a.jsonl", '{"token_ids": [1, 64]}', r"line 1: token id 64, the tokenizer has ids 0 to 63"),
        ("a.jsonl", '{"token_ids": [1, -1]}', r"line 1: token id -1"),
        ("a.jsonl", '{"token_ids": [1, 2.5]}', r"line 1: token_ids is \[1, 2\.5\]"),
    ],
)
def test_what_is_not_as_described_is_named_and_nothing_added(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    pool = SuffixPool()
    with pytest.raises(ConfigurationError, match=message):
        add_file(pool, written(tmp_path / name, content), TOKENIZER)
    assert pool.num_tokens == 0


def test_a_missing_file_and_another_tokenizer(tmp_path: Path) -> None:
    pool = SuffixPool()
    with pytest.raises(ConfigurationError, match="No such file"):
        add_file(pool, tmp_path / "nowhere.txt", TOKENIZER)
    add_file(pool, written(tmp_path / "a.txt", "abc"), TOKENIZER)
    with pytest.raises(DraftError, match="another tokenizer"):
        add_file(pool, tmp_path / "a.txt", tiny.tokenizer(order=[1, 0, *range(2, tiny.VOCAB)]))


def test_the_command(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    pool, runner = tmp_path / "pool.npz", CliRunner()
    file = written(tmp_path / "a.txt", "abcabd")
    arguments = ["corpus", "add", "--pool", str(pool), "--tokenizer", str(tmp_path / "model")]
    done = runner.invoke(group, [*arguments, str(file), str(file), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"pool": str(pool), "texts": 2, "tokens": 12, "pool_tokens": 14}
    assert "14 tokens in all" not in done.stdout
    done = runner.invoke(group, [*arguments, str(file)])
    assert "1 texts, 6 tokens added; 21 tokens in all" in done.stdout
    before = pool.read_bytes()
    done = runner.invoke(group, [*arguments, str(file), str(tmp_path / "nowhere.txt")])
    assert done.exit_code == 2
    assert "nowhere.txt: No such file" in done.stderr
    assert pool.read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.tmp")] == []
    assert Suffix(pool).pools[""].num_tokens == 21
