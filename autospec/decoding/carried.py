"""What a request carries from step to step beside its tokens: mask, positions, token types, the cache.

transformers copies each of them for every token. But what later tokens have of them is known from the start, so that it
is written once, with room, and a step takes views of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from autospec.caches import CACHE_KEYWORD, find_cache, has_own

_GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_FURTHER = 64  # tokens of new room


class Carried:
    """Keyword arguments of the target's forwards, as far as they grow with the text.

    Args:
        model: the target. One with a way of its own to update them, or without a cache of a usual name, does so itself.
        kwargs: as `generate` prepared them.
        room: how many tokens are expected besides.
    """

    def __init__(self, model: PreTrainedModel, kwargs: dict[str, Any], room: int) -> None:
        self._model = model
        self.kwargs = kwargs  # those of the committed tokens
        self._room = max(room, 1)
        updates_itself = has_own(model, "_update_model_kwargs_for_generation")
        self._update = model._update_model_kwargs_for_generation if updates_itself else None
        self._num_committed = 0  # tokens that the kwargs do not hold
        self._roomy: dict[str, Tensor] | None = None  # [..., as many tokens as there is room for]
        self._lengths: dict[str, int] = {}  # tokens of each in the kwargs

    @property
    def cache(self) -> Any | None:
        return find_cache(self.kwargs)

    def ahead(self, num_tokens: int) -> dict[str, Any]:
        """Of a forward that runs `num_tokens` tokens beyond the committed ones; not to be written to."""
        if self._update is not None:
            return _extended(self.kwargs, num_tokens) if num_tokens else self.kwargs
        end = self._num_committed + num_tokens
        roomy = self._roomy
        if roomy is None or end > self._room:
            roomy = self._with_room(end)
        if not roomy:
            return self.kwargs
        lengths = self._lengths
        return {**self.kwargs, **{name: each[..., : lengths[name] + end] for name, each in roomy.items()}}

    def commit(self, outputs: Any, num_tokens: int) -> None:
        """`num_tokens` tokens of the forward with these outputs belong to the text."""
        cache = find_cache(outputs)
        if cache is None and not self._num_committed:
            self._update = self._model._update_model_kwargs_for_generation
        if self._update is not None:
            self.kwargs = self._update(outputs, self.kwargs, is_encoder_decoder=False, num_new_tokens=num_tokens)
            return
        self._num_committed += num_tokens
        if cache is not None:
            self.kwargs[CACHE_KEYWORD] = cache

    def _with_room(self, end: int) -> dict[str, Tensor]:
        while self._room < end:
            self._room = 2 * self._room + _FURTHER
        growing = {name: value for name in _GROWING if (value := self.kwargs.get(name)) is not None}
        self._lengths = {name: value.shape[-1] for name, value in growing.items()}
        self._roomy = _extended(growing, self._room)
        return self._roomy


def _extended(kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Keyword arguments for a forward that runs `num_tokens` tokens beyond the committed prefix."""
    kwargs = dict(kwargs)
    if (mask := kwargs.get("attention_mask")) is not None:
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones((mask.shape[0], num_tokens))], dim=-1)
    if (positions := kwargs.get("position_ids")) is not None:
        steps = torch.arange(1, num_tokens + 1, dtype=positions.dtype, device=positions.device)
        kwargs["position_ids"] = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    if (types := kwargs.get("token_type_ids")) is not None:
        kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_tokens)], dim=-1)
    if (types := kwargs.get("mm_token_type_ids")) is not None:
        kwargs["mm_token_type_ids"] = torch.cat([types, types.new_zeros((types.shape[0], num_tokens))], dim=-1)
    return kwargs
