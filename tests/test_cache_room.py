"""Keys and values of a step are written behind those that are held, which are copied seldom."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import autospec
from autospec.cache_room import LEAST_ROOM, Room, fits
from autospec.caches import append, drop_last, first_layers_of_cache
from tests import tiny


def places(cache: DynamicCache) -> list[int]:
    return [held.data_ptr() for layer in cache.layers for held in (layer.keys, layer.values)]


def held(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.fixture
def model() -> Any:
    return tiny.llama()


@torch.no_grad()
def filled(model: Any, length: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    append(model, tiny.prompt(length), cache)
    return cache


@torch.no_grad()
def test_it_holds_what_a_growing_cache_holds_after_any_steps_and_rollbacks(model: Any) -> None:
    ours, plain = filled(model, 20), filled(model, 20)
    room = Room(ours)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        width = int(torch.randint(1, 9, (), generator=generator))
        tokens = torch.randint(0, 50, (1, width), generator=generator)
        found, expected = (append(model, tokens, cache, logits_kept=width)[0] for cache in (ours, plain))
        torch.testing.assert_close(found, expected)
        for cache in (ours, plain):
            drop_last(cache, width // 2)
    for mine, theirs in zip(held(ours), held(plain), strict=True):
        torch.testing.assert_close(mine, theirs)
    room.close(is_kept=True)
    assert all(tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held(ours))
    tokens = tiny.prompt(3)
    torch.testing.assert_close(append(model, tokens, ours)[0], append(model, tokens, plain)[0])


@torch.no_grad()
def test_what_is_held_is_copied_once_until_the_room_is_used_up(model: Any) -> None:
    cache = filled(model, 20)
    before = places(cache)
    Room(cache)
    seen = []
    for _ in range(LEAST_ROOM + 2):
        append(model, tiny.prompt(1), cache)
        seen.append(places(cache))
    assert seen[0] != before
    assert all(each == seen[0] for each in seen[1 : LEAST_ROOM + 1])  # the first made room for itself besides
    assert all(a != b for a, b in zip(seen[0], seen[-1], strict=True))


@torch.no_grad()
def test_a_block_that_is_taken_back_is_written_over(model: Any) -> None:
    cache = filled(model, 20)
    Room(cache)
    append(model, tiny.prompt(5), cache)
    first = places(cache)
    for _ in range(100):
        drop_last(cache, 5)
        append(model, tiny.prompt(5), cache)
    assert places(cache) == first


@torch.no_grad()
def test_tensors_that_somebody_set_are_taken_as_they_are(model: Any) -> None:
    ours, plain = filled(model, 20), filled(model, 20)
    Room(ours)
    for cache in (ours, plain):
        append(model, tiny.prompt(2), cache)
        for layer in cache.layers:
            layer.keys, layer.values = (2.0 * layer.keys).contiguous(), layer.values.flip(-2)
    kept = [tensor.clone() for tensor in held(ours)]
    views = held(ours)
    torch.testing.assert_close(append(model, tiny.prompt(1), ours)[0], append(model, tiny.prompt(1), plain)[0])
    assert all(torch.equal(view, copied) for view, copied in zip(views, kept, strict=True))


@torch.no_grad()
def test_copies_grow_by_themselves(model: Any) -> None:
    """An early exit goes on from the target's first layers, and the target writes over nothing that it holds."""
    cache = filled(model, 20)
    room = Room(cache)
    append(model, tiny.prompt(1), cache)
    draft = first_layers_of_cache(cache, 1, 21)
    assert draft is not None
    deep = copy.deepcopy(cache)
    draft.layers[0].update(*(torch.ones(1, held_.shape[1], 1, held_.shape[3]) for held_ in held(draft)[:2]))
    drafted = draft.layers[0].keys.clone()
    append(model, tiny.prompt(4), cache)
    append(model, tiny.prompt(2), deep)
    assert cache.get_seq_length() == 25
    assert deep.get_seq_length() == 23
    assert torch.equal(draft.layers[0].keys, drafted)
    room.close(is_kept=False)
    room.close(is_kept=False)
    assert all("update" not in vars(layer) for layer in cache.layers)


def test_caches_of_other_kinds_and_compiled_models_are_left_alone(model: Any) -> None:
    cache = filled(model, 5)
    assert fits(model, cache)
    room = Room(cache)
    assert not fits(model, cache)  # it has one
    room.close(is_kept=False)
    assert not fits(model, StaticCache(config=model.config, max_cache_len=16))
    assert not fits(model, None)
    sliding = DynamicCache(config=tiny.llama(sliding_window=8, layer_types=["sliding_attention"] * 2).config)
    assert fits(model, sliding) == all(type(layer).__name__ == "DynamicLayer" for layer in sliding.layers)
    model.forward = model.forward
    assert not fits(model, cache)


@pytest.mark.parametrize("policy", ["off", "fixed:ngram:4"])
def test_generate_gives_the_cache_back_as_ever(model: Any, policy: str) -> None:
    prompt = tiny.prompt(12, period=3)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(prompt, **options)
    with autospec.wrap(model, policy=policy, backend="eager"):
        found = model.generate(prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    caches = [getattr(each, "cache", None) or each.past_key_values for each in (found, expected)]
    for mine, theirs in zip(*map(held, caches), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.is_contiguous()
    assert all("update" not in vars(layer) for layer in caches[0].layers)


def test_an_error_in_a_forward_leaves_no_room_behind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DynamicCache(config=model.config)
    mlp, calls = model.model.layers[1].mlp, []

    def failing(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("planted")

    handle = mlp.register_forward_pre_hook(failing)
    keyword = autospec.caches.CACHE_KEYWORD
    with autospec.wrap(model, policy="off", backend="eager"), pytest.raises(RuntimeError, match="planted"):
        model.generate(tiny.prompt(12), max_new_tokens=20, do_sample=False, **{keyword: cache})
    handle.remove()
    assert all("update" not in vars(layer) for layer in cache.layers)
