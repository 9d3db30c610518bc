"""Models whose blocks would be wrong are found out, and decoded plainly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from test_decoder import Oracle
from test_families import make
from transformers import T5Config, T5ForConditionalGeneration

import autospec
from autospec.caches import CACHE_KEYWORD, context_window, find_cache, stretches_beyond
from autospec.decoding.probe import probe
from autospec.drafts import NGram
from autospec.policies import Fixed

pytestmark = pytest.mark.compat


def seen_by(model: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Plain answer, wrapped answer drafted by an oracle, and the record."""
    plain = model.generate(ids, do_sample=False, **kwargs)
    source = Oracle(plain[0].tolist(), spoil_every=5)
    with autospec.wrap(model, drafts=[source], policy=Fixed("oracle", block_length=4)) as speculator:
        found = model.generate(ids, do_sample=False, **kwargs)
        return plain, found, speculator.last_request


@pytest.mark.parametrize("model", [tiny.llama(), tiny.mistral(window=8)], ids=["full", "window"])
def test_ordinary_models_pass(model: Any) -> None:
    assert probe(model) is None
    assert probe(copy.deepcopy(model).to(torch.bfloat16)) is None


class SeesTheFuture(tiny.LlamaForCausalLM):
    """Tokens of one forward see each other."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, **kwargs)
        if input_ids is not None and input_ids.shape[1] > 1:
            outputs.logits = outputs.logits.mean(dim=1, keepdim=True).expand_as(outputs.logits)
        return outputs


class ForgetsToCrop(tiny.LlamaForCausalLM):
    """Keeps something of its own that no rollback reaches."""

    seen = 0.0

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, **kwargs)
        cache = find_cache(outputs)
        cache.seen = getattr(cache, "seen", 0) + int(input_ids.sum())
        outputs.logits = outputs.logits + torch.sin(torch.arange(tiny.VOCAB) * cache.seen) * (input_ids.shape[1] == 1)
        return outputs


def as_kind(kind: type) -> Any:
    model = tiny.llama()
    model.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("kind", "reason"), [(SeesTheFuture, "a forward over several tokens"), (ForgetsToCrop, "several tokens|rollback")]
)
def test_faulty_models_are_left_alone(kind: type, reason: str) -> None:
    model = as_kind(kind)
    why = probe(model)
    assert why is not None
    with pytest.warns(UserWarning, match=reason):
        plain, found, record = seen_by(model, tiny.prompt(20), max_new_tokens=20)
    assert torch.equal(plain, found)
    assert record.fallback_reason == why
    with autospec.wrap(model) as speculator:  # auto: nothing to measure
        assert speculator.policy.name == "off"


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}


@pytest.mark.parametrize(("prompt_tokens", "is_plain"), [(10, True), (40, True), (5, False)])
def test_positions_that_stretch_with_the_text(prompt_tokens: int, is_plain: bool) -> None:
    model = make("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32})
    assert stretches_beyond(model) == 32
    new_tokens = 40 if is_plain else 20
    if is_plain:
        with pytest.warns(UserWarning, match="rotary positions stretch beyond 32 tokens"):
            plain, found, record = seen_by(model, tiny.prompt(prompt_tokens), max_new_tokens=new_tokens)
    else:
        plain, found, record = seen_by(model, tiny.prompt(prompt_tokens), max_new_tokens=new_tokens)
    assert torch.equal(plain, found)
    assert (record.num_draft_tokens == 0) == is_plain


def test_second_turn_with_only_the_new_ids_near_the_end_of_learned_positions() -> None:
    model = make("gpt2", {"max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 4})
    assert context_window(model) == 64

    def second_turn() -> Any:
        first = model.generate(tiny.prompt(40), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        new = torch.cat([first.sequences[:, -1:], tiny.prompt(6)], dim=1)
        length = find_cache(first).get_seq_length() + new.shape[1]
        return model.generate(
            new,
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=9,
            do_sample=False,
            **{CACHE_KEYWORD: find_cache(first)},
        )

    plain = second_turn()
    with autospec.wrap(model, drafts=[NGram(min_ngram=1)], policy="fixed:ngram:16"):
        assert torch.equal(second_turn(), plain)


@pytest.mark.parametrize("policy", ["auto", "off", "fixed:ngram:4"])
def test_encoder_decoder_models_wrap_and_fall_back(policy: str) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    plain = model.generate(tiny.prompt(10), max_new_tokens=8, do_sample=False)
    with autospec.wrap(model, policy=policy) as speculator, pytest.warns(UserWarning, match="encoder-decoder"):
        assert torch.equal(model.generate(tiny.prompt(10), max_new_tokens=8, do_sample=False), plain)
    assert speculator.last_request is not None


def test_a_model_that_cannot_even_be_probed() -> None:
    class Picky(tiny.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            if input_ids.shape[1] == 12:
                raise RuntimeError("not twelve")
            return super().forward(input_ids=input_ids, **kwargs)

    model = as_kind(Picky)
    with autospec.wrap(model) as speculator:
        with pytest.warns(UserWarning, match=r"could not be probed \(RuntimeError: not twelve\)"):
            model.generate(tiny.prompt(20), max_new_tokens=4, do_sample=False)
        assert speculator.policy.name == "off"


def test_a_model_with_a_generate_of_its_own() -> None:
    class Own(tiny.LlamaForCausalLM):
        def generate(self, features: Any, loud: bool = False) -> Any:  # type: ignore[override]
            return features, loud

    model = as_kind(Own)
    with autospec.wrap(model), pytest.warns(UserWarning, match="has a generate of its own"):
        assert model.generate(5, loud=True) == (5, True)
