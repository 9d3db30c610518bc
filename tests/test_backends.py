"""Forwards of fixed shape: the same tokens as without, memory accounted for, and eager where they do not fit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from test_decoder import LENGTHS, SAMPLING, Alternating, Oracle
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import autospec
from autospec.backends import Static, StaticModel
from autospec.backends.backend import BUSY, prepare
from autospec.backends.base import CannotPrepareError
from autospec.backends.plain import PlainRunner
from autospec.backends.widths import plan
from autospec.caches import append, decoding_cache, find_cache
from autospec.drafts import Assistant, EarlyExit, NGram, Proposal
from autospec.errors import ConfigurationError
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

PLAIN = Static("plain", widths=(1, 2, 3, 5, 9), capacities=(48, 64, 128, 256))


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return tiny.near_copy(target)


def both(
    model: Any, ids: torch.Tensor, *, drafts: Any, policy: Any, backend: Static = PLAIN, seed: int = 0, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """Plain answer, the answer over static buffers from the same seed, and the record of the latter."""
    torch.manual_seed(seed)
    plain = model.generate(ids, **kwargs)
    with autospec.wrap(model, drafts=drafts, policy=policy, backend=backend) as speculator:
        torch.manual_seed(seed)
        found = model.generate(ids, **kwargs)
        record = speculator.last_request
        assert speculator.backend.name == backend.runner, str(speculator.backend)
    assert record is not None
    assert record.fallback_reason is None, record.fallback_reason
    return plain, found, record


class TestPlan:
    def test_shorter_blocks_are_padded_and_longer_ones_split(self) -> None:
        assert plan(4, 10, (1, 2, 5), (16, 32)) == [(4, 5, 16)]
        assert plan(4, 12, (1, 2, 5), (16, 32)) == [(4, 5, 32)]
        assert plan(9, 0, (1, 2, 5), (32,)) == [(5, 5, 32), (4, 5, 32)]

    def test_padding_never_reaches_beyond_the_cache(self) -> None:
        assert plan(3, 12, (1, 2, 5), (16,)) == [(2, 2, 16), (1, 1, 16)]
        assert plan(1, 15, (1, 2, 5), (16,)) == [(1, 1, 16)]

    @pytest.mark.parametrize("num_tokens", range(1, 40))
    def test_all_tokens_are_run_once(self, num_tokens: int) -> None:
        for length in range(64 - num_tokens + 1):
            steps = plan(num_tokens, length, (1, 2, 3, 5, 9, 17), (8, 32, 64))
            assert sum(step.num_tokens for step in steps) == num_tokens
            for step in steps:
                assert step.num_tokens <= step.width
                assert length + step.width <= step.capacity
                length += step.num_tokens


@pytest.mark.parametrize("block_length", LENGTHS)
@pytest.mark.parametrize("length", [1, 20, 60])
@pytest.mark.parametrize("source", ["ngram", "assistant"])
def test_greedy_equals_generate(target: Any, draft: Any, source: str, block_length: int, length: int) -> None:
    plain, found, record = both(
        target,
        tiny.prompt(length),
        drafts=[NGram(min_ngram=1), Assistant(draft)],
        policy=Fixed(source, block_length=block_length),
        max_new_tokens=40,
        do_sample=False,
    )
    assert torch.equal(plain, found)
    assert record.notes is None
    assert record.output_tokens == 40
    if source == "assistant":
        assert 0 < record.num_accepted_tokens < record.num_judged_tokens


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize("actions", [[("ngram", 4)], [("assistant", 5), ("none", 0), ("ngram", 8)]], ids=str)
def test_sampled_text_follows_the_seed(target: Any, draft: Any, actions: Any, options: Any) -> None:
    for seed in range(3):
        plain, found, record = both(
            target,
            tiny.prompt(15, seed),
            drafts=[NGram(min_ngram=1), Assistant(draft)],
            policy=Alternating(*actions),
            seed=seed,
            max_new_tokens=24,
            do_sample=True,
            **options,
        )
        assert torch.equal(plain, found), seed
        assert record.notes is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_kinds_of_attention(attention: str, dtype: torch.dtype) -> None:
    model = tiny.llama(seed=4, dtype=dtype, attn_implementation=attention)
    ids = tiny.prompt(21)
    answer = model.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
    plain, found, _ = both(
        model,
        ids,
        drafts=[Oracle(answer, spoil_every=4)],
        policy=Fixed("oracle", block_length=6),
        max_new_tokens=40,
        do_sample=False,
    )
    assert torch.equal(plain, found)


@pytest.mark.parametrize("where", range(9))
@pytest.mark.parametrize("block_length", [8, 5])
def test_rollback_after_a_rejection_at_each_position(target: Any, block_length: int, where: int) -> None:
    class WrongAt(Oracle):
        def propose(self, committed: Any, length: int) -> Proposal:
            tokens = self._answer[len(committed) : len(committed) + length]
            return Proposal([(t + 1) % tiny.VOCAB if i == where else t for i, t in enumerate(tokens)])

    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
    plain, found, record = both(
        target,
        ids,
        drafts=[WrongAt(answer)],
        policy=Fixed("oracle", block_length=block_length),
        max_new_tokens=40,
        do_sample=False,
    )
    assert torch.equal(plain, found)
    assert set(record.acceptance_lengths) <= {min(where, block_length) + 1, *range(1, block_length + 2)}
    if where < block_length:
        assert record.acceptance_lengths[where + 1] > 1


def test_a_block_longer_than_the_widest_forward(target: Any) -> None:
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=60, do_sample=False)[0].tolist()
    for block_length in (9, 13, 30):
        plain, found, record = both(
            target,
            ids,
            drafts=[Oracle(answer, spoil_every=17)],
            policy=Fixed("oracle", block_length=block_length),
            max_new_tokens=60,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert max(record.acceptance_lengths) > 9


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_a_rejected_token_left_behind_weighs_nothing(attention: str) -> None:
    """A token that makes the model overflow: what stands in the cache for it must be gone, not only masked."""
    model = tiny.llama(seed=2, attn_implementation=attention)
    poison = tiny.VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.inf
    tokens = tiny.prompt(20).clamp(max=poison - 1)
    static = next(iter(prepare(model, {}, PLAIN).models))
    with torch.no_grad():
        _, cache = append(model, tokens, decoding_cache(model))
        static.load(cache)
        for bad in ([3, poison, poison, poison], [poison]):
            assert not static.run(torch.tensor([bad]))[-1].isfinite().all()
            static.crop(len(bad))
        found = static.run(torch.tensor([[5, 6]]))
        expected, _ = append(model, torch.tensor([[5, 6]]), cache, logits_kept=2)
    torch.testing.assert_close(found, expected)


class TestCapacity:
    def test_an_answer_that_outgrows_it_goes_on_without(self, target: Any, draft: Any) -> None:
        for source in (Assistant(draft), NGram(min_ngram=1)):
            plain, found, record = both(
                target,
                tiny.prompt(20),
                drafts=[source],
                policy=Fixed(source.name, block_length=4),
                backend=Static("plain", widths=(1, 2, 5), capacities=(24, 40)),
                max_new_tokens=60,
                do_sample=False,
                return_dict_in_generate=True,
            )
            assert torch.equal(plain.sequences, found.sequences)
            assert record.notes is not None
            assert "the largest capacity is used up" in record.notes
            _assert_same_cache(find_cache(plain), find_cache(found))

    def test_a_prompt_that_is_longer_is_decoded_eagerly(self, target: Any) -> None:
        plain, found, record = both(
            target,
            tiny.prompt(60),
            drafts=[NGram(min_ngram=1)],
            policy=Fixed("ngram", block_length=4),
            backend=Static("plain", widths=(1, 2, 5), capacities=(40,)),
            max_new_tokens=10,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert record.notes == "decoded eagerly: its text is longer than 40 tokens, the largest capacity"

    def test_widths_that_hardly_fit_the_smallest(self, target: Any) -> None:
        for length in range(1, 12):
            plain, found, record = both(
                target,
                tiny.prompt(length),
                drafts=[NGram(min_ngram=1)],
                policy=Fixed("ngram", block_length=8),
                backend=Static("plain", widths=(1, 3, 9), capacities=(9, 11, 12, 64)),
                max_new_tokens=12,
                do_sample=False,
            )
            assert torch.equal(plain, found)
            assert record.notes is None

    def test_the_last_positions_are_used(self, target: Any) -> None:
        """Blocks whose padding would not fit are run in narrower forwards."""
        plain, found, record = both(
            target,
            tiny.prompt(20),
            drafts=[NGram(min_ngram=1)],
            policy=Fixed("ngram", block_length=6),
            backend=Static("plain", widths=(1, 5), capacities=(50,)),
            max_new_tokens=30,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert record.notes is None


def _assert_same_cache(expected: Any, found: Any) -> None:
    assert type(expected) is type(found)
    assert expected.get_seq_length() == found.get_seq_length()
    for a, b in zip(expected.layers, found.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)
        torch.testing.assert_close(a.values, b.values)


@pytest.mark.parametrize("do_sample", [False, True])
def test_outputs_and_cache_are_those_of_generate(target: Any, draft: Any, do_sample: bool) -> None:
    plain, found, _ = both(
        target,
        tiny.prompt(20),
        drafts=[Assistant(draft)],
        policy=Fixed("assistant", block_length=4),
        max_new_tokens=20,
        do_sample=do_sample,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert torch.equal(plain.sequences, found.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(plain, name), getattr(found, name), strict=True):
            torch.testing.assert_close(a, b)
    _assert_same_cache(find_cache(plain), find_cache(found))


def test_a_cache_that_was_handed_in_grows_as_it_does_in_generate(target: Any) -> None:
    from autospec.caches import CACHE_KEYWORD

    first, second = tiny.prompt(20), tiny.prompt(9, seed=3)
    caches = []
    answers = []
    for backend in (None, PLAIN):
        cache = DynamicCache(config=target.config)
        with autospec.wrap(
            target,
            drafts=[NGram(min_ngram=1)],
            policy="off" if backend is None else Fixed("ngram", block_length=4),
            backend=backend or "eager",
        ):
            options: dict[str, Any] = {"do_sample": False, CACHE_KEYWORD: cache}
            answer = target.generate(first, max_new_tokens=12, **options)
            answer = target.generate(torch.cat([answer, second], dim=-1), max_new_tokens=12, **options)
        caches.append(cache)
        answers.append(answer)
    assert torch.equal(*answers)
    _assert_same_cache(*caches)


def test_stop_strings_and_streamer(target: Any) -> None:
    tokenizer = tiny.tokenizer()
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=30, do_sample=False)[0]
    stop = tokenizer.decode(answer[33:35])

    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Any) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    seen, expected = Collect(), Collect()
    plain = target.generate(
        ids, max_new_tokens=30, do_sample=False, stop_strings=stop, tokenizer=tokenizer, streamer=expected
    )
    with autospec.wrap(
        target,
        tokenizer=tokenizer,
        drafts=[Oracle(answer.tolist(), spoil_every=5)],
        policy=Fixed("oracle", block_length=8),
        backend=PLAIN,
    ):
        found = target.generate(ids, max_new_tokens=30, do_sample=False, stop_strings=stop, streamer=seen)
    assert torch.equal(plain, found)
    assert seen.tokens == expected.tokens
    assert found.shape[1] < 50


class TestSeveralRequests:
    def test_one_inside_another_is_decoded_eagerly(self, target: Any, draft: Any) -> None:
        ids = tiny.prompt(20)
        inner: list[Any] = []

        class Nested(BaseStreamer):
            def put(self, value: Any) -> None:
                if not inner and value.numel() == 1:
                    inner.append(None)
                    inner[0] = target.generate(ids, max_new_tokens=20, do_sample=False)
                    inner.append(speculator.last_request)

            def end(self) -> None:
                pass

        plain = target.generate(ids, max_new_tokens=20, do_sample=False)
        with autospec.wrap(
            target, drafts=[Assistant(draft)], policy=Fixed("assistant", block_length=4), backend=PLAIN
        ) as speculator:
            found = target.generate(ids, max_new_tokens=20, do_sample=False, streamer=Nested())
            record = speculator.last_request
        assert torch.equal(plain, found)
        assert torch.equal(plain, inner[0])
        assert record is not None
        assert record.notes is None
        assert inner[1].notes == f"decoded eagerly: {BUSY}"

    def test_in_threads(self, target: Any, draft: Any) -> None:
        prompts = [tiny.prompt(20 + number, number) for number in range(4)]
        plain = [target.generate(ids, max_new_tokens=30, do_sample=False) for ids in prompts]
        found: dict[int, Any] = {}

        def run(number: int) -> None:
            for _ in range(3):
                found[number] = target.generate(prompts[number], max_new_tokens=30, do_sample=False)

        with autospec.wrap(target, drafts=[Assistant(draft)], policy=Fixed("assistant", block_length=4), backend=PLAIN):
            threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for number, answer in enumerate(plain):
            assert torch.equal(answer, found[number])

    def test_nothing_of_one_reaches_the_next(self, target: Any, draft: Any) -> None:
        with autospec.wrap(
            target, drafts=[Assistant(draft)], policy=Fixed("assistant", block_length=4), backend=PLAIN
        ) as speculator:
            for length in (40, 3, 25, 11):
                ids = tiny.prompt(length, seed=length)
                found = target.generate(ids, max_new_tokens=20, do_sample=False)
                assert speculator.last_request is not None
                assert speculator.last_request.notes is None
                for static in speculator.backend.models:
                    assert static.length == 0
                    assert not static._store.keys.any()
                with speculator.control():
                    assert torch.equal(found, target.generate(ids, max_new_tokens=20, do_sample=False))


class Failing(LogitsProcessor):
    """Raises when it is asked about a text of a certain length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] >= self._length:
            raise ZeroDivisionError("planted")
        return scores


