"""Every way to choose tokens that `generate` offers: the same tokens under blocks, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from compared import answer, assert_exact
from test_decoder import Oracle
from test_families import make
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.logits_process import BarkEosPrioritizerLogitsProcessor

import autospec
from autospec.drafts import Assistant, NGram, Proposal

pytestmark = pytest.mark.compat

Options = dict[str, Any]
PROMPT = tiny.prompt(28, seed=1, period=24)  # its tokens come again in the answers


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", {})


class LikesOddPrefixes(LogitsProcessor):
    """A user's own, a pure function of prefix and scores."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + 6.0 * torch.cos(torch.arange(scores.shape[-1]) * float(input_ids[0, -3:].sum()))


class EveryThirdCall(LogitsProcessor):
    """A user's own, whose scores depend on how often it was called."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._calls += 1
        scores = scores.clone()
        if self._calls % 3 == 0:
            scores[:, self._calls % scores.shape[-1]] += 60.0
        return scores


def next_letters(batch: int, input_ids: Any) -> list[int]:
    """What `prefix_allowed_tokens_fn` allows: the dozen after the last token."""
    return [(int(input_ids[-1]) + step) % tiny.VOCAB for step in range(1, 13)]


ENDS: Options = {"eos_token_id": list(range(1, 40))}
FLAT: Options = {"temperature": 4.0}  # so that a cut-off has something to cut

# sampling alone: what is compared with, and the option
WARPERS: dict[str, tuple[Options, Options]] = {
    "temperature": ({}, {"temperature": 0.5}),
    "very small temperature": ({}, {"temperature": 1e-6}),
    "very large temperature": ({}, {"temperature": 1e6}),
    "top_k": (FLAT, {"top_k": 5}),
    "top_p": (FLAT, {"top_p": 0.7}),
    "min_p": (FLAT, {"min_p": 0.6}),
    "typical_p": (FLAT, {"typical_p": 0.5}),
    "epsilon_cutoff": (FLAT, {"epsilon_cutoff": 0.03}),
    "eta_cutoff": (FLAT, {"eta_cutoff": 0.9}),
    "top_h": (FLAT, {"top_h": 0.4}),
}

# greedy and sampled: what is compared with, and how the option is made for each call
SHAPES: dict[str, tuple[Options, Callable[[], Options]]] = {
    "repetition_penalty": ({}, lambda: {"repetition_penalty": 1.5}),
    "encoder_repetition_penalty": ({}, lambda: {"encoder_repetition_penalty": 2.0}),
    "no_repeat_ngram_size": ({}, lambda: {"no_repeat_ngram_size": 1}),
    "encoder_no_repeat_ngram_size": ({}, lambda: {"encoder_no_repeat_ngram_size": 1}),
    "bad_words_ids": ({}, lambda: {"bad_words_ids": [[50], [59, 59], [59, 16]]}),
    "min_length": (ENDS, lambda: {"min_length": 45}),
    "min_new_tokens": (ENDS, lambda: {"min_new_tokens": 20}),
    "forced_eos_token_id": ({}, lambda: {"forced_eos_token_id": 7}),
    "suppress_tokens": ({}, lambda: {"suppress_tokens": list(range(40, 60))}),
    "begin_suppress_tokens": ({}, lambda: {"begin_suppress_tokens": list(range(60))}),
    "exponential_decay_length_penalty": (
        {"eos_token_id": 7},
        lambda: {"exponential_decay_length_penalty": (8, 1.9), "eos_token_id": 7},
    ),
    "sequence_bias": ({}, lambda: {"sequence_bias": [[[7], 30.0], [[7, 7], -60.0], [[7, 12], 60.0]]}),
    "watermark": ({}, lambda: {"watermarking_config": WatermarkingConfig(bias=8.0)}),
    "self-hashing watermark": (
        {},
        lambda: {"watermarking_config": WatermarkingConfig(bias=8.0, seeding_scheme="selfhash", context_width=2)},
    ),
    "SynthID watermark": (
        {},
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3)},
    ),
    "guidance_scale": ({}, lambda: {"guidance_scale": 1.8}),
    "negative_prompt_ids": ({}, lambda: {"guidance_scale": 1.8, "negative_prompt_ids": tiny.prompt(6, seed=5)}),
    "prefix_allowed_tokens_fn": ({}, lambda: {"prefix_allowed_tokens_fn": next_letters}),
    "processor of a speech model": (
        {},
        lambda: {"logits_processor": LogitsProcessorList([BarkEosPrioritizerLogitsProcessor(16, min_eos_p=0.01)])},
    ),
    "user processor": ({}, lambda: {"logits_processor": LogitsProcessorList([LikesOddPrefixes()])}),
    "user processor with state": ({}, lambda: {"logits_processor": LogitsProcessorList([EveryThirdCall()])}),
}


@pytest.mark.parametrize("name", WARPERS)
def test_warpers(target: Any, name: str) -> None:
    base, option = WARPERS[name]
    found = assert_exact(target, PROMPT, lambda: {**base, **option}, do_sample=True)
    assert not torch.equal(found, answer(target, PROMPT, lambda: base, do_sample=True))  # it does something


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_processors(target: Any, name: str, do_sample: bool) -> None:
    base, option = SHAPES[name]
    found = assert_exact(target, PROMPT, lambda: {**base, **option()}, do_sample=do_sample)
    assert not torch.equal(found, answer(target, PROMPT, lambda: base, do_sample=do_sample))


@pytest.mark.parametrize("do_sample", [False, True])
def test_forced_first_token(target: Any, do_sample: bool) -> None:
    """It speaks only after a prompt of a single token."""
    found = assert_exact(target, torch.tensor([[5]]), lambda: {"forced_bos_token_id": 9}, do_sample=do_sample)
    assert int(found[0, 1]) == 9
    assert int(answer(target, torch.tensor([[5]]), do_sample=do_sample)[0, 1]) != 9


@pytest.mark.parametrize("do_sample", [False, True])
def test_renormalised_scores(target: Any, do_sample: bool) -> None:
    options = {
        "renormalize_logits": True,
        "bad_words_ids": [[59]],
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    assert_exact(target, PROMPT, lambda: options, do_sample=do_sample)
    with autospec.wrap(target, drafts=[NGram(min_ngram=1)], policy="fixed:ngram:4") as speculator:
        torch.manual_seed(1)
        output = target.generate(PROMPT, max_new_tokens=12, do_sample=do_sample, **options)
        assert speculator.last_request is not None
        assert speculator.last_request.num_draft_tokens > 0
    sums = torch.stack([scores[0].logsumexp(-1) for scores in output.scores])
    torch.testing.assert_close(sums, torch.zeros(12), atol=1e-5, rtol=0.0)


class Overflows(tiny.LlamaForCausalLM):
    """Logits that are no number after some tokens."""

    after = frozenset({10, 11, 16, 41, 42, 45, 54})

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, **kwargs)
        kept = outputs.logits.shape[1]
        for place, token in enumerate(input_ids[0, -kept:].tolist()):
            if token in self.after:
                outputs.logits[0, place, 5] = torch.nan
        return outputs


@pytest.mark.parametrize("do_sample", [False, True])
def test_invalid_values_are_removed(do_sample: bool) -> None:
    model = tiny.llama()
    model.__class__ = Overflows
    found = assert_exact(model, PROMPT, lambda: {"remove_invalid_values": True}, do_sample=do_sample)
    assert Overflows.after & set(found[0, 28:-1].tolist())  # so that there was something to remove
    if not do_sample:
        assert 5 in answer(model, PROMPT, do_sample=False)[0, 28:].tolist()  # the largest, unless removed


@pytest.mark.parametrize("do_sample", [False, True])
def test_everything_at_once(target: Any, do_sample: bool) -> None:
    def options() -> Options:
        shared: Options = {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 4,
            "bad_words_ids": [[59]],
            "sequence_bias": [[[7], 3.0]],
            "min_new_tokens": 12,
            "eos_token_id": [3, 9],
            "guidance_scale": 1.3,
            "watermarking_config": WatermarkingConfig(bias=3.0),
            "logits_processor": LogitsProcessorList([LikesOddPrefixes(), EveryThirdCall()]),
            "prefix_allowed_tokens_fn": next_letters,
            "renormalize_logits": True,
        }
        return {**shared, "temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.01} if do_sample else shared

    assert_exact(target, PROMPT, options, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True])
def test_settings_of_the_model_itself(do_sample: bool) -> None:
    """Options in `model.generation_config`, none in the call."""
    model = tiny.llama()
    model.generation_config.update(repetition_penalty=1.5, max_new_tokens=20, do_sample=do_sample, top_k=9)
    before = model.generation_config.to_dict()
    torch.manual_seed(1)
    plain = model.generate(PROMPT)
    source = Oracle(plain[0].tolist(), spoil_every=4)
    with autospec.wrap(model, drafts=[source], policy="fixed:oracle:5") as speculator:
        torch.manual_seed(1)
        assert torch.equal(model.generate(PROMPT), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens > 0
        assert speculator.last_request.do_sample == do_sample
    assert plain.shape == (1, 48)
    assert model.generation_config.to_dict() == before


# --- same seed, same text ---


class Fallible(Oracle):
    """Knows the answer, and errs whenever torch's own generator says so."""

    def propose(self, committed: Any, block_length: int) -> Proposal:
        tokens = self._answer[len(committed) : len(committed) + block_length]
        errs = (torch.rand(len(tokens)) < 0.2).tolist()
        return Proposal([t ^ 1 if wrong else t for t, wrong in zip(tokens, errs, strict=True)])


