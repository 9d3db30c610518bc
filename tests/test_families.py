"""Model families, as tiny random models made from configurations: exact with speculation, or plain with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import transformers
from test_decoder import Oracle
from transformers import AutoConfig, AutoModelForCausalLM

import autospec
from autospec.drafts import Assistant
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

COMMON: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "mistral": WINDOW,
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 256},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "mixtral": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "olmo2": {},
    "granite": {},
    "stablelm": {},
    "starcoder2": {},
}

ONE_ATTENTION = ("gemma2", "bloom", "mamba")  # no SDPA
EXPERTS = ("mixtral", "qwen2_moe")  # their grouped products exist in single precision only
NO_HEAD_DIM = ("falcon",)

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def make(family: str, options: dict[str, Any], attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    settings = {**COMMON, **options}
    if family in NO_HEAD_DIM:
        del settings["head_dim"]
    config = AutoConfig.for_model(family, **settings)
    kwargs = {} if family in ONE_ATTENTION else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, **kwargs).eval()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))  # its own: tied ones would repeat the last token
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # strong layers, so that answers depend on the whole context
            if parameter.dim() > 1 and "embed" not in name and parameter is not head.weight:
                parameter.mul_(6.0)
    return model.to(dtype)


@pytest.mark.parametrize(
    ("family", "attention"),
    [(f, a) for f in FAMILIES for a in ("sdpa", "eager") if not (f in ONE_ATTENTION and a == "sdpa")],
)
def test_greedy_and_sampled(family: str, attention: str) -> None:
    model = make(family, FAMILIES[family], attention, torch.float32 if family in EXPERTS else torch.float64)
    ids = tiny.prompt(24)
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0].tolist()
    assert depends_on_context(model, torch.tensor([answer]))
    sources = [Oracle(answer, spoil_every=5), Assistant(tiny.near_copy(model, noise=0.05))]
    for source in sources:
        for do_sample in (False, True):
            torch.manual_seed(2)
            plain = model.generate(ids, max_new_tokens=24, do_sample=do_sample)
            with autospec.wrap(model, drafts=[source], policy=Fixed(source.name, block_length=4)) as speculator:
                torch.manual_seed(2)
                found = model.generate(ids, max_new_tokens=24, do_sample=do_sample)
                record = speculator.last_request
            assert record is not None
            assert record.fallback_reason is None
            assert record.num_judged_tokens > 0
            if source.name == "oracle" and not do_sample:
                assert record.num_accepted_tokens > 10
            assert torch.equal(plain, found)


@torch.no_grad()
def depends_on_context(model: Any, ids: torch.Tensor) -> bool:
    """Does what was said earlier change the likeliest next tokens? Otherwise a broken cache would not show."""
    other = ids.clone()
    other[:, 18:30] = (other[:, 18:30] + 7) % tiny.VOCAB
    return not torch.equal(model(ids).logits[0, 31:].argmax(-1), model(other).logits[0, 31:].argmax(-1))


@pytest.mark.parametrize("family", RECURRENT)
def test_what_cannot_be_rolled_back_is_decoded_plainly(family: str) -> None:
    model = make(family, RECURRENT[family], dtype=torch.float32)
    ids = tiny.prompt(24)
    for do_sample in (False, True):
        torch.manual_seed(2)
        plain = model.generate(ids, max_new_tokens=16, do_sample=do_sample)
        with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:4") as speculator:
            torch.manual_seed(2)
            with pytest.warns(UserWarning, match="autospec"):
                found = model.generate(ids, max_new_tokens=16, do_sample=do_sample)
            record = speculator.last_request
        assert record is not None
        assert record.fallback_reason is not None
        assert record.num_draft_tokens == 0
        assert torch.equal(plain, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_differs_by_ties_at_most(dtype: torch.dtype) -> None:
    from autospec.decoding.ties import examine

    model = make("llama", {}, dtype=dtype)
    ids = tiny.prompt(24)
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
    source = Oracle(plain, spoil_every=7)
    with autospec.wrap(model, drafts=[source], policy=Fixed("oracle", block_length=5)):
        found = model.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
    difference = examine(model, ids, plain[24:], found[24:])
    assert difference is None or difference.is_tie, difference


def test_the_list_is_of_models_that_exist() -> None:
    assert {family for family in [*FAMILIES, *RECURRENT] if family not in transformers.CONFIG_MAPPING} == set()