@pytest.mark.parametrize("where", range(24, 34))
def test_an_error_in_the_middle_of_a_block(target: Any, where: int) -> None:
    """The cache is left as plain decoding leaves it, and the buffers are free for the next request."""
    from autospec.caches import CACHE_KEYWORD

    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=30, do_sample=False)
    caches = []
    for backend in (None, PLAIN):
        cache = DynamicCache(config=target.config)
        options: dict[str, Any] = {
            "max_new_tokens": 30,
            "do_sample": False,
            "logits_processor": LogitsProcessorList([Failing(where)]),
            CACHE_KEYWORD: cache,
        }
        if backend is None:
            with pytest.raises(ZeroDivisionError, match="planted"):
                target.generate(ids, **options)
        else:
            with autospec.wrap(
                target,
                drafts=[Oracle(answer[0].tolist(), spoil_every=7)],
                policy=Fixed("oracle", block_length=6),
                backend=backend,
            ) as speculator:
                with pytest.raises(ZeroDivisionError, match="planted"):
                    target.generate(ids, **options)
                assert torch.equal(target.generate(ids, max_new_tokens=30, do_sample=False), answer)
                assert speculator.last_request is not None
                assert speculator.last_request.notes is None
        caches.append(cache)
    _assert_same_cache(*caches)