class Restless:
    """Another source and another block length before each block, drawn from torch's own generator."""

    name = "restless"

    def choose(self, context: Any) -> Any:
        source = ("none", "ngram", "assistant", "oracle")[int(torch.randint(4, ()))]
        return autospec.Action(source, 0 if source == "none" else int(torch.randint(1, 7, ())))

    def observe(self, outcome: Any) -> None:
        torch.rand(2)


SPICES: list[Callable[[], Options]] = [
    lambda: {"temperature": 0.6},
    lambda: {"temperature": 2.5},
    lambda: {"top_k": 6},
    lambda: {"top_p": 0.8},
    lambda: {"min_p": 0.1},
    lambda: {"typical_p": 0.7},
    lambda: {"repetition_penalty": 1.3},
    lambda: {"no_repeat_ngram_size": 2},
    lambda: {"bad_words_ids": [[3], [5, 6]]},
    lambda: {"sequence_bias": [[[7], 4.0]]},
    lambda: {"eos_token_id": [11, 12], "min_new_tokens": 4},
    lambda: {"watermarking_config": WatermarkingConfig(bias=3.0)},
    lambda: {"logits_processor": LogitsProcessorList([EveryThirdCall()])},
]


def spiced(seed: int) -> Options:
    """A few options for this seed, made anew for each call."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(SPICES), generator=generator)[: int(torch.randint(4, (), generator=generator))]
    return {name: value for number in chosen.tolist() for name, value in SPICES[number]().items()}


SEEDS = 210


def test_same_seed_same_text_on_hundreds_of_seeds() -> None:
    """Whatever is drafted, how long, by whom, and whoever else draws from torch's generator meanwhile."""
    model = tiny.llama(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    assistant = Assistant(tiny.near_copy(model, noise=0.3))
    texts, accepted, judged, actions = set(), 0, 0, set()
    for seed in range(SEEDS):
        ids = tiny.prompt(8, seed, period=3) % 16
        torch.manual_seed(seed)
        plain = model.generate(ids, max_new_tokens=12, do_sample=True, **spiced(seed))
        drafts = [NGram(min_ngram=1), assistant, Fallible(plain[0].tolist())]
        with autospec.wrap(model, drafts=drafts, policy=Restless()) as speculator:
            torch.manual_seed(seed)
            found = model.generate(ids, max_new_tokens=12, do_sample=True, **spiced(seed))
            record = speculator.last_request
        assert torch.equal(found, plain), (seed, spiced(seed))
        assert record is not None
        assert record.notes is None
        texts.add(tuple(plain[0, 8:].tolist()))
        actions |= set(record.actions)
        accepted += record.num_accepted_tokens
        judged += record.num_judged_tokens
    assert len(texts) > SEEDS // 2  # the seed matters
    assert SEEDS < accepted < judged - SEEDS
    assert len(actions) == 1 + 3 * 6  # off, and every source with every length
