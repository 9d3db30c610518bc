"""What a plain step does on the host beside the model's forward: counted, beside the steps of `generate` itself."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import autospec
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

FEW, MANY = 10, 30
STEPS = MANY - FEW
CALLS_BESIDE = 35  # 32 on transformers 5.17
DECODINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0}}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama(dtype=torch.float32, vocab_size=256, max_position_embeddings=4096)


@pytest.fixture(params=list(DECODINGS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**DECODINGS[request.param], "eos_token_id": 256, "pad_token_id": 0}


class Operators(TorchDispatchMode):
    """Counts torch's operators outside of the model's forward, and the bytes that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.is_inside:
            self.counts[func.overloadpacket.__name__] += 1
            given = {_storage(each) for each in tree_iter((args, kwargs or {})) if isinstance(each, Tensor)}
            made = [each for each in tree_iter(found) if isinstance(each, Tensor) and _storage(each) not in given]
            self.bytes += sum(each.untyped_storage().nbytes() for each in made)
        return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def forwards_apart(model: Any, operators: Operators) -> Iterator[None]:
    """What the model's forward does is not counted."""

    def before(*_: Any) -> None:
        operators.is_inside = True

    def after(*_: Any) -> None:
        operators.is_inside = False

    hooks = model.register_forward_pre_hook(before), model.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def decoded(model: Any, policy: Any | None, **settings: Any) -> Iterator[None]:
    if policy is None:
        yield
        return
    with autospec.wrap(model, policy=policy, control_share=0.0, **settings):
        yield


def operators_of_a_step(model: Any, policy: Any | None, prompt_tokens: int, options: dict[str, Any]) -> Operators:
    """Sums over `STEPS` plain steps."""
    ids = tiny.prompt(prompt_tokens)

    def count(tokens: int) -> Operators:
        operators = Operators()
        with decoded(model, policy), forwards_apart(model, operators), operators:
            assert model.generate(ids, max_new_tokens=tokens, **options).shape[1] == prompt_tokens + tokens
        return operators

    few, many = count(FEW), count(MANY)
    many.counts.subtract(few.counts)
    many.bytes -= few.bytes
    return many


def calls_of_steps(run: Callable[[int], Any]) -> int:
    """Functions of Python and of C that are called in `STEPS` steps."""

    def count(tokens: int) -> int:
        calls = 0

        def see(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        run(tokens)
        sys.setprofile(see)
        try:
            run(tokens)
        finally:
            sys.setprofile(None)
        return calls

    few = count(FEW)
    return count(MANY) - few


class TestOff:
    def test_no_more_operators_than_generate(self, model: Any, options: dict[str, Any]) -> None:
        theirs = operators_of_a_step(model, None, 30, options)
        ours = operators_of_a_step(model, "off", 30, options)
        assert 0 < ours.counts.total() < theirs.counts.total()
        assert theirs.counts["cat"] >= 2 * STEPS  # what is counted is what is done
        assert not ours.counts["cat"]

    def test_nothing_is_allocated_that_grows_with_the_text(self, model: Any, options: dict[str, Any]) -> None:
        short, long = (operators_of_a_step(model, "off", tokens, options).bytes for tokens in (30, 900))
        assert 0 < short == long
        theirs = [operators_of_a_step(model, None, tokens, options).bytes for tokens in (30, 900)]
        assert theirs[1] > theirs[0] + STEPS * 8 * 800  # of which generate's grows, copying token ids

    def test_a_mask_with_padding_is_not_copied(self, model: Any) -> None:
        ids, mask = tiny.prompt(30), torch.ones((1, 30), dtype=torch.long)
        mask[0, :3] = 0
        options = {"do_sample": False, "eos_token_id": 256, "pad_token_id": 0, "attention_mask": mask}

        def count(tokens: int) -> Counter[str]:
            operators = Operators()
            with decoded(model, "off"), forwards_apart(model, operators), operators:
                model.generate(ids, max_new_tokens=tokens, **options)
            return operators.counts

        steps = count(MANY)
        steps.subtract(count(FEW))
        assert steps["slice"]  # views
        assert not steps["cat"]
        assert not steps["ones"]
        assert not steps["new_ones"]

    def test_at_most_so_many_calls_beside_those_of_generate(self, model: Any, options: dict[str, Any]) -> None:
        ids = tiny.prompt(30)
        theirs = calls_of_steps(lambda tokens: model.generate(ids, max_new_tokens=tokens, **options))
        with autospec.wrap(model, policy="off"):
            ours = calls_of_steps(lambda tokens: model.generate(ids, max_new_tokens=tokens, **options))
        assert 0 < ours <= theirs + CALLS_BESIDE * STEPS

    def test_nobody_is_asked(self, model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise AssertionError

        for name in ("choose", "observe", "asks", "verify_width"):
            monkeypatch.setattr(f"autospec.controller.Controller.{name}", fail)
        monkeypatch.setattr("autospec.decoding.loop.spared", fail)
        with autospec.wrap(model, policy="off", drafts=["ngram", "suffix"]) as speculator:
            model.generate(tiny.prompt(30), max_new_tokens=MANY, **options)
            record = speculator.last_request
        assert record is not None
        assert (record.blocks, record.error) == (MANY - 1, None)

    @pytest.mark.parametrize("control_share", [0.0, 1.0])
    def test_the_record_is_that_of_blocks_one_by_one(
        self, model: Any, options: dict[str, Any], control_share: float
    ) -> None:
        class Told(Fixed):
            """Is asked before each block, and told of each."""

        found = []
        for policy in (Fixed(), Told()):
            with autospec.wrap(model, policy=policy, control_share=control_share) as speculator:
                model.generate(tiny.prompt(30), max_new_tokens=MANY, **options)
                found.append(speculator.last_request)
        assert Fixed().is_off
        assert not Told().is_off
        for name in ("blocks", "acceptance_lengths", "actions", "decisions", "at_risk", "accepted", "is_control"):
            assert getattr(found[0], name) == getattr(found[1], name)
        assert {label: tally.num_committed_tokens for label, tally in found[0].by_action.items()} == {"none": MANY - 1}
        assert found[0].by_action.keys() == found[1].by_action.keys()


def test_a_longer_answer_than_there_was_room_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and positions are made anew, with more room, and nothing of what is said changes."""
    mask = torch.ones((1, 30), dtype=torch.long)
    mask[0, :3] = 0
    options = {"do_sample": False, "max_new_tokens": 200, "attention_mask": mask, "pad_token_id": 0}
    plain = model.generate(tiny.prompt(30), **options)
    monkeypatch.setattr("autospec.decoding.target._ROOM", 2)
    for policy in ("off", "fixed:ngram:5"):
        with autospec.wrap(model, policy=policy):
            assert torch.equal(model.generate(tiny.prompt(30), **options), plain)


def test_a_model_that_updates_its_own_arguments_is_left_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(dtype=torch.float32)
    plain = model.generate(tiny.prompt(30), max_new_tokens=MANY, do_sample=False)
    usual = type(model)._update_model_kwargs_for_generation
    seen: list[int] = []

    def update(self: Any, outputs: Any, model_kwargs: Any, **options: Any) -> Any:
        seen.append(options["num_new_tokens"])
        return usual(self, outputs, model_kwargs, **options)

    monkeypatch.setattr(type(model), "_update_model_kwargs_for_generation", update)
    with autospec.wrap(model, policy="fixed:ngram:5"):
        assert torch.equal(model.generate(tiny.prompt(30), max_new_tokens=MANY, do_sample=False), plain)
    assert sum(seen) == MANY