def test_a_forward_that_fails_gives_the_buffers_back(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny.prompt(20)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    with autospec.wrap(
        target, drafts=[NGram(min_ngram=1)], policy=Fixed("ngram", block_length=4), backend=PLAIN
    ) as speculator:
        static = speculator.backend.target
        assert static is not None
        right = dict(static._forwards)

        def failing() -> torch.Tensor:
            raise ZeroDivisionError("planted")

        static._forwards.update({key: failing for key in right if key[0] > 2})
        with pytest.raises(ZeroDivisionError):
            target.generate(ids, max_new_tokens=20, do_sample=False)
        static._forwards.update(right)
        assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.notes is None


class TestEager:
    """What is decoded eagerly, with the reason in the record."""

    def _notes(self, model: Any, ids: torch.Tensor, drafts: Any = ("ngram",), **options: Any) -> str | None:
        plain = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
        name = drafts[0] if isinstance(drafts[0], str) else drafts[0].name
        with autospec.wrap(model, drafts=drafts, policy=Fixed(name, block_length=3), backend=PLAIN) as speculator:
            assert speculator.backend.name == "plain", str(speculator.backend)
            assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, **options), plain)
            assert speculator.last_request is not None
            return speculator.last_request.notes

    def test_a_padded_prompt(self, target: Any) -> None:
        ids = tiny.prompt(20)
        mask = torch.ones_like(ids)
        mask[:, :4] = 0
        assert self._notes(target, ids, attention_mask=mask) == "decoded eagerly: its prompt is padded or masked"
        assert self._notes(target, ids, attention_mask=torch.ones_like(ids)) is None

    def test_positions_of_its_own(self, target: Any) -> None:
        ids = tiny.prompt(20)
        notes = self._notes(target, ids, position_ids=torch.arange(3, 23)[None])
        assert notes == "decoded eagerly: it brings positions of its own"

    def test_autocast(self, target: Any) -> None:
        model = tiny.llama(dtype=torch.float32)
        with autospec.wrap(model, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=PLAIN) as speculator:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
            assert speculator.last_request is not None
            assert speculator.last_request.notes == "decoded eagerly: autocast is on"

    def test_inference_mode_is_no_obstacle(self, target: Any, draft: Any) -> None:
        with torch.inference_mode():
            assert self._notes(target, tiny.prompt(20), drafts=[Assistant(draft)]) is None

    def test_a_model_that_was_converted(self) -> None:
        model = tiny.llama()
        with autospec.wrap(model, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=PLAIN) as speculator:
            model.to(torch.float32)
            model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
            assert speculator.last_request is not None
            assert "was moved, converted or changed" in (speculator.last_request.notes or "")

    def test_a_hook(self) -> None:
        model = tiny.llama()
        with autospec.wrap(model, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=PLAIN) as speculator:
            handle = model.model.layers[0].mlp.register_forward_hook(lambda *given: None)
            model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
            assert speculator.last_request is not None
            assert "has a forward hook" in (speculator.last_request.notes or "")
            handle.remove()
            model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
            assert speculator.last_request.notes is None

    def test_early_exit_goes_on_from_the_buffers(self, target: Any) -> None:
        assert self._notes(target, tiny.prompt(20), drafts=[EarlyExit(1)]) is None

    def test_an_assistant_whose_buffers_are_too_short_drafts_without(self, target: Any, draft: Any) -> None:
        short = tiny.llama(seed=5, max_position_embeddings=40)
        plain, found, record = both(
            target,
            tiny.prompt(30),
            drafts=[Assistant(short)],
            policy=Fixed("assistant", block_length=3),
            backend=Static("plain", widths=(1, 2, 5), capacities=(32, 128)),
            max_new_tokens=8,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert record.notes is None
        assert record.num_draft_tokens > 0


class TestWhatIsNotPrepared:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (tiny.mistral, "DynamicSlidingWindowLayer"),
            (lambda: tiny.llama(max_position_embeddings=40), "window of 40 tokens is shorter than every capacity"),
        ],
    )
    def test_the_reason_is_told(self, make: Any, reason: str) -> None:
        model = make()
        ids = tiny.prompt(10)
        plain = model.generate(ids, max_new_tokens=8, do_sample=False)
        with pytest.warns(UserWarning, match="forwards run eagerly"):
            speculator = autospec.wrap(model, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=PLAIN)
        with speculator:
            assert speculator.backend.name == "eager"
            assert reason in speculator.backend.reason
            assert reason in str(speculator.backend)
            assert speculator.backend.memory_bytes == 0
            assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.notes is None

    def test_a_runner_that_fails(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(self: Any, forward: Any) -> Any:
            raise CannotPrepareError("no compiler here")

        monkeypatch.setattr(PlainRunner, "prepare", failing)
        with pytest.warns(UserWarning, match="forwards run eagerly: no compiler here"):
            speculator = autospec.wrap(target, drafts=["ngram"], policy="off", backend=PLAIN)
        with speculator:
            assert str(speculator.backend) == "eager (no compiler here)"

    def test_a_model_that_fails_in_a_way_of_its_own(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PlainRunner, "prepare", lambda self, forward: {}["nothing"])
        with pytest.warns(UserWarning, match="forwards run eagerly: KeyError"):
            speculator = autospec.wrap(target, drafts=["ngram"], policy="off", backend=PLAIN)
        with speculator:
            assert speculator.backend.name == "eager"

    def test_a_runner_that_gives_other_logits(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PlainRunner, "prepare", lambda self, forward: lambda: forward().roll(1, dims=-1))
        with pytest.warns(UserWarning, match="gives other logits"):
            speculator = autospec.wrap(target, drafts=["ngram"], policy="off", backend=PLAIN)
        with speculator:
            assert speculator.backend.name == "eager"

    def test_a_draft_that_cannot_be_prepared_drafts_eagerly(self, target: Any) -> None:
        draft = tiny.mistral(window=8)
        ids = tiny.prompt(20)
        plain = target.generate(ids, max_new_tokens=20, do_sample=False)
        with autospec.wrap(
            target, drafts=[Assistant(draft)], policy=Fixed("assistant", block_length=3), backend=PLAIN
        ) as speculator:
            assert "assistant runs eagerly: its cache has layers" in str(speculator.backend)
            assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False), plain)

    @pytest.mark.parametrize("backend", ["fast", "inductor", None, 3])
    def test_unknown(self, target: Any, backend: Any) -> None:
        with pytest.raises(ConfigurationError, match="known are auto, eager, packed, compile"):
            autospec.wrap(target, backend=backend)

    @pytest.mark.parametrize(
        "options",
        [
            {"runner": "fast"},
            {"runner": "plain", "widths": (2, 4)},
            {"runner": "plain", "widths": (1, 1)},
            {"runner": "plain", "widths": ()},
            {"runner": "plain", "capacities": (64, 32)},
            {"runner": "plain", "capacities": [64]},
        ],
        ids=str,
    )
    def test_settings(self, options: Any) -> None:
        with pytest.raises(ConfigurationError):
            Static(**options)

    def test_cuda_graphs_without_cuda(self, target: Any) -> None:
        with pytest.warns(UserWarning, match="CUDA graphs need a CUDA device"):
            speculator = autospec.wrap(target, drafts=["ngram"], policy="off", backend=Static("cuda_graph"))
        with speculator:
            assert speculator.backend.name == "eager"


