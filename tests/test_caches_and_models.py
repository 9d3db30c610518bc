"""Caches, models and inputs: exact under blocks, or decoded plainly with the reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import tiny
import torch
from compared import answer, assert_exact, assert_plain, no_options
from test_decoder import Oracle
from test_families import make
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Cache,
    DynamicCache,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import QuantizedLayer

import autospec
from autospec.backends import Static
from autospec.caches import CACHE_KEYWORD, find_cache
from autospec.drafts import Assistant
from autospec.policies import Fixed

pytestmark = [
    pytest.mark.compat,
    pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"]),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft still asks
]

Options = dict[str, Any]
PROMPT = tiny.prompt(28, seed=1, period=24)


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", {})


def window() -> Any:
    return make("mistral", {"sliding_window": 8})


# --- caches ---


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("is_given", [False, True], ids=["made", "given"])
def test_dynamic_caches(target: Any, do_sample: bool, kind: str, is_given: bool) -> None:
    model = target if kind == "full" else window()
    assert_exact(
        model,
        PROMPT,
        lambda: {CACHE_KEYWORD: DynamicCache(config=model.config)} if is_given else {},
        do_sample=do_sample,
        spoil_every=3,
    )


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("is_given", [False, True], ids=["asked", "given"])
def test_static_caches_are_left_to_generate(target: Any, do_sample: bool, kind: str, is_given: bool) -> None:
    model = target if kind == "full" else window()

    def options() -> Options:
        if is_given:
            return {CACHE_KEYWORD: StaticCache(config=model.config, max_cache_len=64)}
        return {"cache_implementation": "static"}

    assert_plain(model, PROMPT, "a cache of fixed shape (StaticCache)", options, do_sample=do_sample)


def test_offloaded_caches(target: Any, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys wait in main memory between forwards. Here they are there already, and only the streams are missing."""

    class Stream(nullcontext[None]):
        def wait_stream(self, other: Any) -> None:
            pass

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    assert_exact(target, PROMPT, lambda: {"cache_implementation": "offloaded"}, do_sample=do_sample)


class NoCacheOfTheirs:
    """Looks like a cache to a model, and is not one of transformers' own."""

    is_compileable = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_users_own_kind_of_cache_is_decoded_plainly(target: Any, do_sample: bool) -> None:
    reason = "decoded plainly: the cache (NoCacheOfTheirs) is not one of transformers' own"
    assert_plain(
        target,
        PROMPT,
        reason,
        lambda: {CACHE_KEYWORD: NoCacheOfTheirs(DynamicCache(config=target.config))},
        do_sample=do_sample,
        inside=True,
    )


def test_without_a_cache(target: Any, do_sample: bool) -> None:
    assert_plain(target, PROMPT, "use_cache=False", lambda: {"use_cache": False}, do_sample=do_sample)


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("only_new_ids", [False, True], ids=["all-ids", "new-ids"])
def test_three_turns_with_one_cache(target: Any, do_sample: bool, kind: str, only_new_ids: bool) -> None:
    """The second turn's cache was left by the first, rejected drafts and all."""
    model = target if kind == "full" else window()

    def turns(done: Callable[[], None]) -> list[list[int]]:
        torch.manual_seed(1)
        ids, cache, texts = PROMPT, DynamicCache(config=model.config), []
        for turn in range(3):
            length = int(cache.get_seq_length())
            given = ids[:, length:] if only_new_ids else ids
            output = model.generate(
                given,
                attention_mask=torch.ones(1, ids.shape[1], dtype=torch.long),
                max_new_tokens=14,
                do_sample=do_sample,
                return_dict_in_generate=True,
                **{CACHE_KEYWORD: cache},
            )
            new = output.sequences[:, given.shape[1] :]
            assert find_cache(output) is cache
            texts.append(new[0].tolist())
            done()
            ids = torch.cat([ids, new, tiny.prompt(5, seed=turn)], dim=-1)
        return texts

    plain = turns(lambda: None)
    drafts = [Assistant(tiny.near_copy(model, noise=0.05))]  # of the new ids alone it makes less, and does no harm
    with autospec.wrap(model, drafts=drafts, policy="fixed:assistant:4") as speculator:
        records: list[Any] = []
        assert turns(lambda: records.append(speculator.last_request)) == plain
    assert len(records) == 3
    assert all(r.fallback_reason is None and r.notes is None for r in records)
    assert sum(r.num_judged_tokens for r in records) > sum(r.num_accepted_tokens for r in records) > 0


# --- models ---


