"""How a draft model draws a block: what it looks at, how often it waits, and what is submitted when it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import autospec
from autospec.drafts import Assistant
from autospec.drafts.base import DraftRequest, Proposal
from autospec.drafts.drawing import Prefix
from autospec.errors import DraftError
from autospec.policies import Fixed
from autospec.randomness import TorchRandomness

WAITS = ("_local_scalar_dense", "is_nonzero", "item", "equal")


def request(processors: Any = (), *, do_sample: bool = False, is_paired: bool = True, seed: int = 0) -> DraftRequest:
    generator = torch.Generator().manual_seed(seed)
    return DraftRequest(
        device=torch.device("cpu"),
        vocab_size=tiny.VOCAB,
        do_sample=do_sample,
        processors=LogitsProcessorList(processors),
        randomness=TorchRandomness(torch.device("cpu"), generator),
        scores_dtype=torch.float32,
        is_paired=is_paired,
    )


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return sum(self.counts[name] for name in WAITS)


@contextmanager
def _lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a tensor is turned into a list, which waits for a device."""
    found: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        found.append(self.numel())
        return tolist(self)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        yield found


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(dtype=torch.float32)


@pytest.fixture(scope="module")
def assistant(target: Any) -> Any:
    source = Assistant(tiny.near_copy(target))
    source.attach(target, None)
    return source


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, processed": {"processors": [RepetitionPenaltyLogitsProcessor(1.5)]},
    "paired": {"do_sample": True},
    "paired, processed": {"do_sample": True, "processors": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]},
    "maximal": {"do_sample": True, "is_paired": False},
    "maximal, processed": {
        "do_sample": True,
        "is_paired": False,
        "processors": [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.9)],
    },
}