class TestBackend:
    def test_memory_is_that_of_the_buffers(self, target: Any, draft: Any) -> None:
        with autospec.wrap(target, drafts=[Assistant(draft)], policy="off", backend=PLAIN) as speculator:
            backend = speculator.backend
            weights = {each.untyped_storage().data_ptr() for m in (target, draft) for each in m.parameters()}
            weights |= {each.untyped_storage().data_ptr() for m in (target, draft) for each in m.buffers()}
            assert backend.memory_bytes == sum(_tensor_bytes(backend.models, weights))
            layout_bytes = 2 * 2 * 8 * 2 * 8 * 256  # layers, heads, size, keys and values, float64, tokens
            assert layout_bytes < backend.memory_bytes / 2 < 1.1 * layout_bytes
        assert backend.memory_bytes == 0

    def test_what_it_says(self, target: Any) -> None:
        with autospec.wrap(target, drafts=["ngram"], policy="off", backend=PLAIN) as speculator:
            backend = speculator.backend
            assert backend.name == "plain"
            assert backend.widths == (1, 2, 3, 5, 9)
            assert backend.capacities == (48, 64, 128, 256)
            assert backend.captures == 20
            assert set(backend.speedups) == {1, 9}
            assert "; 20 forwards: widths 1 2 3 5 9, capacities 48 64 128 256; " in str(backend)
            assert str(backend).startswith("plain (asked for")
            assert "\n" not in str(backend)
        with autospec.wrap(target, drafts=["ngram"], policy="off", backend="eager") as speculator:
            assert str(speculator.backend) == "eager (asked for)"

    def test_it_is_recorded(self, target: Any) -> None:
        found = []
        for backend in (PLAIN, "eager"):
            with autospec.wrap(target, drafts=["ngram"], policy="off", backend=backend) as speculator:
                target.generate(tiny.prompt(9), max_new_tokens=3)
                assert speculator.last_request is not None
                assert speculator.last_request.deployment is not None
                found.append(speculator.last_request.deployment.versions.get("backend"))
        assert found == ["plain", None]

    def test_no_forward_is_prepared_in_service(self, target: Any, draft: Any) -> None:
        with autospec.wrap(
            target,
            drafts=[Assistant(draft), NGram(min_ngram=1)],
            policy=Alternating(*[(source, k) for k in range(17) for source in ("assistant", "ngram")]),
            backend=PLAIN,
        ) as speculator:
            before = speculator.backend.captures
            for number in range(50):
                target.generate(tiny.prompt(10 + number, number), max_new_tokens=40, do_sample=False)
            assert speculator.backend.captures == before


