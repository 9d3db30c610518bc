"""`autospec explain`: the decisions of a recorded request."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner
from sqlalchemy import select, update

import autospec
from autospec.cli.main import group
from autospec.telemetry.explain import explain, find_request
from autospec.telemetry.schema import TraceRow
from autospec.telemetry.store import Store

GREEDY: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 't.db'}"
    model = tiny.llama()
    with autospec.wrap(model, drafts=["ngram", "suffix"], store=url, trace=1.0, control_share=0.0):
        for seed in range(3):
            model.generate(tiny.prompt(20, seed), **GREEDY, segment=f"s{seed}")
    with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:3", store=url, control_share=1.0):
        model.generate(tiny.prompt(20), **GREEDY, segment="control")
    return url


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(group, ["explain", *arguments])
    return result.exit_code, result.stdout, result.stderr


def ids(url: str) -> list[str]:
    with Store(url, readonly=True) as store:
        return [record.request_id for record in store.requests()]


def test_each_block_has_its_reason(url: str) -> None:
    with Store(url, readonly=True) as store:
        record, blocks, trouble = find_request(store, ids(url)[1])
    assert trouble is None
    assert record.segment == "s1"
    assert len(blocks) == record.blocks
    assert sum(block.num_committed_tokens for block in blocks) == 29  # the first comes from the prompt's forward
    text = explain(record, blocks)
    lines = text[text.index("Block by block") :].splitlines()[1:]
    assert len(lines) == len(blocks)
    for line, block in zip(lines, blocks, strict=True):
        assert line.endswith(str(block.action.reason))
        assert block.action.reason_kind in ("best", "kept", "off", "explore", "guard")
    drafted = next(block for block in blocks if block.action.block_length)
    assert f"{drafted.action.label} " in str(drafted.action.reason)
    assert "x" in str(drafted.action.reason)


def test_the_command(url: str) -> None:
    known = ids(url)
    code, out, err = run(known[0][:12], "--store", url)
    assert (code, err) == (0, "")
    assert known[0] in out
    assert "What was decided, and how often:" in out
    assert "What it brought:" in out
    code, out, _ = run(known[0], "--store", url, "--json")
    values = json.loads(out)
    assert values["request_id"] == known[0]
    assert values["blocks"][0]["action"]["reason"]


def _with(content: dict[str, Any], **columns: Any) -> bytes:
    count = len(content["columns"]["action"])
    changed = {name: [value] * count for name, value in columns.items()}
    return zlib.compress(json.dumps({**content, "columns": {**content["columns"], **changed}}).encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: b"nonsense", "this is no trace of blocks"),
        (lambda c: zlib.compress(b"[]"), "this is no trace of blocks"),
        (lambda c: zlib.compress(b"[" * 200_000 + b"]" * 200_000), "this is no trace of blocks"),
        (lambda c: zlib.compress(b" " * (200 << 20), 1), "this is no trace of blocks"),
        (lambda c: _with({**c, "actions": [[None, 2, "x"]] * 99}), "this is no trace of blocks"),
        (lambda c: _with({**c, "actions": [["ngram", 2, 5]] * 99}), "this is no trace of blocks"),
        (lambda c: _with({**c, "actions": [[]] * 99}), "this is no trace of blocks"),
        (lambda c: _with(c, draft_seconds=10**400), "this is no trace of blocks"),
        (lambda c: _with(c, context_tokens=None), "this is no trace of blocks"),
        (lambda c: _with(c, context_tokens="\x1b[31m"), "this is no trace of blocks"),
        (lambda c: _with(c, action=-1), "this is no trace of blocks"),
        (lambda c: _with({**c, "columns": {**c["columns"], "emission_seconds": [1]}}), "this is no trace of blocks"),
        (lambda c: _with({**c, "version": 99}), "the trace has version 99: a newer autospec can read it"),
    ],
    ids=range(13),
)
def test_a_damaged_trace_hides_only_the_blocks(url: str, damage: Any, message: str) -> None:
    name = ids(url)[0]
    with Store(url) as store, store.writing() as connection:
        content = json.loads(zlib.decompress(connection.scalar(select(TraceRow.blocks)) or b""))
        connection.execute(update(TraceRow).values(blocks=damage(content)))
    code, out, err = run(name, "--store", url)
    assert (code, err) == (0, "")
    assert name in out
    assert "What it brought:" in out
    assert f"Its blocks were kept, and cannot be read: {message}" in out
    code, out, _ = run(name, "--store", url, "--json")
    assert code == 0
    assert json.loads(out)["trace_error"].startswith(message)


def test_names_cannot_act_on_a_terminal(url: str) -> None:
    with Store(url, readonly=True) as store:
        record, _, _ = find_request(store, "last")
    evil = "x\x1b]0;pwn\x07\u202e\nline"
    text = explain(replace(record, policy=evil, policy_version=evil, decoding=evil), [])
    assert text.count("x\\x1b]0;pwn\\x07\\u202e\\nline") == 3
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_control_says_so_and_has_no_trace(url: str) -> None:
    code, out, _ = run("last", "--store", url)
    assert code == 0
    assert "it is a control" in out
    assert "none control" in out
    assert "Its blocks were not kept one by one" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("abc", "the first 4 or more of its 32 hexadecimal digits"),
        ("x" * 32, "hexadecimal"),
        ("%%%%", "hexadecimal"),
        ("0" * 32, "no request begins with"),
    ],
)
def test_bad_names(url: str, name: str, message: str) -> None:
    code, out, err = run(name, "--store", url)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_nothing_recorded_yet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    Store(url).close()
    code, _, err = run("last", "--store", url)
    assert code == 2
    assert "there are no requests in" in err
