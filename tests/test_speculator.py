"""`autospec.wrap`: unchanged calls, labels, records, fallbacks, and a model handed back as it was."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration, pipeline

import autospec
from autospec.drafts import Assistant, NGram
from autospec.errors import ConfigurationError, StoreError
from autospec.policies import Fixed
from autospec.telemetry.store import Store

pytestmark = pytest.mark.compat

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


class TestWrapping:
    def test_close_restores_generate(self, model: Any) -> None:
        original = model.generate
        speculator = autospec.wrap(model, policy="off")
        assert model.generate != original
        speculator.close()
        speculator.close()
        assert model.generate == original
        assert "generate" not in vars(model)

    def test_a_model_is_wrapped_once_at_a_time(self, model: Any) -> None:
        with autospec.wrap(model, policy="off"), pytest.raises(ConfigurationError, match="wrapped already"):
            autospec.wrap(model, policy="off")

    def test_a_generate_put_there_by_someone_else_comes_back(self, model: Any) -> None:
        calls = []
        inner = model.generate

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs)
            return inner(*args, **kwargs)

        model.generate = counted
        try:
            with autospec.wrap(model, policy="fixed:ngram:4"):
                model.generate(tiny.prompt(10), **GREEDY)
            assert len(calls) == 1
            assert model.generate is counted
        finally:
            del model.generate

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sampling": "lossy"}, "sampling='lossy': known are paired, maximal"),
            ({"drafts": ["magic"]}, "unknown draft source"),
            ({"policy": "best"}, "unknown policy"),
        ],
    )
    def test_bad_options_leave_the_model_alone(self, model: Any, options: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            autospec.wrap(model, **options)
        assert "generate" not in vars(model)

    @pytest.mark.parametrize("url", ["sqlite:////proc/nowhere/a.db", "sqlite:///{tmp}/foreign.db"])
    def test_an_unusable_database_leaves_the_model_alone(self, model: Any, url: str, tmp_path: Path) -> None:
        (tmp_path / "foreign.db").write_text("this is no database, and it is long enough to tell " * 50)
        with pytest.raises(StoreError):
            autospec.wrap(model, policy="off", store=url.format(tmp=tmp_path))
        assert "generate" not in vars(model)

    def test_no_model(self) -> None:
        with pytest.raises(ConfigurationError, match="a transformers model with generate"):
            autospec.wrap(object(), policy="off")  # type: ignore[arg-type]


class TestCalls:
    def test_pipeline(self, model: Any) -> None:
        tokenizer = tiny.tokenizer()
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        text = tokenizer.decode(tiny.prompt(20)[0])
        plain = generator(text, **GREEDY)
        with autospec.wrap(model, tokenizer=tokenizer, policy="fixed:ngram:4") as speculator:
            with autospec.segment("pipe"):
                assert generator(text, **GREEDY) == plain
            assert speculator.last_request is not None
            assert speculator.last_request.segment == "pipe"
            assert speculator.last_request.actions == {"ngram:4": speculator.last_request.blocks}

    def test_custom_generate_ends_in_the_same_decoder(self, model: Any) -> None:
        with autospec.wrap(model, policy="fixed:ngram:4") as speculator:
            found = model.generate(tiny.prompt(20), custom_generate=speculator.generate, **GREEDY)
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens > 0
        assert torch.equal(found, model.generate(tiny.prompt(20), **GREEDY))

    def test_positional_and_config_arguments(self, model: Any) -> None:
        config = copy.deepcopy(model.generation_config)
        config.update(**GREEDY)
        before = config.to_dict()
        plain = model.generate(tiny.prompt(20), config)
        with autospec.wrap(model, policy="fixed:ngram:4"):
            assert torch.equal(model.generate(tiny.prompt(20), config), plain)
            assert torch.equal(model.generate(input_ids=tiny.prompt(20), generation_config=config), plain)
        assert config.to_dict() == before

    def test_wrong_arguments_fail_as_before(self, model: Any) -> None:
        with autospec.wrap(model, policy="fixed:ngram:4") as speculator:
            with pytest.raises(ValueError, match="max_new_toknes"):
                model.generate(tiny.prompt(20), max_new_toknes=5)
            assert speculator.last_request is not None
            assert (speculator.last_request.error or "").startswith("ValueError")

    def test_nothing_leaks_from_call_to_call(self, model: Any) -> None:
        ids = tiny.prompt(20)
        alone = model.generate(ids, **GREEDY)
        config = model.generation_config.to_dict()
        with autospec.wrap(model, drafts=["ngram", Assistant(tiny.near_copy(model))], policy="fixed:assistant:4"):
            model.generate(
                tiny.prompt(40, seed=3), max_new_tokens=30, do_sample=True, temperature=1.7, repetition_penalty=1.5
            )
            assert torch.equal(model.generate(ids, **GREEDY), alone)
        assert model.generation_config.to_dict() == config

    def test_two_threads_on_one_model(self, model: Any) -> None:
        prompts = [tiny.prompt(10 + i, seed=i) for i in range(8)]
        plain = [model.generate(ids, **GREEDY) for ids in prompts]
        with (
            autospec.wrap(model, drafts=["ngram", Assistant(tiny.near_copy(model))], policy="auto"),
            ThreadPoolExecutor(4) as pool,
        ):
            found = list(pool.map(lambda ids: model.generate(ids, **GREEDY), prompts * 3))
        for i, output in enumerate(found):
            assert torch.equal(output, plain[i % 8])


class TestSegments:
    def test_label_beats_block_beats_default(self, model: Any) -> None:
        with autospec.wrap(model, policy="off") as speculator:

            def seen(**kwargs: Any) -> str:
                model.generate(tiny.prompt(10), **GREEDY, **kwargs)
                assert speculator.last_request is not None
                return speculator.last_request.segment

            assert seen() == "default"
            with autospec.segment("outer"):
                with autospec.segment("inner"):
                    assert seen() == "inner"
                    assert seen(segment="call") == "call"
                assert seen() == "outer"
            assert seen() == "default"

    def test_blocks_do_not_reach_other_threads(self, model: Any) -> None:
        seen = []
        with autospec.wrap(model, policy="off") as speculator, autospec.segment("mine"):
            thread = threading.Thread(
                target=lambda: (model.generate(tiny.prompt(10), **GREEDY), seen.append(speculator.last_request))
            )
            thread.start()
            thread.join()
        assert seen[0].segment == "default"  # type: ignore[union-attr]

    def test_labels_are_cleaned(self) -> None:
        from autospec.segments import clean

        assert clean(" a\x00b\n\tc\x9f ") == "a b c"
        assert clean("<img src=x>") == "<img src=x>"
        assert len(clean("x" * 10_000)) == 80

    @pytest.mark.parametrize("label", [5, "", " \n ", b"bytes"])
    def test_bad_labels(self, model: Any, label: Any) -> None:
        with pytest.raises(ConfigurationError, match="segment="), autospec.segment(label):
            pass
        with autospec.wrap(model, policy="off"), pytest.raises(ConfigurationError, match="segment="):
            model.generate(tiny.prompt(10), segment=label, **GREEDY)


class TestRecords:
    def test_counts_and_seconds_add_up(self, model: Any, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/a.db"
        with autospec.wrap(
            model, drafts=[Assistant(tiny.near_copy(model))], policy="fixed:assistant:4", store=url, run="r"
        ) as speculator:
            model.generate(tiny.prompt(20), max_new_tokens=30, do_sample=True, temperature=0.9, top_k=7, segment="x")
            last = speculator.last_request
        assert last is not None
        assert (last.prompt_tokens, last.output_tokens) == (20, 30)
        assert last.block_tokens == 29
        assert last.blocks == sum(last.acceptance_lengths.values()) == sum(last.actions.values())
        assert last.num_judged_tokens == sum(last.at_risk)
        assert last.num_accepted_tokens == sum(last.accepted) == last.block_tokens - last.blocks
        assert last.num_accepted_tokens <= last.num_judged_tokens <= last.num_draft_tokens
        assert last.decoding == "sample temperature=0.9 top_k=7"
        assert min(last.seconds.prefill, last.seconds.draft, last.seconds.verify, last.seconds.correction) > 0
        assert last.total_seconds == pytest.approx(last.seconds.total)
        with Store(url, readonly=True) as store:
            assert [r.request_id for r in store.requests(run="r")] == [last.request_id]
            assert next(iter(store.requests())) == last

    def test_prefill_is_no_block(self, model: Any) -> None:
        class Watching(Fixed):
            outcomes: list[Any] = []  # noqa: RUF012

            def observe(self, outcome: Any) -> None:
                self.outcomes.append(outcome)

        policy = Watching("assistant", block_length=2)
        with autospec.wrap(model, drafts=[Assistant(tiny.near_copy(model))], policy=policy) as speculator:
            model.generate(tiny.prompt(300), **GREEDY)
            last = speculator.last_request
        assert last is not None
        assert policy.outcomes[0].context_tokens == 301
        assert policy.outcomes[0].catch_up_seconds > 0  # the draft's own prefill is charged to no action
        assert sum(o.seconds + o.catch_up_seconds for o in policy.outcomes) + last.seconds.prefill <= last.total_seconds

    def test_control_is_the_original_generate(self, model: Any) -> None:
        with autospec.wrap(model, policy="fixed:ngram:4") as speculator:
            with speculator.control():
                model.generate(tiny.prompt(20), **GREEDY)
            last = speculator.last_request
        assert last is not None
        assert last.is_control
        assert (last.policy, last.blocks, last.output_tokens) == ("off", 0, 12)

    def test_without_drafts_to_judge_ratios_are_absent(self, model: Any) -> None:
        with autospec.wrap(model, policy="off") as speculator:
            model.generate(tiny.prompt(20), max_new_tokens=1, do_sample=False)
            last = speculator.last_request
        assert last is not None
        assert last.mean_acceptance_length is None
        assert last.usual_action is None


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


def t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


FALLBACKS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_beams": 3}, "beam search"),
    ("llama", {"num_return_sequences": 2, "do_sample": True}, "batch of 2"),
    ("llama", {"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ("llama", {"use_cache": False}, "use_cache=False"),
    ("llama", {"cache_implementation": "static"}, "fixed shape"),
    ("llama", {"return_dict_in_generate": True, "output_attentions": True}, "attentions or hidden states"),
    ("t5", {}, "encoder-decoder"),
]


class TestFallbacks:
    @pytest.mark.parametrize(("kind", "options", "reason"), FALLBACKS, ids=[f"{k}-{r}" for k, _, r in FALLBACKS])
    def test_original_generate_with_the_reason(
        self, model: Any, kind: str, options: dict[str, Any], reason: str
    ) -> None:
        used = model if kind == "llama" else t5()
        kwargs = {**GREEDY, **options}
        torch.manual_seed(0)
        plain = used.generate(tiny.prompt(20), **kwargs)
        with autospec.wrap(used, policy="fixed:ngram:4") as speculator:
            torch.manual_seed(0)
            with pytest.warns(UserWarning, match=f"left to the original generate: .*{reason}"):
                found = used.generate(tiny.prompt(20), **kwargs)
            torch.manual_seed(0)
            used.generate(tiny.prompt(20), **kwargs)  # warned once
            last = speculator.last_request
        plain, found = (getattr(output, "sequences", output) for output in (plain, found))
        assert torch.equal(plain, found)
        assert last is not None
        assert reason in (last.fallback_reason or "")
        assert last.blocks == 0
        assert last.total_seconds > 0
        assert last.output_tokens == (plain.shape[0] * 12)

    def test_batch(self, model: Any) -> None:
        ids = torch.cat([tiny.prompt(10), tiny.prompt(10, seed=4)])
        with autospec.wrap(model, policy="fixed:ngram:4"), pytest.warns(UserWarning, match="batch of 2"):
            found = model.generate(ids, **GREEDY)
        assert torch.equal(found, model.generate(ids, **GREEDY))

    def test_embeddings(self, model: Any) -> None:
        embeds = model.get_input_embeddings()(tiny.prompt(10))
        with autospec.wrap(model, policy="fixed:ngram:4"), pytest.warns(UserWarning, match="inputs_embeds"):
            found = model.generate(inputs_embeds=embeds, **GREEDY)
        assert torch.equal(found, model.generate(inputs_embeds=embeds, **GREEDY))

    def test_stop_strings_without_a_tokenizer_fail_as_before(self, model: Any) -> None:
        with (
            autospec.wrap(model, policy="fixed:ngram:4"),
            pytest.warns(UserWarning, match="need a tokenizer"),
            pytest.raises(ValueError, match="could not locate a tokenizer"),
        ):
            model.generate(tiny.prompt(10), stop_strings="x", **GREEDY)

    def test_a_user_s_own_custom_generate_is_left_alone(self, model: Any) -> None:
        def custom(model: Any, input_ids: Any, **kwargs: Any) -> str:
            return "mine"

        with autospec.wrap(model, policy="fixed:ngram:4"), pytest.warns(UserWarning, match="own custom_generate"):
            assert model.generate(tiny.prompt(10), custom_generate=custom, **GREEDY) == "mine"


class TestPrompts:
    def test_empty_prompt(self, model: Any) -> None:
        with autospec.wrap(model, policy="off"), pytest.raises(ConfigurationError, match="the prompt is empty"):
            model.generate(torch.empty(1, 0, dtype=torch.long), **GREEDY)

    def test_longer_than_the_window(self) -> None:
        with (
            autospec.wrap(gpt2(), policy="off") as speculator,
            pytest.raises(
                ConfigurationError, match="the prompt has 70 tokens, the context window of GPT2LMHeadModel is 64"
            ),
        ):
            speculator.model.generate(tiny.prompt(70), **GREEDY)

    def test_other_architecture(self) -> None:
        model = gpt2()
        plain = model.generate(tiny.prompt(20), **GREEDY)
        for policy in ("fixed:ngram:4", "fixed:assistant:3", "auto"):
            with autospec.wrap(model, drafts=["ngram", Assistant(tiny.near_copy(model))], policy=policy):
                assert torch.equal(model.generate(tiny.prompt(20), **GREEDY), plain)

    def test_drafts_stay_inside_the_window(self) -> None:
        """Positions are learned here: one too many is an error, and plain decoding never goes there."""
        model = gpt2()
        ids = tiny.prompt(40)
        answer = model.generate(ids, max_new_tokens=23, do_sample=False)[0].tolist()
        options: dict[str, Any] = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": answer[60]}
        plain = model.generate(ids, **options)
        with autospec.wrap(model, drafts=[NGram(min_ngram=1)], policy="fixed:ngram:16"):
            assert torch.equal(model.generate(ids, **options), plain)

    def test_an_assistant_with_a_shorter_window_is_switched_off_there(self, model: Any) -> None:
        short = tiny.llama(seed=3, max_position_embeddings=30)
        plain = model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)
        with autospec.wrap(model, drafts=[Assistant(short)], policy="fixed:assistant:3") as speculator:
            with pytest.warns(UserWarning, match="context window of 30 tokens"):
                assert torch.equal(model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens > 0
