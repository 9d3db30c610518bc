"""Every source that drafts with a model, through what ends answers and what caches and prompts do to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from compared import answer
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import autospec
from autospec.caches import CACHE_KEYWORD
from autospec.drafts import Assistant, Blend, CrossTokenizer, EarlyExit, Suffix

pytestmark = pytest.mark.compat

ORDER = [*range(20, tiny.VOCAB), *range(20)]


def permuted(model: Any) -> Any:
    """The same model under ids in another order."""
    draft = tiny.near_copy(model)
    with torch.no_grad():
        for matrix in (draft.get_input_embeddings().weight, draft.get_output_embeddings().weight):
            matrix.copy_(matrix[ORDER].clone())
    return draft


def of_some_tokens(model: Any) -> Any:
    """A draft for the first 40 tokens, the last of which stands for all others."""
    draft = tiny.near_copy(model)
    draft.resize_token_embeddings(40)
    draft.config.target_token_ids = list(range(40))
    draft.config.unknown_id = 39
    return draft


SOURCES: dict[str, Callable[[Any], Any]] = {
    "assistant": lambda model: Assistant(tiny.near_copy(model), tokenizer=tiny.tokenizer()),
    "some tokens": lambda model: Assistant(of_some_tokens(model), tokenizer=tiny.tokenizer()),
    "early exit": lambda model: EarlyExit(1),
    "blend": lambda model: Blend(Assistant(tiny.near_copy(model), tokenizer=tiny.tokenizer()), Suffix(learns=False)),
    "by text": lambda model: CrossTokenizer(permuted(model), tiny.tokenizer(order=ORDER), method="text"),
    "shared": lambda model: CrossTokenizer(permuted(model), tiny.tokenizer(order=ORDER), method="shared"),
}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(params=SOURCES)
def make_source(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return SOURCES[request.param]


def assert_same(
    model: Any,
    make_source: Callable[[Any], Any],
    ids: Any,
    options: Callable[[], dict[str, Any]],
    block_length: int = 4,
) -> None:
    """Greedy and paired: plain decoding's tokens, and drafts were judged."""
    for do_sample in (False, True):
        plain = answer(model, ids, options, do_sample=do_sample)
        source = make_source(model)
        with autospec.wrap(
            model, tokenizer=tiny.tokenizer(), drafts=[source], policy=f"fixed:{source.name}:4"
        ) as speculator:
            assert torch.equal(answer(model, ids, options, do_sample=do_sample), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.fallback_reason is None
            assert speculator.last_request.notes is None
            assert speculator.last_request.num_judged_tokens > 0


class EndsAfter(StoppingCriteria):
    """At a length that is no border of blocks."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 20 + 11)


ENDINGS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "EOS in a block": lambda plain: {"eos_token_id": [int(plain[0, 20 + 9])]},
    "stop string": lambda plain: {
        "stop_strings": tiny.tokenizer().decode(plain[0, 20 + 8 : 20 + 10]),
        "tokenizer": tiny.tokenizer(),
    },
    "criterion": lambda plain: {"stopping_criteria": StoppingCriteriaList([EndsAfter()])},
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_endings(target: Any, make_source: Any, ending: str) -> None:
    ids = tiny.prompt(20)
    plain = answer(target, ids, do_sample=False)
    assert_same(target, make_source, ids, lambda: ENDINGS[ending](plain))


def test_padding_on_the_left(target: Any, make_source: Any) -> None:
    ids = tiny.prompt(20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert_same(target, make_source, ids, lambda: {"attention_mask": mask})


def test_a_target_with_a_short_window(make_source: Any) -> None:
    assert_same(tiny.mistral(), make_source, tiny.prompt(20), dict)


def test_a_plain_cache_on_a_target_with_a_short_window(make_source: Any) -> None:
    assert_same(tiny.mistral(), make_source, tiny.prompt(20), lambda: {CACHE_KEYWORD: DynamicCache()})


def test_a_prompt_in_chunks(target: Any, make_source: Any) -> None:
    assert_same(target, make_source, tiny.prompt(20), lambda: {"prefill_chunk_size": 6})


def test_several_turns_in_one_cache(target: Any, make_source: Any) -> None:
    """The cache that is handed back holds what plain decoding's does."""

    def turns() -> tuple[torch.Tensor, Any]:
        cache, ids = DynamicCache(config=target.config), tiny.prompt(12)
        for turn in range(3):
            ids = torch.cat([ids, tiny.prompt(3, seed=turn)], dim=1) if turn else ids
            ids = target.generate(ids, **{CACHE_KEYWORD: cache}, max_new_tokens=10, do_sample=False)
        return ids, cache

    plain, plain_cache = turns()
    source = make_source(target)
    with autospec.wrap(target, tokenizer=tiny.tokenizer(), drafts=[source], policy=f"fixed:{source.name}:3") as s:
        found, cache = turns()
        assert s.last_request is not None
        assert s.last_request.num_judged_tokens > 0
    assert torch.equal(found, plain)
    for layer, plain_layer in zip(cache.layers, plain_cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, plain_layer.keys)
        torch.testing.assert_close(layer.values, plain_layer.values)


class Cancelled(StoppingCriteria):
    """Raises when it is asked for the n-th time, as a request that is cancelled."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Hears(BaseStreamer):
    """Keeps what it hears, and raises after the n-th token."""

    def __init__(self, most: int = 1000) -> None:
        self.heard: list[int] = []
        self.most = most + 1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.heard += value.flatten().tolist()
        self.most -= 1
        if self.most == 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@pytest.mark.parametrize("where", ["criterion", "streamer"])
def test_a_users_cache_after_a_cancelled_request_is_plain_decodings(target: Any, make_source: Any, where: str) -> None:
    """Wherever in a block it is cancelled: as many tokens in the cache, and the same answer in the next turn."""

    def conversation(number: int) -> tuple[list[int], int, list[int]]:
        cache = DynamicCache(config=target.config)
        hears = Hears(number if where == "streamer" else 1000)
        criteria = StoppingCriteriaList([Cancelled(number)] if where == "criterion" else [])
        options: dict[str, Any] = {CACHE_KEYWORD: cache, "do_sample": False}
        with pytest.raises(KeyboardInterrupt):
            target.generate(tiny.prompt(20), **options, max_new_tokens=12, streamer=hears, stopping_criteria=criteria)
        held = cache.get_seq_length()
        ids = torch.tensor([[*hears.heard, 5, 6, 7]])
        return hears.heard, held, target.generate(ids, **options, max_new_tokens=6)[0].tolist()

    plain = [conversation(number) for number in range(1, 9)]
    source = make_source(target)
    with autospec.wrap(target, tokenizer=tiny.tokenizer(), drafts=[source], policy=f"fixed:{source.name}:5"):
        assert [conversation(number) for number in range(1, 9)] == plain


def test_a_forward_that_is_interrupted_leaves_no_drafts_in_a_users_cache(target: Any, make_source: Any) -> None:
    source, calls = make_source(target), 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt  # all layers have run

    cache, hears = DynamicCache(config=target.config), Hears()
    with autospec.wrap(target, tokenizer=tiny.tokenizer(), drafts=[source], policy=f"fixed:{source.name}:5"):
        handle = target.model.norm.register_forward_hook(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                target.generate(
                    tiny.prompt(20), **{CACHE_KEYWORD: cache}, max_new_tokens=12, do_sample=False, streamer=hears
                )
        finally:
            handle.remove()
    assert cache.get_seq_length() <= len(hears.heard)


def test_requests_side_by_side(target: Any, make_source: Any) -> None:
    prompts = [tiny.prompt(20, seed=seed) for seed in range(6)]
    plain = [target.generate(ids, max_new_tokens=16, do_sample=False) for ids in prompts]
    source = make_source(target)
    with (
        autospec.wrap(target, tokenizer=tiny.tokenizer(), drafts=[source], policy=f"fixed:{source.name}:3"),
        ThreadPoolExecutor(3) as pool,
    ):
        calls = [pool.submit(target.generate, ids, max_new_tokens=16, do_sample=False) for ids in prompts]
        assert all(torch.equal(call.result(), expected) for call, expected in zip(calls, plain, strict=True))


def test_a_failure_inside_a_layer_leaves_the_targets_cache_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the keys and the values, where a cache has the one and not yet the other."""
    from transformers.cache_utils import DynamicLayer

    target, ids = tiny.llama(num_hidden_layers=4), tiny.prompt(20)
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    update, cat = DynamicLayer.update, torch.cat
    is_drafting = False

    def half(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_drafting:
            self.keys = cat([self.keys, keys], dim=-2)
            raise MemoryError("no room for the values")
        return update(self, keys, values, *args, **kwargs)

    with autospec.wrap(target, drafts=[source := EarlyExit(2)], policy="fixed:early_exit:3") as speculator:
        assert source._assistant is not None
        forward = source._assistant.model.forward

        def drafting(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_drafting
            is_drafting = True
            try:
                return forward(*args, **kwargs)
            finally:
                is_drafting = False

        source._assistant.model.forward = drafting
        monkeypatch.setattr(DynamicLayer, "update", half)
        with pytest.warns(UserWarning, match="early_exit switched off: MemoryError: no room for the values"):
            assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.num_draft_tokens == 0


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_a_draft_that_fails_in_any_way_is_switched_off(target: Any, sampling: str) -> None:
    assistant = Assistant(tiny.near_copy(target), tokenizer=tiny.tokenizer())
    assistant.model.forward = lambda **_: 1 / 0
    with autospec.wrap(
        target, tokenizer=tiny.tokenizer(), drafts=[assistant], policy="fixed:assistant:3", sampling=sampling
    ) as speculator:
        with pytest.warns(UserWarning, match="assistant switched off: ZeroDivisionError"):
            target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=True)
        assert speculator.last_request is not None
        assert speculator.last_request.output_tokens == 12


def test_near_the_end_of_its_window_an_assistant_drafts_what_fits(target: Any) -> None:
    draft = tiny.near_copy(target)
    draft.config.max_position_embeddings = 30
    assistant = Assistant(draft, tokenizer=tiny.tokenizer())
    ids = tiny.prompt(20)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    with autospec.wrap(
        target, tokenizer=tiny.tokenizer(), drafts=[assistant], policy="fixed:assistant:16"
    ) as speculator:
        with pytest.warns(UserWarning, match="no longer fits the assistant's context window of 30 tokens"):
            assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.num_draft_tokens >= 9