@contextmanager
def _ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a device that is waited for."""
    with monkeypatch.context() as patch:
        patch.setattr("autospec.drafts.assistant.draws_ahead", lambda device: True)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_drawing_ahead_draws_the_same(assistant: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text: list[int] = tiny.prompt(20)[0].tolist()
    found: list[list[Proposal]] = []
    for ahead in (False, True):
        committed = list(text)
        torch.manual_seed(0)
        if ahead:
            with _ahead(monkeypatch):
                session = assistant.start(request(**KINDS[kind]))
        else:
            session = assistant.start(request(**KINDS[kind]))
        proposals = []
        for length in (5, 1, 4, 8):
            proposals.append(session.propose(committed, length))
            committed += [*proposals[-1].tokens[:3], 1]  # some accepted, one of the target's own
        found.append(proposals)
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert (one.draft_probs is None) == (other.draft_probs is None)
        if one.draft_probs is not None and other.draft_probs is not None:
            assert torch.equal(one.draft_probs, other.draft_probs)
    assert [len(each.tokens) for each in found[0]] == [5, 1, 4, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_drawn_ahead_waits_once(assistant: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text: list[int] = tiny.prompt(20)[0].tolist()
    with _ahead(monkeypatch):
        session = assistant.start(request(**KINDS[kind]))
    session.propose(text, 2)
    with _lists(monkeypatch) as lists, Counting() as counting:
        assert len(session.propose([*text, 1], 6).tokens) == 6
    assert counting.waits == 0, counting.counts
    assert len(lists) == 1


def test_operations_of_a_greedy_token(assistant: Any) -> None:
    """Beside the draft's own forward: the likeliest token with its score, and what makes the next forward's input."""
    text: list[int] = tiny.prompt(20)[0].tolist()
    session = assistant.start(request())
    session.propose(text, 2)

    def counts(length: int) -> Counter[str]:
        with Counting() as counting:
            assert len(session.propose(text, length).tokens) == length
        return counting.counts

    forward = _operations_of_a_forward(assistant.model)
    few, many = counts(2), counts(6)
    extra = {name: (many[name] - few[name]) / 4 - forward[name] for name in many}
    extra = {name: count for name, count in extra.items() if count}
    assert extra.pop("max") == 1
    assert extra.pop("_local_scalar_dense") == 2
    assert not extra, extra


def _operations_of_a_forward(model: Any) -> Counter[str]:
    from autospec.caches import append, new_cache

    with torch.no_grad():
        _, cache = append(model, torch.tensor([[1, 2, 3]]), new_cache(model))
        with Counting() as counting:
            append(model, torch.tensor([[4]]), cache)
    return counting.counts


class BreaksAt(LogitsProcessor):
    """Leaves nothing to draw at a position, or makes it no number."""

    def __init__(self, length: int, value: float) -> None:
        self._length = length
        self._value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self._value) if input_ids.shape[1] == self._length else scores


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["greedy, processed", "paired, processed", "maximal, processed"])
@pytest.mark.parametrize("where", [0, 1, 3])
def test_processors_that_leave_nothing_end_the_block(
    assistant: Any, where: int, kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text: list[int] = tiny.prompt(20)[0].tolist()
    options = {**KINDS[kind], "processors": [BreaksAt(20 + where, -torch.inf)]}
    with _ahead(monkeypatch) if ahead else monkeypatch.context():
        session = assistant.start(request(**options))
    proposal = session.propose(text, 5)
    assert len(proposal.tokens) == where
    if proposal.draft_probs is not None:
        assert proposal.draft_probs.shape == (where, tiny.VOCAB)
        assert proposal.draft_probs.isfinite().all()
    assert len(session.propose([*text, *proposal.tokens, 1], 5).tokens) == 5


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [0, 1, 3])
def test_logits_that_are_not_finite_end_the_draft(
    target: Any, where: int, kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was drawn before is submitted, and the source fails at the next call; at once where nothing was drawn."""
    source = Assistant(tiny.near_copy(target))
    source.attach(target, None)
    text: list[int] = tiny.prompt(20)[0].tolist()
    calls: list[int] = []

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        return output * torch.nan if len(calls) == 2 + where else None  # the prompt but its last token is read first

    handle = source.model.lm_head.register_forward_hook(spoil)
    try:
        with _ahead(monkeypatch) if ahead else monkeypatch.context():
            session = source.start(request(**KINDS[kind]))
        if where == 0:
            with pytest.raises(DraftError, match="not finite"):
                session.propose(text, 5)
            return
        proposal = session.propose(text, 5)
        assert len(proposal.tokens) == where
        if proposal.draft_probs is not None:
            assert proposal.draft_probs.shape == (where, tiny.VOCAB)
        with pytest.raises(DraftError, match="not finite"):
            session.propose([*text, *proposal.tokens, 1], 5)
    finally:
        handle.remove()


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_whole_answers_drawn_ahead(
    target: Any, sampling: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tiny.prompt(20)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": do_sample}
    torch.manual_seed(3)
    plain = target.generate(ids, **options)
    with (
        _ahead(monkeypatch),
        autospec.wrap(
            target,
            drafts=[Assistant(tiny.near_copy(target))],
            policy=Fixed("assistant", block_length=5),
            sampling=sampling,
        ) as speculator,
    ):
        torch.manual_seed(3)
        found = target.generate(ids, **options)
        record = speculator.last_request
    assert record is not None
    assert record.notes is None
    assert 0 < record.num_accepted_tokens < record.num_judged_tokens
    if sampling == "paired" or not do_sample:
        assert torch.equal(plain, found)


def test_a_prefix_follows_the_text() -> None:
    prefix = Prefix(torch.device("cpu"))
    text = [5, 6, 7]
    prefix.follow(text, 2)
    prefix.append(0, 9)
    prefix.append(1, torch.tensor(8))
    assert prefix.first(2).tolist() == [[5, 6, 7, 9, 8]]
    text += [9, 1]
    prefix.follow(text, 300)
    assert prefix.first(0).tolist() == [[5, 6, 7, 9, 1]]
    for position in range(300):
        prefix.append(position, position)
    assert prefix.first(300).tolist() == [[*text, *range(300)]]
