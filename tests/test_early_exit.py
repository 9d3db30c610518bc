"""The target's own first layers as a draft: shared weights, an untouched target, and nothing but worse guesses."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from test_drafts import request
from test_families import EXPERTS, FAMILIES, make

import autospec
from autospec.drafts import EarlyExit, exit_choice
from autospec.drafts.early_exit import first_layers_of
from autospec.drafts.exit_choice import goodput
from autospec.errors import ConfigurationError, DraftError

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(num_hidden_layers=4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral", "gpt2", "gpt_neox", "phi", "mixtral"])
def test_drafts_with_every_family_and_stays_exact(family: str) -> None:
    model = make(family, FAMILIES[family], dtype=torch.float32 if family in EXPERTS else torch.float64)
    ids = tiny.prompt(20)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    for do_sample in (False, True):
        options = {"max_new_tokens": 16, "do_sample": do_sample, "temperature": 0.8}
        torch.manual_seed(1)
        plain = model.generate(ids, **options)
        with autospec.wrap(model, drafts=[EarlyExit(1)], policy="fixed:early_exit:3") as speculator:
            torch.manual_seed(1)
            assert torch.equal(model.generate(ids, **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.fallback_reason is None
            assert speculator.last_request.num_judged_tokens > 0
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_it_is_the_first_layers_and_shares_their_weights(target: Any) -> None:
    draft = first_layers_of(target, 2)
    alone = copy.deepcopy(target)
    del alone.model.layers[2:]
    ids = tiny.prompt(20)
    with torch.no_grad():
        assert torch.equal(draft(ids, use_cache=False).logits, alone(ids, use_cache=False).logits)
        assert not torch.equal(draft(ids).logits, target(ids).logits)
    ours = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} < ours
    assert len(target.model.layers) == 4
    assert draft.config is not target.config
    target.model.layers[0].mlp.up_proj.weight.data.mul_(1.0)
    assert draft.model.layers[0] is target.model.layers[0]


def test_maximal_sampling_and_stop_rules(target: Any) -> None:
    source = EarlyExit(2, max_entropy=3.5)
    with autospec.wrap(target, drafts=[source], policy="fixed:early_exit:4", sampling="maximal") as speculator:
        target.generate(tiny.prompt(20), max_new_tokens=20, do_sample=True)
        assert speculator.last_request is not None
        assert speculator.last_request.num_judged_tokens > 0


def test_a_failing_draft_leaves_the_target_as_it_is(target: Any) -> None:
    ids = tiny.prompt(20)
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    source = EarlyExit(2)
    with autospec.wrap(target, drafts=[source], policy="fixed:early_exit:3"):
        assert source._assistant is not None
        source._assistant.model.forward = lambda **_: 1 / 0
        with pytest.warns(UserWarning, match="early_exit switched off: ZeroDivisionError"):
            assert torch.equal(target.generate(ids, max_new_tokens=8, do_sample=False), plain)
    assert torch.equal(target.generate(ids, max_new_tokens=8, do_sample=False), plain)


def test_a_draft_that_fails_between_two_layers_leaves_the_targets_cache_whole(target: Any) -> None:
    ids = tiny.prompt(20)
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    with autospec.wrap(target, drafts=[source := EarlyExit(3)], policy="fixed:early_exit:3"):
        assert source._assistant is not None
        layers = source._assistant.model.model.layers
        broken = copy.copy(layers[1])
        broken.forward = lambda *args, **kwargs: 1 / 0
        layers[1] = broken
        with pytest.warns(UserWarning, match="early_exit switched off: ZeroDivisionError"):
            assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False), plain)


def draft_forwards(source: EarlyExit, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward of the draft."""
    assert source._assistant is not None
    model, widths = source._assistant.model, []
    forward = type(model).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            widths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    return widths


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_targets_cache_is_used(target: Any, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is run through the first layers that the target has run through them already."""
    ids = tiny.prompt(20)
    with autospec.wrap(target, drafts=[source := EarlyExit(2)], policy="fixed:early_exit:3") as speculator:
        widths = draft_forwards(source, monkeypatch)
        target.generate(ids, max_new_tokens=20, do_sample=do_sample)
        assert speculator.last_request is not None
        assert set(widths) == {1}
        assert len(widths) == speculator.last_request.num_draft_tokens


@pytest.mark.parametrize("kind", ["sliding window", "padded prompt"])
def test_otherwise_it_has_a_cache_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.mistral() if kind == "sliding window" else tiny.llama()
    ids = tiny.prompt(20)
    mask = torch.ones_like(ids)
    if kind == "padded prompt":
        mask[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    with autospec.wrap(model, drafts=[source := EarlyExit(1)], policy="fixed:early_exit:3") as speculator:
        widths = draft_forwards(source, monkeypatch)
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.num_judged_tokens > 0
    assert widths[0] > 1


class TestChoice:
    """How many layers, when nobody says."""

    def test_layers_that_change_nothing_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exit_choice, "_step_seconds", lambda model, _: model.config.num_hidden_layers)
        model = tiny.llama(num_hidden_layers=8)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(100.0)  # without this one nothing is right
            for layer in model.model.layers[2:]:  # what they add is nothing
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        with autospec.wrap(model, drafts=[source := EarlyExit()], policy="off"):
            assert source.num_layers == 2

    def test_a_draft_that_agrees_is_worth_its_time(self) -> None:
        assert goodput(0.0, 0.1) == pytest.approx(1 / 1.1)
        assert goodput(1.0, 0.1) == pytest.approx(9 / 1.8)
        assert goodput(0.5, 1.0) < 1 < goodput(0.8, 0.1)

    def test_one_layer_cannot_be_split(self) -> None:
        with pytest.raises(DraftError, match="has 1 layer, and fewer are needed"):
            autospec.wrap(tiny.llama(num_hidden_layers=1), drafts=[EarlyExit()], policy="off")


def test_one_thread_drafts_while_another_decodes_plainly(target: Any) -> None:
    ids = tiny.prompt(20)
    other = copy.copy(target)
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    with autospec.wrap(target, drafts=[EarlyExit(1)], policy="fixed:early_exit:3"), ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(model.generate, ids, max_new_tokens=24, do_sample=False) for model in (target, other) * 4]
        assert all(torch.equal(call.result(), plain) for call in calls)


@pytest.mark.parametrize("part", ["model", "decoder"])
def test_a_forward_that_was_replaced_is_refused(part: str) -> None:
    """A copy would run it on the whole model, and call that an early exit."""
    model = tiny.llama(num_hidden_layers=3)
    module = model if part == "model" else model.model
    module.forward = module.forward
    with pytest.raises(DraftError, match="its forward was replaced"):
        first_layers_of(model, 1)


@pytest.mark.parametrize("num_layers", [4, 99])
def test_as_many_layers_as_the_target_are_refused(target: Any, num_layers: int) -> None:
    with pytest.raises(DraftError, match=f"early_exit of {num_layers} layers: LlamaForCausalLM has 4"):
        autospec.wrap(target, drafts=[EarlyExit(num_layers)], policy="off")
    assert "generate" not in vars(target)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "3"])
def test_no_number_of_layers(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        EarlyExit(wrong)


def test_before_it_is_attached() -> None:
    with pytest.raises(DraftError, match="no target yet"):
        EarlyExit(1).start(request())