HYBRID: dict[str, Options] = {
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "falcon_h1": {
        "mamba_d_state": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
}


@pytest.mark.parametrize("family", HYBRID)
def test_hybrid_models_are_left_to_generate(do_sample: bool, family: str) -> None:
    model = make(family, HYBRID[family], dtype=torch.float32)
    assert_plain(model, PROMPT, "the cache (DynamicCache) cannot be rolled back", do_sample=do_sample)


def test_recurrent_models_without_a_cache_are_left_to_generate(do_sample: bool) -> None:
    options = {"block_types": ("recurrent", "attention"), "attention_window_size": 8, "lru_width": 32}
    model = make("recurrent_gemma", options, dtype=torch.float32)
    assert_plain(model, PROMPT, "the model has no cache", do_sample=do_sample)


def test_hybrid_with_short_convolutions(do_sample: bool) -> None:
    """Its convolutions keep a few tokens, which can be rolled back."""
    model = make("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, dtype=torch.float32)
    assert_exact(model, PROMPT, do_sample=do_sample, spoil_every=3)


EXPERTS: dict[str, Options] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts(do_sample: bool, family: str) -> None:
    assert_exact(make(family, EXPERTS[family], dtype=torch.float32), PROMPT, do_sample=do_sample)


def test_dynamic_positions_are_decoded_plainly(do_sample: bool) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = make("llama", {"rope_parameters": rope, "max_position_embeddings": 40})
    reason = "decoded plainly: rotary positions stretch beyond 40 tokens"
    assert_plain(model, PROMPT, reason, do_sample=do_sample, inside=True)
    assert_exact(model, PROMPT, lambda: {"max_new_tokens": 12}, do_sample=do_sample)  # with room enough


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_full_precision(do_sample: bool, dtype: torch.dtype, attention: str) -> None:
    for family, options in (("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 8})):
        assert_exact(make(family, options, attention, dtype), PROMPT, do_sample=do_sample, spoil_every=3)


def t5() -> Any:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def bart() -> Any:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    config = BartConfig(vocab_size=64, d_model=32, **sizes, **heads, **widths)
    return BartForConditionalGeneration(config)


@pytest.mark.parametrize("made", [t5, bart])
def test_encoder_decoder_models_are_left_to_generate(do_sample: bool, made: Any) -> None:
    torch.manual_seed(0)
    reason = "encoder-decoder models are decoded by transformers itself"
    assert_plain(
        made().eval(),
        tiny.prompt(10),
        reason,
        lambda: {"max_new_tokens": 8, "repetition_penalty": 1.1, "encoder_no_repeat_ngram_size": 2},
        do_sample=do_sample,
    )


def whisper() -> Any:
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    positions = {"max_source_positions": 50, "max_target_positions": 40}
    config = WhisperConfig(
        vocab_size=64,
        d_model=16,
        num_mel_bins=8,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **layers,
        **heads,
        **widths,
        **tokens,
        **positions,
    )
    return WhisperForConditionalGeneration(config)


def test_whisper_is_left_to_generate(do_sample: bool) -> None:
    torch.manual_seed(0)
    model, sound = whisper().eval(), torch.randn(1, 8, 100)
    reason = "encoder-decoder models are decoded by transformers itself"
    assert_plain(model, None, reason, lambda: {"input_features": sound, "max_new_tokens": 8}, do_sample=do_sample)


# --- inputs ---


def test_embeddings_are_left_to_generate(target: Any, do_sample: bool) -> None:
    embeds = target.get_input_embeddings()(PROMPT).detach()
    reason = "model input 'inputs_embeds' is not followed from block to block"
    assert_plain(target, None, reason, lambda: {"inputs_embeds": embeds}, do_sample=do_sample)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_left_padded_row(target: Any, do_sample: bool, kind: str) -> None:
    model = target if kind == "full" else window()
    padding = torch.zeros(1, 7, dtype=torch.long)
    ids = torch.cat([padding, PROMPT], dim=-1)
    mask = torch.cat([padding, torch.ones_like(PROMPT)], dim=-1)
    found = assert_exact(model, ids, lambda: {"attention_mask": mask}, do_sample=do_sample)
    assert torch.equal(found[:, 7:], answer(model, PROMPT, do_sample=do_sample))


def test_prefill_in_chunks(target: Any, do_sample: bool) -> None:
    assert_exact(target, PROMPT, lambda: {"prefill_chunk_size": 6}, do_sample=do_sample)


def test_positions_of_the_users_own(target: Any, do_sample: bool) -> None:
    positions = 2 * torch.arange(PROMPT.shape[1])[None]
    found = assert_exact(target, PROMPT, lambda: {"position_ids": positions}, do_sample=do_sample)
    assert not torch.equal(found, answer(target, PROMPT, do_sample=do_sample))


def test_nothing_but_a_start_token(do_sample: bool) -> None:
    model = tiny.llama(bos_token_id=5)
    found = assert_exact(model, None, do_sample=do_sample)
    assert int(found[0, 0]) == 5


# --- adapters ---


def adapted(seed: int) -> Any:
    """Two LoRA adapters with weights of their own, which change what is said."""
    model = peft.get_peft_model(
        make("llama", {}),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16),
        adapter_name="first",
    )
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def test_a_model_with_lora(target: Any, do_sample: bool) -> None:
    model = adapted(0)
    found = assert_exact(model, PROMPT, do_sample=do_sample)
    assert not torch.equal(found, answer(target, PROMPT, do_sample=do_sample))


def test_the_model_inside_a_peft_model(do_sample: bool) -> None:
    model = adapted(0)
    found = assert_exact(model.get_base_model(), PROMPT, do_sample=do_sample)
    assert torch.equal(found, answer(model, PROMPT, do_sample=do_sample))


def test_adapters_that_change_while_wrapped(do_sample: bool) -> None:
    """Another adapter, or none, from one request to the next."""
    model = adapted(0)

    def texts() -> list[list[int]]:
        model.set_adapter("first")
        found = [answer(model, PROMPT, do_sample=do_sample)]
        model.set_adapter("second")
        found.append(answer(model, PROMPT, do_sample=do_sample))
        with model.disable_adapter():
            found.append(answer(model, PROMPT, do_sample=do_sample))
        return [ids[0].tolist() for ids in found]

    plain = texts()
    assert len({tuple(ids) for ids in plain}) == 3
    with autospec.wrap(model, drafts=[Oracle(plain[1], spoil_every=4)], policy=Fixed("oracle", block_length=4)) as s:
        assert texts() == plain
        assert s.last_request is not None
        assert s.last_request.fallback_reason is None
        assert s.last_request.num_judged_tokens > 0


def test_forwards_with_adapters_are_not_prepared(do_sample: bool) -> None:
    """They may be switched off without a tensor being changed."""
    model = adapted(0)
    base = model.get_base_model()
    adapted_text = answer(base, PROMPT, do_sample=do_sample)
    with model.disable_adapter():
        plain = answer(base, PROMPT, do_sample=do_sample)
    assert not torch.equal(plain, adapted_text)
    with pytest.warns(UserWarning, match="its adapters may be switched between two forwards"):
        speculator = autospec.wrap(
            base, drafts=["ngram"], policy="fixed:ngram:4", backend=Static("plain", capacities=(128,))
        )
    with speculator:
        assert speculator.backend.name == "eager"
        with model.disable_adapter():
            assert torch.equal(answer(base, PROMPT, do_sample=do_sample), plain)
        assert torch.equal(answer(base, PROMPT, do_sample=do_sample), adapted_text)


PROMPT_LEARNING = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_prompt_learning_is_left_to_peft(do_sample: bool, kind: str) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny.llama(dtype=torch.float32), PROMPT_LEARNING[kind]()).eval()

    def options() -> Options:
        return {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}

    assert_plain(model, None, "prompt tuning is left to peft", options, do_sample=do_sample)


# --- calls that choose another way of decoding ---


class Coarse(QuantizedLayer):
    """Keys and values in steps of 1/16, as a quantising backend keeps them."""

    def _quantize(self, tensor: Any, axis: Any) -> Any:
        return (tensor * 16).round().to(torch.int16)

    def _dequantize(self, q_tensor: Any) -> Any:
        return q_tensor.double() / 16


def test_quantised_layers_are_decoded_plainly(do_sample: bool) -> None:
    model = make("llama", {})

    def options() -> dict[str, Any]:
        return {CACHE_KEYWORD: Cache(layers=[Coarse(residual_length=4) for _ in range(2)])}

    prompt = tiny.prompt(28, seed=1, period=24)
    reason = "decoded plainly: the cache (Cache) cannot be rolled back"
    assert_plain(model, prompt, reason, options, do_sample=do_sample, inside=True)
    coarse = answer(model, prompt, options, do_sample=do_sample)
    assert not torch.equal(coarse, answer(model, prompt, do_sample=do_sample))  # it does lose something


LEFT: dict[str, tuple[Options, str]] = {
    "beams": ({"num_beams": 3}, "decoded by transformers itself"),
    "several sequences": ({"num_return_sequences": 2}, "batch of 2"),
    "early exit": ({"assistant_early_exit": 1}, "the call brings its own assistant_early_exit"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation is decoded by transformers itself"),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_ways_of_decoding(target: Any, do_sample: bool, name: str) -> None:
    options, reason = LEFT[name]
    if name == "several sequences" and not do_sample:
        options = {**options, "num_beams": 2}  # greedy alone there is but one
        reason = "beam search is decoded by transformers itself"
    assert_plain(target, PROMPT, reason, lambda: options, do_sample=do_sample)


def test_a_batch(target: Any, do_sample: bool) -> None:
    assert_plain(target, PROMPT.repeat(2, 1), "batch of 2", do_sample=do_sample)


def test_an_assistant_of_the_call(target: Any, do_sample: bool) -> None:
    draft = tiny.near_copy(target)
    reason = "the call brings its own assistant_model"
    assert_plain(target, PROMPT, reason, lambda: {"assistant_model": draft}, do_sample=do_sample)


def test_training_mode(do_sample: bool) -> None:
    model = tiny.llama()
    model.train()
    assert_plain(model, PROMPT, "the model is in training mode", no_options, do_sample=do_sample)