def _tensor_bytes(models: list[StaticModel], shared: set[int]) -> Iterator[int]:
    """Of each storage that can be reached, weights left out."""
    import gc
    from types import FunctionType, ModuleType

    seen: set[int] = set()
    waiting: list[Any] = list(models)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, torch.nn.Module)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            if storage.data_ptr() not in seen and storage.data_ptr() not in shared:
                seen.add(storage.data_ptr())
                yield storage.nbytes()
            continue
        if isinstance(thing, FunctionType):
            waiting.extend(cell.cell_contents for cell in thing.__closure__ or ())
            continue
        waiting.extend(gc.get_referents(thing))


class TestCosts:
    def test_calibration_times_what_will_run(self, target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ran: list[tuple[Any, int]] = []
        run = StaticModel.run

        def watched(self: Any, tokens: Any, *given: Any) -> Any:
            ran.append((self.model, tokens.shape[1]))
            return run(self, tokens, *given)

        with autospec.wrap(
            target, drafts=[Assistant(draft)], policy="off", backend=Static("plain", capacities=(128,))
        ) as speculator:
            from autospec.costs.calibration import calibrate

            monkeypatch.setattr(StaticModel, "run", watched)
            table = calibrate(target, speculator.sources, budget_seconds=0.3, backend=speculator.backend)
            assert {width for model, width in ran if model is target} >= {1, 2, 3, 5, 9, 17}
            assert {width for model, width in ran if model is draft} <= {1, 2}
            assert any(model is draft for model, _ in ran)
            assert set(table.drafts) == {"assistant"}
            assert all(static.length == 0 for static in speculator.backend.models)

    def test_costs_of_another_backend_are_not_used(self, target: Any) -> None:
        from autospec.costs.fingerprint import describe, digest

        found = set()
        for backend in ("eager", PLAIN, Static("plain", widths=(1, 4), capacities=(64,))):
            with autospec.wrap(target, drafts=["ngram"], policy="off", backend=backend) as speculator:
                found.add(digest(describe(target, speculator.sources, speculator.backend)))
        assert len(found) == 3
        assert digest(describe(target, speculator.sources)) in found

    def test_policy_auto(self, target: Any, draft: Any) -> None:
        ids = tiny.prompt(20)
        plain = target.generate(ids, max_new_tokens=40, do_sample=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with autospec.wrap(
                target, drafts=[Assistant(draft), "ngram"], control_share=0.0, backend=PLAIN
            ) as speculator:
                found = target.generate(ids, max_new_tokens=40, do_sample=False)
                assert speculator.last_request is not None
                assert speculator.last_request.notes is None
        assert torch.equal(plain, found)
