"""A drafted token that breaks the model breaks the rows before its own, and must change nothing that is said."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import autospec
from autospec.backends import Static
from autospec.certify import Case, SyntheticModel, certify, random_table
from autospec.decoding.target import TargetSession
from autospec.drafts import Assistant, Proposal
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

BROKEN = 63
P, Q = random_table(1, 3), random_table(2, 3)


class Spoiling:
    """Drafts what will come, with the breaking token at one place of each block."""

    name = "spoiling"

    def __init__(self, answer: list[int], place: int) -> None:
        self._answer, self._place = answer, place

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Any:
        return self

    def propose(self, committed: Any, block_length: int) -> Proposal:
        tokens = self._answer[len(committed) : len(committed) + block_length]
        tokens[self._place : self._place + 1] = [BROKEN] * len(tokens[self._place : self._place + 1])
        return Proposal(tokens)


class Breaking(SyntheticModel):
    """Where a block holds the last token of the vocabulary, no row before it is a number."""

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, *args, **kwargs)
        places = (input_ids[0, 1:] == self.config.vocab_size - 1).nonzero()
        if len(places):
            outputs.logits = outputs.logits.clone()
            outputs.logits[:, : int(places[-1]) + 1] = torch.nan
        return outputs


@pytest.fixture(scope="module", params=[tiny.llama, tiny.mistral])
def target(request: pytest.FixtureRequest) -> Any:
    model = request.param()
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = torch.inf
        model.get_output_embeddings().weight[BROKEN] = 0.0
    return model


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("backend", ["eager", Static("plain", widths=(1, 2, 5), capacities=(64,))])
def test_answers_are_plain_decodings(target: Any, place: int, options: dict[str, Any], backend: Any) -> None:
    ids = tiny.prompt()
    everything = {**options, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
    torch.manual_seed(5)
    plain = target.generate(ids, **everything)
    assert BROKEN not in plain[0].tolist()
    with autospec.wrap(
        target, drafts=[Spoiling(plain[0].tolist(), place)], policy=Fixed("spoiling", block_length=4), backend=backend
    ) as speculator:
        torch.manual_seed(5)
        assert target.generate(ids, **everything).tolist() == plain.tolist()
        record = speculator.last_request
    assert record is not None
    assert record.fallback_reason is None
    assert place == 0 or record.num_accepted_tokens > 0  # the drafts before it still count


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_the_distribution_is_the_targets(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = SyntheticModel(Q, 3)
    case = Case(
        "broken rows",
        Breaking(P, 3),
        lambda: {"assistant": Assistant(draft)},
        policy=lambda: Fixed("assistant", block_length=2),
        max_new_tokens=4,
        sampling=sampling,
    )
    certificate = next(certify([case]))
    assert certificate.is_exact, certificate
    assert certificate.accepted > 0.1
    monkeypatch.setattr(TargetSession, "is_broken", lambda self, logits: False)
    try:
        was_found = not next(certify([case])).is_exact
    except (IndexError, RuntimeError):  # what is not a number cannot be drawn from
        was_found = True
    assert was_found
