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
from test_decoder import Oracle
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration, pipeline

import autospec
from autospec.drafts import Assistant, NGram, Proposal
from autospec.errors import ConfigurationError, DraftError, ExactnessError, StoreError
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
            assert speculator.last_request.usual_action == "ngram:4"

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


class TestHiddenState:
    """What others do to the model, to the generator, or in the middle of a call."""

    def test_a_copy_of_a_wrapped_model_is_its_own(self, model: Any) -> None:
        ids = tiny.prompt(20)
        other = tiny.llama(seed=9)
        expected = other.generate(ids, **GREEDY)
        with autospec.wrap(model, policy="fixed:ngram:4"):
            copied = copy.deepcopy(model)
        copied.load_state_dict(other.state_dict())
        assert torch.equal(copied.generate(ids, **GREEDY), expected)
        with autospec.wrap(copied, policy="fixed:ngram:4"):
            assert torch.equal(copied.generate(ids, **GREEDY), expected)

    def test_a_wrapped_model_can_be_pickled(self) -> None:
        import pickle

        model = tiny.llama()  # transformers itself makes a model that has generated unfit for pickling
        with autospec.wrap(model, drafts=[], policy="off"):
            assert pickle.dumps(model)
            rebuild, arguments = model.generate.__reduce__()
        assert rebuild(*arguments) == model.generate  # what a reader of the pickle gets is the model's own

    def test_training_mode(self) -> None:
        target, draft = tiny.llama(attention_dropout=0.5), tiny.llama(attention_dropout=0.5)
        with pytest.raises(DraftError, match=r"assistant.eval\(\)"):
            autospec.wrap(target, drafts=[Assistant(draft.train())], policy="off")
        with autospec.wrap(target, policy="fixed:ngram:4"):
            target.train()
            with pytest.warns(UserWarning, match="training mode"):
                target.generate(tiny.prompt(20), **GREEDY)
            target.eval()

    def test_others_may_use_the_global_generator(self, model: Any) -> None:
        class Noisy(NGram):
            def start(self, request: Any) -> Any:
                torch.manual_seed(123)
                return super().start(request)

        class Shaky(Fixed):
            def choose(self, context: Any) -> Any:
                torch.rand(3)
                return super().choose(context)

        ids, options = tiny.prompt(30), {"max_new_tokens": 20, "do_sample": True}
        torch.manual_seed(4)
        plain = model.generate(ids, **options)
        with autospec.wrap(model, drafts=[Noisy(min_ngram=1)], policy=Shaky("ngram", block_length=4)) as speculator:
            torch.manual_seed(4)
            assert torch.equal(model.generate(ids, **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens > 0

    def test_warnings_as_errors_cost_no_answer(self, model: Any) -> None:
        import warnings

        with autospec.wrap(model, policy="fixed:ngram:4"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert model.generate(tiny.prompt(20), num_beams=2, **GREEDY).shape == (1, 32)

    @pytest.mark.parametrize("target", [tiny.llama(), tiny.mistral(window=8)], ids=["full", "window"])
    def test_an_error_leaves_the_cache_as_plain_decoding_does(self, target: Any) -> None:
        from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

        from autospec.caches import CACHE_KEYWORD

        class Broken(LogitsProcessor):
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                if input_ids.shape[1] == 27:
                    raise RuntimeError("broken")
                return scores

        answer = target.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)[0].tolist()

        def broken_off() -> Any:
            cache = DynamicCache(config=target.config)
            with pytest.raises(RuntimeError, match="broken"):
                target.generate(
                    tiny.prompt(20),
                    max_new_tokens=20,
                    do_sample=False,
                    logits_processor=LogitsProcessorList([Broken()]),
                    **{CACHE_KEYWORD: cache},
                )
            return cache

        plain = broken_off()
        with autospec.wrap(target, drafts=[Oracle(answer)], policy=Fixed("oracle", block_length=8)):
            found = broken_off()
        assert found.get_seq_length() == plain.get_seq_length()
        for a, b in zip(plain.layers, found.layers, strict=True):
            assert a.keys.shape == b.keys.shape
            assert getattr(b, "record_past", False) is False

    def test_int32_prompts(self, model: Any) -> None:
        ids = tiny.prompt(20).to(torch.int32)
        plain = model.generate(ids, **GREEDY)
        with autospec.wrap(model, policy="fixed:ngram:4"):
            found = model.generate(ids, **GREEDY)
        assert found.dtype == plain.dtype
        assert torch.equal(found, plain)

    def test_a_broken_streamer_does_not_hide_the_first_error(self, model: Any) -> None:
        class Broken:
            def put(self, value: Any) -> None:
                raise RuntimeError("first")

            def end(self) -> None:
                raise RuntimeError("second")

        with autospec.wrap(model, policy="fixed:ngram:4"), pytest.raises(RuntimeError, match="first"):
            model.generate(tiny.prompt(20), streamer=Broken(), **GREEDY)

    def test_use_after_close_and_on_another_model(self, model: Any) -> None:
        speculator = autospec.wrap(model, policy="off")
        with pytest.raises(ConfigurationError, match="the wrapped model alone"):
            tiny.llama(seed=3).generate(tiny.prompt(9), custom_generate=speculator.generate, **GREEDY)
        speculator.close()
        with pytest.raises(ConfigurationError, match="closed"):
            model.generate(tiny.prompt(9), custom_generate=speculator.generate, **GREEDY)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"store": Path("a.db")}, "store=.*a text or None"),
            ({"run": 5}, "run=5: a text or None"),
            ({"tokenizer": "gpt2"}, "pass the tokenizer itself"),
            ({"drafts": [NGram]}, "is not a draft source"),
            ({"drafts": None}, "None is not a draft source"),
            ({"policy": Fixed}, "is no policy"),
        ],
    )
    def test_mistaken_arguments(self, model: Any, options: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            autospec.wrap(model, **{"policy": "off", **options})


class TestMisbehavingPlugIns:
    @pytest.mark.parametrize(
        ("proposal", "reason"),
        [
            (Proposal([64]), "proposed token id 64, the target has ids 0 to 63"),
            (Proposal([-1]), "proposed token id -1"),
            (Proposal([1] * 9), "proposed 9 tokens when asked for 4"),
            (Proposal([1.0]), "not a list of whole numbers"),  # type: ignore[list-item]
            ([1, 2], "proposed list instead of a Proposal"),
            (Proposal([1, 2], torch.ones(1, 64) / 64), r"draft_probs of shape \(1, 64\)"),
            (ZeroDivisionError("oh"), "ZeroDivisionError: oh"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_are_switched_off_with_the_reason(self, model: Any, proposal: Any, reason: str, do_sample: bool) -> None:
        class Bad(Oracle):
            def propose(self, committed: Any, block_length: int) -> Any:
                if isinstance(proposal, Exception):
                    raise proposal
                return proposal

        options = {"max_new_tokens": 12, "do_sample": do_sample}
        torch.manual_seed(0)
        plain = model.generate(tiny.prompt(20), **options)
        with autospec.wrap(model, drafts=[Bad([])], policy=Fixed("oracle", block_length=4)) as speculator:
            torch.manual_seed(0)
            with pytest.warns(UserWarning, match=f"oracle switched off: .*{reason}"):
                assert torch.equal(model.generate(tiny.prompt(20), **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens == 0

    @pytest.mark.parametrize(
        ("proposal", "reason"),
        [
            (Proposal([1, 2], torch.ones(1, 64) / 64), r"draft_probs of shape \(1, 64\)"),
            (Proposal([1, 64], torch.ones(2, 64) / 64), "proposed token id 64"),
        ],
        ids=["shape", "token"],
    )
    def test_drawn_tokens_that_cannot_be_verified_end_a_maximal_request(
        self, model: Any, proposal: Any, reason: str
    ) -> None:
        """Going on without them would make it depend on their own draw whether they are submitted."""

        class Bad(Oracle):
            def propose(self, committed: Any, block_length: int) -> Any:
                return proposal

        with (
            autospec.wrap(model, drafts=[Bad([])], policy=Fixed("oracle", block_length=4), sampling="maximal"),
            pytest.raises(ExactnessError, match=f"drawn tokens that cannot be verified: .*{reason}"),
        ):
            model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=True)

    @pytest.mark.parametrize(
        "action", [None, ("ngram", 4), autospec.Action("ngram", -1), autospec.Action("ngram", True)], ids=str
    )
    def test_policies_that_choose_nonsense(self, model: Any, action: Any) -> None:
        class Bad(Fixed):
            def choose(self, context: Any) -> Any:
                return action

        with (
            autospec.wrap(model, policy=Bad("ngram", block_length=1)),
            pytest.raises(ConfigurationError, match="an Action with a block length of at least 0 is needed"),
        ):
            model.generate(tiny.prompt(20), **GREEDY)

    def test_a_policy_that_chooses_a_source_that_is_not_there(self, model: Any) -> None:
        class Bad(Fixed):
            def choose(self, context: Any) -> Any:
                return autospec.Action("magic", 4)

        with (
            autospec.wrap(model, policy=Bad("ngram", block_length=1)),
            pytest.raises(ConfigurationError, match="chose draft source 'magic': usable here are none, ngram"),
        ):
            model.generate(tiny.prompt(20), **GREEDY)
