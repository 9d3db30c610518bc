"""docs/coverage.md names tests that exist and everything that transformers offers; caches of the locked release."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from compared import answer, assert_plain
from test_families import make
from transformers import Cache, LogitsProcessor, StoppingCriteria, cache_utils
from transformers.generation import logits_process, stopping_criteria, streamers
from transformers.generation.streamers import BaseStreamer

import autospec
from autospec.policies import Fixed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
HOW = ("exact", "plain inside autospec", "left to `generate`")

KINDS: list[tuple[ModuleType, type]] = [
    (logits_process, LogitsProcessor),
    (stopping_criteria, StoppingCriteria),
    (streamers, BaseStreamer),
    (cache_utils, Cache),
]


def rows() -> list[list[str]]:
    """The cells of every row, heads and rules left out."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row not in (["what", "how", "test"], ["---", "---", "---"])]


def names_in(path: Path) -> set[str]:
    """Names of the tests in a file, as in `test_x` and `TestX::test_x`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return {name for name in names if name.split("::")[-1].startswith("test_")}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_every_row_names_a_test_that_exists(row: list[str]) -> None:
    what, how, test = row
    assert what
    assert how in HOW
    match = re.fullmatch(r"`(tests/\w+\.py)::([\w:]+)`", test)
    assert match is not None, test
    assert match[2] in names_in(ROOT / match[1])


@pytest.mark.parametrize(("module", "base"), KINDS, ids=lambda kind: kind.__name__)
def test_everything_that_transformers_offers_has_a_row(module: ModuleType, base: type) -> None:
    offered = {name for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, base)}
    mentioned = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows())))
    assert len(offered) > 3
    assert sorted(offered - mentioned) == []


# --- what releases before the locked one do not have ---


@pytest.mark.parametrize("do_sample", [False, True])
def test_quantised_cache_of_transformers(do_sample: bool) -> None:
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    model, prompt = make("llama", {}), tiny.prompt(28, seed=1, period=24)
    reason = "decoded plainly: the cache (QuantizedCache) cannot be rolled back"
    assert_plain(model, prompt, reason, lambda: options, do_sample=do_sample, inside=True)
    lossy = answer(model, prompt, lambda: options, do_sample=do_sample)
    assert not torch.equal(lossy, answer(model, prompt, do_sample=do_sample))


def test_paged_caches() -> None:
    """Their pages fill most of the memory, so transformers' own call is only watched here."""
    model, ids, calls = tiny.llama(), tiny.prompt(20), []

    def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return ids

    model.generate = generate
    with autospec.wrap(model, policy=Fixed("ngram", block_length=4)) as speculator:
        with pytest.warns(UserWarning, match="continuous batching"):
            assert model.generate(ids, cache_implementation="paged", max_new_tokens=4) is ids
        assert speculator.last_request is not None
        reason = speculator.last_request.fallback_reason
    assert reason == "a paged cache is decoded by transformers' continuous batching"
    assert calls == [{"cache_implementation": "paged", "max_new_tokens": 4}]


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_quantising_backends_that_are_missing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_optimum_quanto_available", "is_hqq_available"):
        monkeypatch.setattr(cache_utils, name, lambda: False)
    model = tiny.llama()
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend}, "max_new_tokens": 5}
    with pytest.raises(ImportError) as plain:
        model.generate(tiny.prompt(20), **options)
    with autospec.wrap(model, policy=Fixed("ngram", block_length=4)) as speculator:
        with pytest.raises(ImportError) as found:
            model.generate(tiny.prompt(20), **options)
        assert speculator.last_request is not None
        assert (speculator.last_request.error or "").startswith("ImportError")
    assert str(found.value) == str(plain.value)
