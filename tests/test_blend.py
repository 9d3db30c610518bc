"""The blend of retrieval and a model draft: who drafts when, and that the answer stays the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from test_drafts import request

import autospec
from autospec.drafts import Assistant, Blend, NGram, Suffix
from autospec.drafts.base import DraftRequest, Proposal
from autospec.errors import ConfigurationError, DraftError

pytestmark = pytest.mark.compat


class Scripted:
    """Says the same in every block."""

    def __init__(self, name: str, tokens: list[int], scores: Sequence[float] = ()) -> None:
        self.name = name
        self.proposal = Proposal(tokens, scores=scores)
        self.calls = 0
        self.learnt: list[list[int]] = []

    def attach(self, target: Any, tokenizer: Any) -> None:
        """Fits all."""

    def start(self, request: DraftRequest) -> Scripted:
        return self

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        self.calls += 1
        return replace(self.proposal, tokens=self.proposal.tokens[:block_length])

    def learn(self, request: DraftRequest, answer: Sequence[int]) -> None:
        self.learnt.append(list(answer))


def test_the_larger_promise_drafts() -> None:
    model = Scripted("model", [7, 7])
    sure, unsure = Scripted("sure", [1, 2], [0.9, 0.8]), Scripted("unsure", [3], [0.3])
    # the model's rate is one half at first: 0.5 + 0.25 for two tokens
    assert Blend(model, [unsure]).start(request()).propose([5], 2).tokens == [7, 7]
    assert Blend(model, [unsure, sure]).start(request()).propose([5], 2).tokens == [1, 2]
    assert model.calls == 1  # it is not even asked where retrieval drafts


def test_without_a_match_the_model_drafts() -> None:
    assert Blend(Scripted("model", [7]), ["ngram"]).start(request()).propose([5], 2).tokens == [7]


def test_promises_that_do_not_come_true_are_trusted_less() -> None:
    model, boaster = Scripted("model", [7, 7]), Scripted("boaster", [1, 2], [0.9, 0.8])
    session = Blend(model, [boaster]).start(request())
    committed, drafts = [5], []
    for _ in range(6):
        drafts.append(session.propose(committed, 2).tokens)
        committed = [*committed, 9, 9]
    assert drafts[0] == [1, 2]
    assert drafts[-1] == [7, 7]


def test_a_model_that_is_accepted_is_trusted_more_and_a_rejected_one_less() -> None:
    model, retrieval = Scripted("model", [7, 7]), Scripted("retrieval", [1, 2], [0.4, 0.3])
    session = Blend(model, [retrieval]).start(request())
    committed = [5]
    assert session.propose(committed, 2).tokens == [7, 7]
    for _ in range(6):
        committed = [*committed, 1, 2, 1]  # the model was wrong, and retrieval was right
        tokens = session.propose(committed, 2).tokens
    assert tokens == [1, 2]


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_answer_is_the_targets_own(do_sample: bool, sampling: str) -> None:
    target = tiny.llama()
    blend = Blend(Assistant(tiny.near_copy(target)), [NGram(min_ngram=1), Suffix(min_match=1)])
    drafted = 0
    for seed in range(6):
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": do_sample}
        torch.manual_seed(seed)
        plain = target.generate(tiny.prompt(20, seed), **options)
        for block_length in (1, 4):
            with autospec.wrap(
                target, drafts=[blend], policy=f"fixed:blend:{block_length}", sampling=sampling
            ) as speculator:
                torch.manual_seed(seed)
                found = target.generate(tiny.prompt(20, seed), **options)
                assert speculator.last_request is not None
                assert speculator.last_request.notes is None
                drafted += speculator.last_request.num_judged_tokens
            if not do_sample or sampling == "paired":
                assert torch.equal(plain, found)
    assert drafted > 100


def test_both_kinds_draft_in_one_request() -> None:
    target = tiny.llama()
    blend = Blend(Assistant(tiny.near_copy(target)), NGram(min_ngram=1))
    session = blend.start(request(do_sample=True, is_paired=False))
    committed = tiny.prompt(20)[0].tolist()
    kinds = set()
    for seed in range(12):
        torch.manual_seed(seed)
        proposal = session.propose(committed, 4)
        kinds.add(proposal.draft_probs is None)
        committed = [*committed, *proposal.tokens[: seed % 4], 1 + seed]
    assert kinds == {True, False}


def test_answers_reach_those_that_learn() -> None:
    model, retrieval = Scripted("model", []), Scripted("retrieval", [])
    target = tiny.llama()
    with autospec.wrap(target, drafts=[Blend(model, [retrieval])], policy="fixed:blend:2"):
        output = target.generate(tiny.prompt(20), max_new_tokens=6, do_sample=False)
    assert model.learnt == retrieval.learnt == [output[0, 20:].tolist()]


class Failing(Scripted):
    """Gives up when it is asked, or when it is started."""

    def __init__(self, name: str, at: str = "propose") -> None:
        super().__init__(name, [])
        self.at = at

    def start(self, request: DraftRequest) -> Scripted:
        if self.at == "start":
            raise DraftError("no more")
        return self

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        raise DraftError("no more")


@pytest.mark.parametrize("at", ["start", "propose"])
@pytest.mark.parametrize("which", ["model", "retrieval"])
def test_one_that_fails_is_left_out_with_the_reason(which: str, at: str) -> None:
    target = tiny.llama()
    model, retrieval = {
        "model": (Failing("broken", at), NGram()),
        "retrieval": (Scripted("model", [3, 4]), Failing("broken", at)),
    }[which]
    plain = target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
    with autospec.wrap(target, drafts=[Blend(model, retrieval)], policy="fixed:blend:2") as speculator:
        with pytest.warns(UserWarning, match="blend: broken left out: no more"):
            assert torch.equal(target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.notes == "blend: broken left out: no more"
        assert speculator.last_request.num_judged_tokens > 0


def test_without_any_it_is_off() -> None:
    target = tiny.llama()
    with autospec.wrap(target, drafts=[Blend(Failing("a"), Failing("b"))], policy="fixed:blend:2") as speculator:
        with pytest.warns(UserWarning, match="blend switched off: b left out: no more; a left out: no more"):
            target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
        assert speculator.last_request is not None
        assert "switched off" in (speculator.last_request.notes or "")


def test_drawn_tokens_are_not_retrieval() -> None:
    target = tiny.llama()
    blend = Blend(Scripted("model", [1]), Assistant(tiny.near_copy(target)))
    session = blend.start(request(do_sample=True, is_paired=False))
    proposal = session.propose(tiny.prompt(20)[0].tolist(), 2)
    assert proposal.tokens == [1]
    assert "drafts are drawn" in proposal.notes[0]


def test_a_part_that_cannot_work_is_named() -> None:
    with pytest.raises(DraftError, match="60 token ids, the target 64"):
        autospec.wrap(tiny.llama(), drafts=[Blend(Assistant(tiny.llama(vocab_size=60)))], policy="off")


@pytest.mark.parametrize(
    ("retrieval", "message"),
    [([], "at least one source is needed"), (["magic"], "unknown draft source 'magic'"), (["none"], "at least one")],
)
def test_bad_settings(retrieval: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Blend(Scripted("model", []), retrieval)
