"""The file that knows transformers' model and cache interface, which changed its names between releases.

Up to 5.23 the keyword and the output are called `past_key_values`, from 5.24 on `cache`. `Cache.crop` takes the
number of tokens to drop as a negative count in every release supported here. Layers that forget (sliding windows)
keep what a rollback needs only while they record, and then have to be trimmed after every forward.
Layers of a fixed shape are in backends/static_cache.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from autospec.cache_room import GrowingLayer

CACHE_KEYWORD: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

AROUND = {
    name: getattr(GenerationMixin, name)
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
}
"""What `generate` calls around each forward, as transformers has it."""


def context_window(model: PreTrainedModel) -> int | None:
    """How many tokens the model has positions for; None when it does not say."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def stretches_beyond(model: PreTrainedModel) -> int | None:
    """The text length beyond which rotary frequencies change with the length itself; None when they never do.

    There a forward over several tokens rotates them all as its last one, and differs from one token at a time.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None)
    kinds = [rope, *rope.values()] if isinstance(rope, dict) else []
    for parameters in kinds:
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("dynamic", "longrope"):
            limit = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(limit or config.max_position_embeddings)
    return None


_QUANTISED = tuple(
    getattr(cache_utils, name) for name in ("BaseQuantizedLayer", "QuantizedLayer") if hasattr(cache_utils, name)
)

_KNOWN_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer}


def has_own(model: PreTrainedModel, name: str) -> bool:
    """Does it go a way of its own there, by its class or patched anywhere? Args: name: of those in `AROUND`."""
    return getattr(getattr(model, name, None), "__func__", None) is not AROUND[name]


def find_cache(holder: Mapping[str, Any]) -> Any | None:
    """The cache in a model's output or among its keyword arguments; None when there is none."""
    cache = holder.get("cache")
    return holder.get("past_key_values") if cache is None else cache


def decoding_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache as `generate` makes one, recording: the kind that blocks are rolled back in."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    start_recording(cache)
    return cache


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for `model` that can be rolled back over any number of forwards.

    Layers with a sliding window get full ones: forgetful layers can be rolled back over one forward only. The masks
    keep to the window all the same; the price is memory for the whole context.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    if DynamicSlidingWindowLayer in kinds and kinds <= _KNOWN_LAYERS:
        cache = DynamicCache()
    start_recording(cache)
    return cache


def first_layers_of_cache(cache: Any, num_layers: int, num_tokens: int) -> DynamicCache | None:
    """A copy of the first layers of a cache that shares what they hold: what is appended to it stays in it.

    Args:
        cache: of the whole model.
        num_layers: how many.
        num_tokens: what they must hold.

    Returns:
        None where they hold something else, or are not plain ones that keep everything.
    """
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        return None
    layers = cache.layers[:num_layers]
    if len(layers) < num_layers or any(type(layer) not in (DynamicLayer, GrowingLayer) for layer in layers):
        return None
    if any(layer.get_seq_length() != num_tokens for layer in layers):
        return None
    view = DynamicCache()
    view.layers = [copy.copy(layer) for layer in layers]  # a plain layer never writes into what it holds
    return view


def append(model: PreTrainedModel, tokens: Tensor, cache: Any, *, logits_kept: int = 1) -> tuple[Tensor, Any]:
    """Run tokens after what `cache` holds.

    Args:
        model: a causal language model.
        tokens: [1, n], n >= logits_kept.
        cache: holds the tokens before; grows by n.
        logits_kept: for how many of the last tokens logits are wanted.

    Returns:
        logits, [logits_kept, vocab_size], and the cache.
    """
    kwargs = {"logits_to_keep": logits_kept} if model._supports_logits_to_keep() else {}
    outputs = model(input_ids=tokens, use_cache=True, return_dict=True, **{CACHE_KEYWORD: cache}, **kwargs)
    return outputs.logits[0, -logits_kept:], find_cache(outputs)


def why_not_rollback(cache: Any | None) -> str | None:
    """Why rejected tokens could not be taken back out of `cache`; None when they can.

    Some layers know only after their first forward, so ask after prefill.
    """
    if cache is None:
        return "the model has no cache"
    if not isinstance(cache, Cache):
        return f"the cache ({type(cache).__name__}) is not one of transformers' own"
    if cache.is_compileable:
        return f"the cache ({type(cache).__name__}) has a fixed shape"
    is_croppable = getattr(cache, "is_croppable", None)  # absent before transformers 5.17
    if is_croppable is None:
        is_croppable = all(isinstance(layer, DynamicLayer) for layer in cache.layers)
    if any(isinstance(layer, _QUANTISED) for layer in cache.layers):
        is_croppable = False  # before 5.24 they say that they are
    return None if is_croppable else f"the cache ({type(cache).__name__}) cannot be rolled back"


def why_not_draft_cache(cache: DynamicCache) -> str | None:
    """Why a draft cannot keep its own tokens in `cache` over several forwards; None when it can."""
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _KNOWN_LAYERS})
    return f"its cache has layers ({', '.join(unknown)}) that cannot be rolled back" if unknown else None


def start_recording(cache: Cache) -> bool:
    """Make forgetful layers keep what a rollback needs.

    Returns:
        Whether there are any: `drop_last` is then to be called after every forward, also where nothing is to go.
    """
    cache.activate_past_recording()
    return any(getattr(layer, "record_past", False) for layer in cache.layers)


def stop_recording(cache: Cache) -> None:
    """Back to the state in which transformers hands out a cache."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def cut_back(cache: Cache, num_tokens: int) -> None:
    """Keep at most the first tokens in every layer, also where a forward ended between two of them."""
    for layer in cache.layers:
        if (excess := layer.get_seq_length() - num_tokens) > 0:
            layer.crop(-excess)


def drop_last(cache: Cache, num_tokens: int) -> None:
    """Forget the last `num_tokens` tokens; 0 only trims layers that record."""
    cache.crop(-num_tokens)
