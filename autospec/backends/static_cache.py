"""Keys and values of one sequence in buffers that stay where they are, and transformers' caches over them.

Everything behind the length is zero: what a forward does not look at still takes part in its sums with weight zero, and
zero times something that is no number would be none either. So rejected tokens and padding are wiped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from autospec.backends.base import CannotPrepareError
from autospec.caches import append, decoding_cache


@dataclass(frozen=True, slots=True)
class Layout:
    """What one token takes in each layer of a model's cache."""

    num_layers: int
    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers."""
        return self.num_layers * self.num_heads * (self.key_size + self.value_size) * self.dtype.itemsize


@torch.no_grad()
def layout_of(model: PreTrainedModel) -> Layout:
    """Found by a forward over two tokens.

    Raises:
        CannotPrepareError: its cache is not made of plain layers that are all alike.
    """
    tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    _, cache = append(model, tokens, decoding_cache(model))
    kinds = sorted({type(layer).__name__ for layer in cache.layers})
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise CannotPrepareError(f"its cache has layers ({', '.join(kinds)}) that are not kept in a fixed shape")
    found = {
        (tuple(each.keys.shape), tuple(each.values.shape), each.keys.dtype, each.values.dtype, each.keys.device)
        for each in cache.layers
    }
    if len(found) != 1:
        raise CannotPrepareError("the layers of its cache differ in shape, dtype or device")
    keys, values, dtype, other, device = found.pop()
    if dtype != other or keys[:3] != values[:3] or keys[0] != 1 or keys[2] != 2:
        raise CannotPrepareError("the keys and values of its cache differ in shape or dtype")
    return Layout(len(cache.layers), keys[1], keys[3], values[3], dtype, device)


class StaticStore:
    """Keys and values of one sequence.

    Args:
        layout: of the model's cache.
        capacity: tokens that it holds at most.
    """

    def __init__(self, layout: Layout, capacity: int) -> None:
        self._layout = layout
        shape = (layout.num_layers, 1, layout.num_heads, capacity)
        kind: dict[str, Any] = {"dtype": layout.dtype, "device": layout.device}
        self.keys = torch.zeros((*shape, layout.key_size), **kind)
        self.values = torch.zeros((*shape, layout.value_size), **kind)
        self.device_length = torch.zeros((), dtype=torch.long, device=layout.device)  # in front of a forward
        self.length = 0  # tokens that count; what stands behind them, up to `written`, is to be wiped
        self.written = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def memory_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.device_length.nbytes

    def cache(self, capacity: int, positions: Tensor) -> Cache:
        """The first `capacity` tokens as a cache of fixed shape.

        Args:
            positions: [width], where a forward's tokens go; read in each forward.
        """
        return Cache(
            layers=[
                _StaticLayer(keys[:, :, :capacity], values[:, :, :capacity], positions, self.device_length)
                for keys, values in zip(self.keys, self.values, strict=True)
            ]
        )

    def fits(self, cache: DynamicCache) -> bool:
        """Is it laid out as this store is? Args: cache: of plain layers that hold something."""
        layout = self._layout
        return len(cache.layers) == layout.num_layers and all(
            tensor.shape[:2] == (1, layout.num_heads)
            and tensor.shape[3] == size
            and tensor.dtype == layout.dtype
            and tensor.device == layout.device
            for layer in cache.layers
            for tensor, size in ((layer.keys, layout.key_size), (layer.values, layout.value_size))
        )

    def load(self, cache: DynamicCache) -> None:
        """Hold what a cache of plain layers holds. Args: cache: at most `capacity` tokens."""
        length = int(cache.get_seq_length())
        for index, layer in enumerate(cache.layers):
            self.keys[index, :, :, :length].copy_(layer.keys)
            self.values[index, :, :, :length].copy_(layer.values)
        self.written = max(self.written, length)
        self.length = length
        self.wipe()

    def save(self, cache: DynamicCache) -> None:
        """Give a cache of plain layers a copy of what is held."""
        keys = self.keys[:, :, :, : self.length].contiguous()
        values = self.values[:, :, :, : self.length].contiguous()
        for index, layer in enumerate(cache.layers):
            layer.keys, layer.values = keys[index], values[index]

    def view(self) -> DynamicCache:
        """What is held, to be read until the next forward: what is appended to the view stays in it."""
        view = DynamicCache()
        for keys, values in zip(self.keys, self.values, strict=True):
            layer = DynamicLayer()
            layer.update(keys[:, :, :0], values[:, :, :0])  # initialises it
            layer.keys, layer.values = keys[:, :, : self.length], values[:, :, : self.length]
            view.layers.append(layer)
        return view

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens, and whatever a forward left behind them."""
        self.length -= num_tokens
        self.wipe()

    def wipe(self) -> None:
        """Zero everything behind the length."""
        if self.written > self.length:
            self.keys[:, :, :, self.length : self.written].zero_()
            self.values[:, :, :, self.length : self.written].zero_()
        self.written = self.length


class _StaticLayer(CacheLayerMixin):
    """One layer's part of the store: writes where it is told to, and counts nothing itself."""

    is_compileable = True
    is_croppable = False  # its store is
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, length: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values  # [1, num_heads, capacity, size]
        self._positions = positions
        self._length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._positions, key_states)
        self.values.index_copy_(2, self._positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Tensor:
        return self._length

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in releases before it."""
        return self.keys.shape[2]
