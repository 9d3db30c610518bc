"""Room behind the keys and values of a cache: a step writes its own there, and what is held is not copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 64
"""Tokens that there is room for at least, when there is none left; else an eighth of what is held."""


class Room:
    """Stands in for the growth of a cache during one request.

    `DynamicLayer` makes new tensors with every step, and copies into them all that it holds. Here these tensors are the
    beginning of larger ones. Whatever else is done with them (rollbacks, copies, tensors set by others) goes on as
    ever: a layer whose tensors are not those that were given out here gets new ones.

    Args:
        cache: of which `fits` says so. Until `close` its layers grow so. None: nothing does.
    """

    def __init__(self, cache: DynamicCache | None) -> None:
        self._layers = [] if cache is None else [layer for layer in cache.layers if layer.is_initialized]
        for layer in self._layers:
            vars(layer)["update"] = _Update(layer)

    def close(self, *, is_kept: bool) -> None:
        """The layers grow as transformers has it again. Args: is_kept: leave no room behind what they hold."""
        for layer in self._layers:
            if isinstance(vars(layer).get("update"), _Update):
                del vars(layer)["update"]
                if is_kept:
                    layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()


class _Update:
    """`DynamicLayer.update` of one layer."""

    __slots__ = ("_keys", "_layer", "_values")

    def __init__(self, layer: DynamicLayer) -> None:
        self._layer = layer
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self._layer
        self._keys = _with_room(self._keys, layer.keys, key_states)
        self._values = _with_room(self._values, layer.values, value_states)
        layer.keys = _append(self._keys, layer.keys, key_states)
        layer.values = _append(self._values, layer.values, value_states)
        return layer.keys, layer.values


def fits(model: PreTrainedModel, cache: Any) -> bool:
    """Is it a cache of plain layers on a CPU, and a model that Python runs?"""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return False
    if "forward" in vars(model) or getattr(model, "_compiled_call_impl", None) is not None:
        return False
    return all(_is_plain(layer) for layer in cache.layers)


def without_room(layer: DynamicLayer) -> DynamicLayer:
    """A layer that was copied: it grows as transformers has it. Returns: the same."""
    vars(layer).pop("update", None)
    return layer


def _is_plain(layer: Any) -> bool:
    if type(layer) is not DynamicLayer or "update" in vars(layer):
        return False
    if not layer.is_initialized:
        return True
    return all(held.dim() == 4 and held.device.type == "cpu" for held in (layer.keys, layer.values))


def _with_room(tensor: Tensor | None, held: Tensor, new: Tensor) -> Tensor:
    """[batch, heads, at least held + new, size], which begins with what is held: the tensor itself, if it does."""
    length, number = held.shape[-2], new.shape[-2]
    is_ours = tensor is not None and held.data_ptr() == tensor.data_ptr() and held.stride() == tensor.stride()
    if tensor is not None and is_ours and length + number <= tensor.shape[-2] and new.dtype == tensor.dtype:
        return tensor
    size = length + number + max(LEAST_ROOM, length // 8)
    made = held.new_empty((*held.shape[:-2], size, held.shape[-1]), dtype=torch.promote_types(held.dtype, new.dtype))
    made[..., :length, :] = held
    return made


def _append(tensor: Tensor, held: Tensor, new: Tensor) -> Tensor:
    length = held.shape[-2]
    tensor[..., length : length + new.shape[-2], :] = new
    return tensor[..., : length + new.shape[-2], :]
