"""Packed linear layers: the model's own answers, whatever becomes of its weights, and nothing left in the model."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

import autospec
from autospec import backend_choice
from autospec.backends.backend import EAGER
from autospec.backends.packed import PackedLinears, linear_layers
from autospec.memory import free_bytes

GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 0}


@pytest.fixture
def target() -> Any:
    return tiny.llama(dtype=torch.float32)


@pytest.fixture
def speculator(target: Any) -> Any:
    with autospec.wrap(target, drafts=["ngram"], policy="fixed:ngram:3", backend="packed", control_share=0.0) as made:
        yield made


@pytest.fixture
def products(speculator: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many were packed ones, and others of linear layers."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return counted

    for layer in layers_of(speculator):
        layer._forward._multiply = counting("packed", layer._forward._multiply)
    monkeypatch.setattr(torch.nn.functional, "linear", counting("plain", torch.nn.functional.linear))
    return counts


class Look(LogitsProcessor):
    """Does something in the middle of an answer, before each token."""

    def __init__(self, look: Any) -> None:
        self._look = look
        self.seen: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.seen.append(self._look())
        return scores


def layers_of(speculator: Any) -> list[Any]:
    found: list[Any] = speculator.backend.packed[1]._layers
    return found


def is_clean(target: Any) -> bool:
    return not any("forward" in vars(module) for module in target.modules())


def own(target: Any, ids: Any, **options: Any) -> list[int]:
    """What the model says without autospec."""
    torch.manual_seed(3)
    plain = copy.deepcopy(target)
    vars(plain).pop("generate", None)
    output: list[int] = plain.generate(ids, **options)[0].tolist()
    return output


def said(target: Any, ids: Any, **options: Any) -> list[int]:
    torch.manual_seed(3)
    output: list[int] = target.generate(ids, **options)[0].tolist()
    return output


class TestAnswers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("options", [GREEDY, SAMPLED])
    def test_are_the_models_own(self, dtype: torch.dtype, options: Any) -> None:
        target = tiny.llama(dtype=dtype)
        with autospec.wrap(target, drafts=["ngram"], policy="fixed:ngram:3", backend="packed") as speculator:
            for seed in range(4):
                ids = tiny.prompt(20, seed=seed)
                assert said(target, ids, **options) == own(target, ids, **options)
            assert speculator.last_request.notes is None
            assert speculator.last_request.deployment.versions["backend"] == "packed"
            assert speculator.backend.captures == len(linear_layers(target))  # packed once
        assert is_clean(target)

    def test_are_computed_by_packed_layers_throughout(self, target: Any, products: Counter[str]) -> None:
        said(target, tiny.prompt(), **GREEDY)
        assert products["plain"] == 0
        assert products["packed"] >= len(linear_layers(target))
        assert products["packed"] % len(linear_layers(target)) == 0

    def test_controls_and_calls_of_the_users_are_not(
        self, target: Any, speculator: Any, products: Counter[str]
    ) -> None:
        with speculator.control():
            said(target, tiny.prompt(), **GREEDY)
        with torch.no_grad():
            target(tiny.prompt())
        assert products["packed"] == 0
        assert products["plain"] > 0
        assert speculator.last_request.deployment.versions.get("backend") is None

    def test_other_threads_run_the_models_own_forward(
        self, target: Any, speculator: Any, products: Counter[str]
    ) -> None:
        def elsewhere() -> int:
            before = products["plain"]

            def run() -> None:
                with torch.no_grad():
                    target(tiny.prompt())

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return products["plain"] - before

        look = Look(elsewhere)
        target.generate(tiny.prompt(), logits_processor=LogitsProcessorList([look]), **GREEDY)
        assert set(look.seen) == {len(linear_layers(target))}
        assert products["packed"] > 0

    def test_gradients_are_the_models_own(self, target: Any, speculator: Any, products: Counter[str]) -> None:
        def gradient() -> float:
            with torch.enable_grad():
                target.zero_grad()
                target(tiny.prompt()).logits.sum().backward()
            return float(target.model.layers[0].mlp.up_proj.weight.grad.abs().sum())

        look = Look(gradient)
        target.generate(tiny.prompt(), logits_processor=LogitsProcessorList([look]), **GREEDY)
        assert all(value > 0.0 for value in look.seen)
        assert products["plain"] == len(look.seen) * len(linear_layers(target))


class TestWeights:
    """After each of these the answer is that of the model as it is now."""

    @pytest.fixture(autouse=True)
    def _before(self, target: Any, speculator: Any) -> Any:
        ids = tiny.prompt()
        before = said(target, ids, **GREEDY)
        yield
        after = said(target, ids, **GREEDY)
        assert after == own(target, ids, **GREEDY)
        assert after != before

    @staticmethod
    def _noise(weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).to(weight.dtype)

    def test_changed_in_place(self, target: Any) -> None:
        with torch.no_grad():
            for layer in linear_layers(target):
                layer.weight.add_(self._noise(layer.weight))

    def test_changed_past_torchs_count(self, target: Any) -> None:
        for layer in linear_layers(target):
            layer.weight.data.add_(self._noise(layer.weight))

    def test_one_layer_changed_past_torchs_count(self, target: Any) -> None:
        layer = linear_layers(target)[-1]
        layer.weight.data.add_(self._noise(layer.weight))

    def test_replaced(self, target: Any) -> None:
        for layer in linear_layers(target):
            layer.weight = torch.nn.Parameter(self._noise(layer.weight))

    def test_data_replaced(self, target: Any) -> None:
        for layer in linear_layers(target):
            layer.weight.data = self._noise(layer.weight)

    def test_loaded(self, target: Any) -> None:
        target.load_state_dict(tiny.llama(seed=9, dtype=torch.float32).state_dict())

    def test_converted(self, target: Any) -> None:
        target.load_state_dict(tiny.llama(seed=9, dtype=torch.float32).state_dict())
        target.to(torch.bfloat16)

    def test_converted_to_what_is_not_packed(self, target: Any, speculator: Any) -> None:
        target.load_state_dict(tiny.llama(seed=9, dtype=torch.float32).state_dict())
        target.to(torch.float64)
        said(target, tiny.prompt(), **GREEDY)
        assert "the model was moved, converted or changed" in speculator.last_request.notes
        assert speculator.last_request.deployment.versions.get("backend") is None

    def test_a_layer_replaced(self, target: Any) -> None:
        attention = target.model.layers[0].self_attn
        other = torch.nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
        other.weight.data = self._noise(other.weight)
        attention.q_proj = other

    def test_a_hook(self, target: Any) -> None:
        target.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, given, output: -3.0 * output)


class TestModel:
    def test_nothing_is_left_after_an_error(self, target: Any, speculator: Any) -> None:
        def fail() -> None:
            raise RuntimeError("as asked")

        with pytest.raises(RuntimeError, match="as asked"):
            target.generate(tiny.prompt(), logits_processor=LogitsProcessorList([Look(fail)]), **GREEDY)
        assert is_clean(target)
        assert said(target, tiny.prompt(), **GREEDY) == own(target, tiny.prompt(), **GREEDY)

    def test_a_child_forked_meanwhile_has_the_models_own_layers(self, target: Any, speculator: Any) -> None:
        def fork() -> int:
            child = os.fork()
            if not child:
                os._exit(0 if is_clean(target) and not speculator.backend.packed[1]._users else 1)
            return os.waitpid(child, 0)[1]

        look = Look(fork)
        target.generate(tiny.prompt(), logits_processor=LogitsProcessorList([look]), **GREEDY)
        assert set(look.seen) == {0}
        assert is_clean(target)

    def test_no_memory_to_pack_anew(self, target: Any, speculator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: PackedLinears) -> None:
            raise RuntimeError("not enough memory")

        ids = tiny.prompt()
        target.load_state_dict(tiny.llama(seed=9, dtype=torch.float32).state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(PackedLinears, "_pack", fail)
            assert said(target, ids, **GREEDY) == own(target, ids, **GREEDY)
            assert "could not be packed anew: not enough memory" in speculator.last_request.notes
        assert said(target, ids, **GREEDY) == own(target, ids, **GREEDY)
        assert speculator.last_request.notes is None

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_made_meanwhile_are_their_own(self, target: Any, speculator: Any, how: Any) -> None:
        copies = []

        def take() -> None:
            if not copies:
                copies.append(how(target.model))

        target.generate(tiny.prompt(), logits_processor=LogitsProcessorList([Look(take)]), **GREEDY)
        (made,) = copies
        with torch.no_grad():
            before = made(tiny.prompt()).last_hidden_state
            assert torch.allclose(before, target.model(tiny.prompt()).last_hidden_state, atol=1e-5)
            for layer in linear_layers(made):
                layer.weight.mul_(0.0)
            assert not torch.allclose(made(tiny.prompt()).last_hidden_state, before)

    def test_copies_share_what_was_packed(self, target: Any, speculator: Any) -> None:
        other = copy.copy(target)
        vars(other).pop("generate", None)
        with autospec.wrap(other, drafts=["ngram"], policy="off", backend="packed") as second:
            assert second.backend.packed[1] is speculator.backend.packed[1]

    def test_several_threads_at_once(self, target: Any, speculator: Any, products: Counter[str]) -> None:
        prompts = [tiny.prompt(20, seed=seed) for seed in range(4)]
        expected = [own(target, ids, **GREEDY) for ids in prompts]
        products.clear()
        found: list[Any] = [None] * len(prompts)

        def run(number: int) -> None:
            for _ in range(5):
                found[number] = target.generate(prompts[number], **GREEDY)[0].tolist()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected
        assert products["plain"] == 0
        assert is_clean(target)

    def test_an_answer_inside_of_another(self, target: Any, speculator: Any, products: Counter[str]) -> None:
        def inner() -> list[int]:
            output: list[int] = target.generate(tiny.prompt(9), **GREEDY)[0].tolist()
            return output

        look = Look(inner)
        target.generate(tiny.prompt(), logits_processor=LogitsProcessorList([look]), **GREEDY)
        assert len({tuple(each) for each in look.seen}) == 1
        assert products["plain"] == 0

    def test_under_autocast_forwards_are_eager(self, target: Any, speculator: Any, products: Counter[str]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            target.generate(tiny.prompt(), **GREEDY)
        assert products["packed"] == 0
        assert "autocast is on" in speculator.last_request.notes

    def test_a_forward_of_its_own_that_came_later(self, target: Any, speculator: Any, products: Counter[str]) -> None:
        layer = linear_layers(target)[0]
        layer.forward = lambda states: torch.nn.functional.linear(states, layer.weight)
        target.generate(tiny.prompt(), **GREEDY)
        assert products["packed"] == 0
        assert "forward" in vars(layer)  # it is the user's
        assert "a forward of its own" in speculator.last_request.notes

    def test_memory(self, target: Any, speculator: Any) -> None:
        weights = sum(layer.weight.nbytes for layer in linear_layers(target))
        assert weights < speculator.backend.memory_bytes < 4 * weights  # rows of tiny weights are much of them
        backend = speculator.backend
        speculator.close()
        assert backend.memory_bytes == 0


class TestChoice:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOSPEC_COSTS", str(tmp_path))

    def _chosen(self, target: Any, monkeypatch: pytest.MonkeyPatch, asked: str, *measured: float) -> Any:
        monkeypatch.setattr(backend_choice, "LEAST_PACKED_BYTES", 0)
        if measured:
            monkeypatch.setattr(backend_choice, "measure_packed", lambda *_: dict(zip((1, 9), measured, strict=True)))
        else:
            monkeypatch.delattr(backend_choice, "measure_packed")
        with autospec.wrap(target, drafts=["ngram"], policy="off", backend=asked) as speculator:
            return speculator.backend

    def test_auto_leaves_small_models(self, target: Any) -> None:
        with autospec.wrap(target, drafts=["ngram"], policy="off") as speculator:
            assert speculator.backend.name == EAGER
            assert "too small for packing" in speculator.backend.reason

    def test_auto_takes_what_is_faster_and_remembers(self, target: Any, monkeypatch: Any) -> None:
        first = self._chosen(target, monkeypatch, "auto", 1.2, 1.5)
        assert (first.name, first.speedups) == ("packed", {1: 1.2, 9: 1.5})
        again = self._chosen(target, monkeypatch, "auto")  # nothing is measured
        assert (again.name, again.speedups) == ("packed", {1: 1.2, 9: 1.5})
        assert "measured to be faster" in str(again)

    @pytest.mark.parametrize("measured", [(1.02, 1.5), (1.5, 0.9)])
    def test_auto_leaves_what_is_not(self, target: Any, measured: Any, monkeypatch: Any) -> None:
        for ratios in (measured, ()):
            found = self._chosen(target, monkeypatch, "auto", *ratios)
            assert found.name == EAGER
            assert f"packed layers were measured at {min(measured):.2f} times the speed" in found.reason

    def test_what_was_asked_for_is_taken(self, target: Any, monkeypatch: Any) -> None:
        found = self._chosen(target, monkeypatch, "packed", 0.8, 1.5)
        assert (found.name, found.reason) == ("packed", "asked for, though measured at 0.80 times the speed")

    def test_auto_leaves_memory_to_others(self, target: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(backend_choice, "free_bytes", lambda: 1000)
        found = self._chosen(target, monkeypatch, "auto", 2.0, 2.0)
        assert found.name == EAGER
        assert "GB that are free" in found.reason

    def test_compiled_forwards_that_are_faster_still(self, target: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(
            backend_choice, "remembered", lambda model, settings: {1: 9.0} if settings != "packed" else None
        )
        monkeypatch.setattr(backend_choice, "prepare", lambda *_: (_ for _ in ()).throw(RuntimeError("was prepared")))
        assert self._chosen(target, monkeypatch, "auto", 2.0, 2.0).reason == "was prepared"

    def test_compiled_forwards_that_are_slower(self, target: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(
            backend_choice, "remembered", lambda model, settings: {1: 1.5} if settings != "packed" else None
        )
        assert self._chosen(target, monkeypatch, "auto", 2.0, 2.0).name == "packed"

    def test_what_cannot_be_packed(self, monkeypatch: Any) -> None:
        with (
            pytest.warns(UserWarning, match="forwards run eagerly: packing: it has no linear layers"),
            autospec.wrap(tiny.llama(), drafts=["ngram"], policy="off", backend="packed") as speculator,
        ):
            assert speculator.backend.name == EAGER

    def test_a_compiled_model(self, target: Any) -> None:
        target.forward = target.forward
        with (
            pytest.warns(UserWarning, match="has a forward of its own"),
            autospec.wrap(target, drafts=["ngram"], policy="off", backend="packed") as speculator,
        ):
            assert speculator.backend.name == EAGER

    def test_packed_layers_that_compute_something_else(self, target: Any, monkeypatch: Any) -> None:
        packing = PackedLinears._pack

        def wrongly(self: PackedLinears) -> None:
            packing(self)
            for layer in self._layers:
                layer._forward.packed = layer._forward.packed.to_dense().mul(3.0).to_mkldnn()

        monkeypatch.setattr(PackedLinears, "_pack", wrongly)
        with (
            pytest.warns(UserWarning, match="gives other logits"),
            autospec.wrap(target, drafts=["ngram"], policy="off", backend="packed") as speculator,
        ):
            assert speculator.backend.name == EAGER

    def test_speedups_are_measured(self, target: Any) -> None:
        with autospec.wrap(target, drafts=["ngram"], policy="off", backend="packed") as speculator:
            assert set(speculator.backend.speedups) == {1, 9}
            assert all(0.0 < ratio < 100.0 for ratio in speculator.backend.speedups.values())


def test_free_memory() -> None:
    free = free_bytes()
    assert free is None or 0 < free < 1 << 50
