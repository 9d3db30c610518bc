"""What prepared forwards would leave out or not see: such models, requests and caches are decoded eagerly."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import tiny
import torch
from test_backends import PLAIN
from transformers import DynamicCache, GenerationMixin, LlamaForCausalLM

import autospec
from autospec.backends.backend import prepare
from autospec.backends.plain import PlainRunner
from autospec.caches import CACHE_KEYWORD, append, decoding_cache
from autospec.drafts import Assistant, NGram
from autospec.policies import Fixed
from autospec.types import Action

pytestmark = pytest.mark.compat

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model reads the letter after each."""
    inputs = GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)
    inputs["input_ids"] = (inputs["input_ids"] + 1) % tiny.VOCAB
    return inputs


def usual_update(self: Any, *args: Any, **kwargs: Any) -> Any:
    return GenerationMixin._update_model_kwargs_for_generation(self, *args, **kwargs)


class Shifted(LlamaForCausalLM):  # type: ignore[misc]
    prepare_inputs_for_generation = shifted


def wrapped(model: Any) -> Any:
    return autospec.wrap(model, drafts=[NGram(min_ngram=1)], policy=Fixed("ngram", block_length=3), backend=PLAIN)


class TestAWayOfItsOwn:
    """Around its forwards: `generate` goes it, and prepared forwards would not."""

    @pytest.mark.parametrize("where", ["class", "model"])
    def test_to_prepare_inputs(self, where: str) -> None:
        model = tiny.llama()
        unchanged = model.generate(tiny.prompt(20), **GREEDY)
        if where == "class":
            model.__class__ = Shifted
        else:
            model.prepare_inputs_for_generation = MethodType(shifted, model)
        plain = model.generate(tiny.prompt(20), **GREEDY)
        assert not torch.equal(plain, unchanged)
        with pytest.warns(UserWarning, match="it has a prepare_inputs_for_generation of its own"):
            speculator = wrapped(model)
        with speculator:
            assert speculator.backend.name == "eager"
            assert torch.equal(model.generate(tiny.prompt(20), **GREEDY), plain)

    def test_that_it_got_later(self) -> None:
        model = tiny.llama()
        with wrapped(model) as speculator:
            assert speculator.backend.name == "plain"
            model.prepare_inputs_for_generation = MethodType(shifted, model)
            found = model.generate(tiny.prompt(20), **GREEDY)
            assert speculator.last_request.notes == "decoded eagerly: it has a prepare_inputs_for_generation of its own"
            assert torch.equal(found, speculator._original(tiny.prompt(20), **GREEDY))
            del model.prepare_inputs_for_generation
            model.generate(tiny.prompt(20), **GREEDY)
            assert speculator.last_request.notes is None

    def test_to_update_what_is_carried(self) -> None:
        model = tiny.llama()
        model._update_model_kwargs_for_generation = MethodType(usual_update, model)
        with pytest.warns(UserWarning, match="it has a _update_model_kwargs_for_generation of its own"):
            speculator = wrapped(model)
        with speculator:
            assert speculator.backend.name == "eager"


def test_an_update_of_the_models_own_is_called_in_eager_decoding() -> None:
    """One that stands in the model itself, too, not only in its class."""
    model = tiny.llama()
    seen: list[int] = []

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["num_new_tokens"])
        return usual_update(self, *args, **kwargs)

    model._update_model_kwargs_for_generation = MethodType(update, model)
    with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:4", backend="eager"):
        model.generate(tiny.prompt(20), **GREEDY)
    assert sum(seen) == 20


class TestACacheThatWasHandedIn:
    def notes(self, cache: Any, model: Any, ids: torch.Tensor, policy: Any = "fixed:ngram:3") -> str | None:
        with autospec.wrap(model, drafts=["ngram"], policy=policy, backend=PLAIN) as speculator:
            assert speculator.backend.name == "plain"
            model.generate(ids, **GREEDY, **{CACHE_KEYWORD: cache})
            assert speculator.last_request is not None
            assert cache.get_seq_length() == ids.shape[1] + 19
            notes: str | None = speculator.last_request.notes
            return notes

    def test_of_another_class(self) -> None:
        class Own(DynamicCache):  # type: ignore[misc]
            """May do anything with what it is given."""

        model = tiny.llama()
        notes = self.notes(Own(config=model.config), model, tiny.prompt(20))
        assert notes == "decoded eagerly: its cache (Own) is one of its own kind"

    def test_with_more_layers(self) -> None:
        model, deeper = tiny.llama(), tiny.llama(num_hidden_layers=3)
        ids = tiny.prompt(20)
        with torch.no_grad():
            _, cache = append(model, ids[:, :10], decoding_cache(model))
            cache.layers.append(append(deeper, ids, decoding_cache(deeper))[1].layers[2])
        notes = self.notes(cache, model, ids, policy="off")
        assert (
            notes == "decoded eagerly: its cache differs from the model's own in layers, heads, sizes, dtype or device"
        )

    @pytest.mark.parametrize("what", ["layers", "heads", "size", "dtype"])
    def test_whatever_differs_is_seen(self, what: str) -> None:
        model = tiny.llama()
        (static,) = prepare(model, {}, PLAIN).models
        options: dict[str, Any] = {
            "layers": {"num_hidden_layers": 3},
            "heads": {"num_key_value_heads": 4},
            "size": {"head_dim": 16},
            "dtype": {"dtype": torch.float32},
        }[what]
        other = tiny.llama(**options)
        with torch.no_grad():
            assert static.fits(append(model, tiny.prompt(9), decoding_cache(model))[1])
            assert not static.fits(append(other, tiny.prompt(9), decoding_cache(other))[1])


def test_a_draft_model_that_two_sources_share_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    draft = tiny.near_copy(model)
    prepared: list[Any] = []
    usual = PlainRunner.prepare
    monkeypatch.setattr(PlainRunner, "prepare", lambda self, forward: prepared.append(None) or usual(self, forward))
    backend = prepare(model, {"first": draft, "second": draft}, PLAIN)
    assert len(backend.models) == 2
    assert len(prepared) == backend.captures == 2 * 20


def test_two_sources_that_share_a_draft_take_turns() -> None:
    model = tiny.llama()
    draft = tiny.near_copy(model)
    first, second = Assistant(draft), Assistant(draft, greedy=True)
    second.name = "second"
    plain = model.generate(tiny.prompt(20), **GREEDY)

    class Turns(Fixed):
        """Asks one, then the other."""

        number = 0

        def choose(self, context: Any) -> Any:
            self.number += 1
            return Action(("assistant", "second")[self.number % 2], 3)

    with autospec.wrap(model, drafts=[first, second], policy=Turns("assistant", block_length=3), backend=PLAIN) as s:
        assert len(s.backend.models) == 2
        assert torch.equal(model.generate(tiny.prompt(20), **GREEDY), plain)
        assert s.last_request is not None
        assert set(s.last_request.actions) >= {"assistant:3", "second:3"}


def test_buffers_made_in_inference_mode_are_written_to_outside() -> None:
    model = tiny.llama()
    with torch.inference_mode():
        made = prepare(model, {}, PLAIN)
    (static,) = made.models
    assert not static._store.keys.is_inference()
    with torch.no_grad():
        _, cache = append(model, tiny.prompt(9), decoding_cache(model))
        static.load(cache)
        assert static.run(tiny.prompt(2)).shape == (2, tiny.VOCAB)
