"""`auto` in whole requests: what it comes to, and what the report says of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_goodput import Costs

import autospec
from autospec.drafts import Proposal
from autospec.policies import Goodput, Guard
from autospec.telemetry.explain import find_request
from autospec.telemetry.report import build_report, to_text
from autospec.telemetry.store import Store


class SeldomRight:
    """A model draft's stand-in: each token is right with a probability of 30 %."""

    name = "assistant"

    def __init__(self, text: list[int], seed: int) -> None:
        self._text = text
        self._random = random.Random(seed)

    def attach(self, target: Any, tokenizer: Any) -> None:
        """Works with the target whose text it knows."""

    def start(self, request: Any) -> Any:
        return self

    def propose(self, committed: Any, block_length: int) -> Proposal:
        following = self._text[len(committed) : len(committed) + block_length]
        return Proposal([t if self._random.random() < 0.3 else (t + 1) % tiny.VOCAB for t in following])


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_half_as_expensive_and_seldom_right_ends_off_and_the_report_says_so(tmp_path: Path, seed: int) -> None:
    model = tiny.llama()
    prompt = tiny.prompt(20, seed)
    plain = model.generate(prompt, max_new_tokens=200, do_sample=False)
    costs = Costs(draft_per_token=0.020)  # a step takes 0.040
    policy = Guard(Goodput(costs), costs, control_share=0.0, name="auto")
    url = f"sqlite:///{tmp_path / 't.db'}"
    source = SeldomRight(plain[0].tolist(), seed)
    with autospec.wrap(model, drafts=[source], policy=policy, store=url, trace=1.0):
        output = model.generate(prompt, max_new_tokens=200, do_sample=False, segment="slow draft")
    assert torch.equal(output, plain)
    with Store(url, readonly=True) as store:
        record, blocks, *_ = find_request(store, "last")
        report = build_report(store.requests(), store.comparisons())
    late = [block.action for block in blocks[30:]]
    assert {action.reason_kind for action in late} <= {"off", "explore", "guard"}
    assert sum(action.block_length > 0 for action in late) <= 0.1 * len(late)
    assert record.usual_action == "none"
    assert record.decisions["none off"] > 0.8 * record.blocks
    (row,) = report.segments
    assert row.usual_action == "none"
    line = next(line for line in to_text(report).splitlines() if line.startswith("slow draft") and "none" in line)
    assert line.split()[-1] == "none"
