"""Keys and values of a step are written behind those that are held, which are copied seldom."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import autospec
from autospec.cache_room import LEAST_ROOM_TOKENS, GrowingLayer, Room
from autospec.caches import CACHE_KEYWORD, append, drop_last, first_layers_of_cache
from tests import tiny

pytestmark = pytest.mark.compat


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
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held(ours))
    tokens = tiny.prompt(3)
    torch.testing.assert_close(append(model, tokens, ours)[0], append(model, tokens, plain)[0])


@torch.no_grad()
def test_what_is_held_is_copied_once_until_the_room_is_used_up(model: Any) -> None:
    cache = filled(model, 20)
    before = places(cache)
    Room(cache)
    seen = []
    for _ in range(LEAST_ROOM_TOKENS + 2):
        append(model, tiny.prompt(1), cache)
        seen.append(places(cache))
    assert seen[0] != before
    assert all(each == seen[0] for each in seen[1 : LEAST_ROOM_TOKENS + 1])  # the first made room for itself besides
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


def reduced(layer: Any) -> Any:
    """As pickling takes it apart and together again."""
    make, arguments, state = layer.__reduce_ex__(4)
    made = make(*arguments)
    vars(made).update(state)
    return made


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, reduced])
def test_copies_are_plain_and_write_into_nothing(model: Any, copied: Any) -> None:
    """An early exit goes on from the target's first layers, and somebody may keep a layer."""
    cache = filled(model, 20)
    Room(cache)
    append(model, tiny.prompt(1), cache)
    layer = cache.layers[0]
    other = copied(layer)
    assert type(layer) is GrowingLayer
    assert type(other) is DynamicLayer
    new = torch.ones(1, layer.keys.shape[1], 1, layer.keys.shape[3], dtype=layer.keys.dtype)
    other.update(new, new)
    kept = other.keys.clone()
    append(model, tiny.prompt(4), cache)
    assert layer.get_seq_length() == 25
    assert other.get_seq_length() == 22
    assert torch.equal(other.keys, kept)
    assert not torch.equal(layer.keys[:, :, 21], kept[:, :, 21])
    other.reset()  # which is not the same in all releases
    other.update(new, new)
    assert layer.get_seq_length() == 25


@torch.no_grad()
def test_the_first_layers_can_be_lent(model: Any) -> None:
    cache = filled(model, 20)
    Room(cache)
    append(model, tiny.prompt(1), cache)
    lent = first_layers_of_cache(cache, 1, 21)
    assert lent is not None
    assert type(lent.layers[0]) is DynamicLayer


@torch.no_grad()
def test_one_head_of_keys_leaves_nothing_behind_either() -> None:
    model = tiny.llama(num_key_value_heads=1)
    cache = filled(model, 20)
    room = Room(cache)
    append(model, tiny.prompt(1), cache)
    room.close(is_kept=True)
    room.close(is_kept=True)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held(cache))
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}


@torch.no_grad()
def test_what_does_not_continue_is_left_to_transformers(model: Any) -> None:
    ours, plain = filled(model, 20), filled(model, 20)
    Room(ours)
    for cache in (ours, plain):
        append(model, tiny.prompt(2), cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
    torch.testing.assert_close(append(model, tiny.prompt(1), ours)[0], append(model, tiny.prompt(1), plain)[0])
    layer, narrow = ours.layers[0], torch.ones(1, 1, 1, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer.update(narrow, narrow)


def test_caches_of_other_kinds_are_left_alone(model: Any) -> None:
    for cache in (None, StaticCache(config=model.config, max_cache_len=16), DynamicCache(config=model.config)):
        before = [type(layer) for layer in cache.layers] if cache is not None else []
        room = Room(cache)
        assert [type(layer) for layer in cache.layers] == before if cache is not None else True
        room.close(is_kept=True)
    forgetful = filled(tiny.mistral(), 20)
    kinds = {type(layer) for layer in forgetful.layers}
    Room(forgetful)
    assert {type(layer) for layer in forgetful.layers} == kinds


def test_controls_grow_as_in_generate(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    real = DynamicLayer.update

    def watched(layer: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(layer))
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", watched)
    for share in (1.0, 0.0):
        with autospec.wrap(model, policy="fixed:ngram:4", backend="eager", control_share=share) as speculator:
            model.generate(tiny.prompt(12), max_new_tokens=2, do_sample=False)  # it is probed first
            seen.clear()
            model.generate(tiny.prompt(12), max_new_tokens=9, do_sample=False)
            assert speculator.last_request.is_control == bool(share)
        assert set(seen) == {DynamicLayer}
        assert len(seen) == (2 * 9 if share else 2)  # without a control, that of the prompt alone


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
        assert mine.untyped_storage().nbytes() == mine.nbytes
    assert {type(layer) for layer in caches[0].layers} == {DynamicLayer}


def test_an_error_in_a_forward_leaves_no_room_behind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DynamicCache(config=model.config)
    mlp, calls = model.model.layers[1].mlp, []

    def failing(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("planted")

    with autospec.wrap(model, policy="off", backend="eager"):
        model.generate(tiny.prompt(12), max_new_tokens=2, do_sample=False)  # it is probed first
        calls.clear()
        handle = mlp.register_forward_pre_hook(failing)
        with pytest.raises(RuntimeError, match="planted"):
            model.generate(tiny.prompt(12), max_new_tokens=20, do_sample=False, **{CACHE_KEYWORD: cache})
    handle.remove()
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
