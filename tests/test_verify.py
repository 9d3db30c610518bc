"""`autospec verify` on a tiny model: what is the same is called so, and a fault is found."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from test_demo import chat_tokenizer, some_prompts

from autospec.decoding.target import TargetSession
from autospec.drafts import Assistant
from autospec.verify import verify_greedy


def verdicts(**options: Any) -> list[Any]:
    model = tiny.llama()
    drafts = ["ngram", Assistant(tiny.near_copy(model), tokenizer=chat_tokenizer())]
    return list(
        verify_greedy(model, chat_tokenizer(), some_prompts()[:3], drafts=drafts, block_lengths=(1, 4), **options)
    )


def test_every_source_and_length_is_identical() -> None:
    found = verdicts()
    assert [(v.source, v.block_length) for v in found[:4]] == [
        ("ngram", 1),
        ("ngram", 4),
        ("assistant", 1),
        ("assistant", 4),
    ]
    assert len(found) == 12
    assert {v.kind for v in found} == {"identical"}
    assert {v.output_tokens for v in found} == {16}
    assert sum(v.num_accepted_tokens for v in found) > 0
    assert all(v.fallback_reason is None for v in found)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TargetSession.forward

    def blurred(self: Any, *args: Any) -> torch.Tensor:
        return forward(self, *args).roll(1, dims=0)

    monkeypatch.setattr(TargetSession, "forward", blurred)
    found = verdicts(max_new_tokens=8)
    faults = [v for v in found if v.kind == "different"]
    assert faults
    assert all(v.difference.logit_gap > v.difference.tolerance for v in faults)
