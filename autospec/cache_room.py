"""Room behind the keys and values of a cache: a step writes its own there, and what is held is not copied."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LEAST_ROOM_TOKENS = 64
"""Room that is made at least, when there is none left; else an eighth of what is held."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A plain layer whose keys and values are the beginning of larger tensors.

    transformers makes new tensors with every step, and copies into them all that is held. Whatever else is done with
    a layer goes on as ever: rolled back it is shorter, tensors that somebody set are taken as they are, and what is
    copied from it is a plain layer, which writes into nothing that this one holds.
    """

    keys: Tensor
    values: Tensor
    _given: tuple[Tensor, Tensor] | None  # keys and values as they were given out last
    _rooms: tuple[Tensor, Tensor] | None  # what these are the beginning of

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values, given = self.keys, self.values, self._given
        is_ours = given is not None and keys is given[0] and values is given[1]
        if not (is_ours or self._is_free()) or not _are_alike(keys, key_states, values, value_states):
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return found
        length = keys.shape[2]
        wanted, rooms = length + key_states.shape[2], self._rooms
        if rooms is None or wanted > rooms[0].shape[2] or not (is_ours or _begin(rooms, (keys, values))):
            self._rooms = rooms = _with_room(keys, wanted), _with_room(values, wanted)
        rooms[0][:, :, length:wanted] = key_states
        rooms[1][:, :, length:wanted] = value_states
        self._given = self.keys, self.values = rooms[0][:, :, :wanted], rooms[1][:, :, :wanted]
        return self._given

    def _is_free(self) -> bool:
        """Holds it something, and is it Python that runs?"""
        return bool(self.is_initialized) and not torch.compiler.is_compiling()

    def __copy__(self) -> DynamicLayer:
        return self._plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicLayer:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(1)  # later ones insist on the class

    def _plain(self) -> DynamicLayer:
        made = DynamicLayer.__new__(DynamicLayer)
        vars(made).update({name: value for name, value in vars(self).items() if name not in ("_given", "_rooms")})
        return made


class Room:
    """Lets the plain layers of a cache grow so during one request.

    Args:
        cache: that is decoded with. Of one that is no `DynamicCache` on a CPU nothing is changed.
    """

    def __init__(self, cache: Any) -> None:
        is_plain = type(cache) is DynamicCache and not getattr(cache, "offloading", False)
        self._layers = [layer for layer in cache.layers if _may_grow(layer)] if is_plain else []
        for layer in self._layers:
            layer._given = layer._rooms = None
            layer.__class__ = GrowingLayer

    def close(self, *, is_kept: bool) -> None:
        """The layers are plain ones again. Args: is_kept: nothing is left behind what they hold."""
        layers, self._layers = self._layers, []
        for layer in layers:
            layer.__class__ = DynamicLayer
            del layer._given, layer._rooms
        for layer in layers if is_kept else ():
            if layer.is_initialized:
                layer.keys, layer.values = _alone(layer.keys), _alone(layer.values)


def _may_grow(layer: Any) -> bool:
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return False
    return all(held.dim() == 4 and held.device.type == "cpu" for held in (layer.keys, layer.values))


def _are_alike(keys: Tensor, new_keys: Tensor, values: Tensor, new_values: Tensor) -> bool:
    """Can they be written behind what is held, as they are? Args: all [batch, heads, tokens, size]."""
    held, new = keys.shape, new_keys.shape
    is_fit = held[:2] == new[:2] == values.shape[:2] == new_values.shape[:2] and held[3:] == new[3:]
    is_fit = is_fit and values.shape[3:] == new_values.shape[3:] and new[2] == new_values.shape[2]
    return is_fit and keys.dtype is new_keys.dtype and values.dtype is new_values.dtype


def _with_room(held: Tensor, wanted: int) -> Tensor:
    """A copy with room behind it for so many tokens in all, and some more."""
    length = held.shape[2]
    room = held.new_empty((*held.shape[:2], wanted + max(LEAST_ROOM_TOKENS, length // 8), held.shape[3]))
    room[:, :, :length] = held
    return room


def _begin(rooms: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> bool:
    """Is that still what is held, after a rollback?"""
    return all(
        room.data_ptr() == part.data_ptr()
        and room.stride() == part.stride()
        and room.shape[:2] == part.shape[:2]
        and room.shape[3] == part.shape[3]
        for room, part in zip(rooms, held, strict=True)
    )


def _alone(held: Tensor) -> Tensor:
    """The same with nothing around it in memory."""
    return held if held.untyped_storage().nbytes() == held.nbytes else held.clone(memory_format=torch.contiguous_format)
