"""The target over a cache of fixed shape: prefill as ever, then forwards that were prepared at start-up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from autospec.backends.static_model import StaticModel
from autospec.caches import CACHE_KEYWORD
from autospec.decoding.target import TargetSession


class StaticTargetSession(TargetSession):
    """In all else the session that it is made from.

    Prefill runs in the cache that `generate` made. With the first forward after it, what that cache holds moves to the
    buffers of fixed shape, and back to it at the end, or where the text outgrows the largest of them: from there on
    forwards run as they do without.

    Args:
        model, generation_config, model_kwargs: as for `TargetSession`.
        static: the model's prepared forwards, for this request alone.
        hands_back: somebody wants the cache at the end.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        static: StaticModel,
        *,
        hands_back: bool = True,
    ) -> None:
        super().__init__(model, generation_config, model_kwargs, hands_back=hands_back)
        self._target = model
        self._settings = generation_config
        self._given = dict(model_kwargs)
        self._static = static
        self._now: _InBuffers | TargetSession | None = None  # who runs forwards; None: the session this is made from

    @property
    def _session(self) -> Any:
        return super() if self._now is None else self._now

    def prefill(self, input_ids: Tensor) -> Tensor:
        logits = super().prefill(input_ids)
        self.why_eager = self._why_not(super().cache())
        return logits

    def forward(self, input_ids: Tensor, num_draft_tokens: int, num_padding: int = 0) -> Tensor:
        if self._now is None and self.why_eager is None:
            self._enter()
        if self.is_prepared and not self._static.has_room(num_draft_tokens + num_padding + 1):
            self._leave()
        logits: Tensor = self._session.forward(input_ids, num_draft_tokens, num_padding)
        return logits

    def take_back(self) -> None:
        self._session.take_back()

    def commit(self, num_tokens: int) -> None:
        self._session.commit(num_tokens)

    def cache(self) -> Any | None:
        return self._session.cache()

    def abort(self, num_tokens: int) -> None:
        self._session.abort(num_tokens)

    def finish(self) -> Any | None:
        return self._session.finish()

    def _enter(self) -> None:
        cache: Any = super().cache()
        if int(cache.get_seq_length()) > self._static.capacities[-1]:
            self.why_eager = f"its text is longer than {self._static.capacities[-1]} tokens, the largest capacity"
            return
        self._now = _InBuffers(self._static, cache, hands_back=self._hands_back)
        self.is_prepared = True

    def _leave(self) -> None:
        """Go on without the buffers."""
        cache, length = super().cache(), self._static.length
        self._static.save(cache)
        kwargs = {**self._given, CACHE_KEYWORD: cache}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = torch.arange(length + 1, device=self._target.device)[None]
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = torch.ones((1, length + 1), dtype=torch.long, device=self._target.device)
        session = TargetSession(self._target, self._settings, kwargs, hands_back=self._hands_back)
        self._now, self.is_prepared = session, False
        self.why_eager = f"from token {length} on: the largest capacity is used up"

    def _why_not(self, cache: Any) -> str | None:
        """Why this request is not one for the buffers; None when it is."""
        if self.hidden_layers:
            return "a draft source looks at the target's hidden states"
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            return f"its cache ({type(cache).__name__}) is one of its own kind"
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            return "its cache has layers that are not kept in a fixed shape"
        length = int(cache.get_seq_length())
        if any(layer.get_seq_length() != length for layer in cache.layers):
            return "the layers of its cache hold texts of different length"
        if not self._static.fits(cache):
            return "its cache differs from the model's own in layers, heads, sizes, dtype or device"
        mask, positions = self._given.get("attention_mask"), self._given.get("position_ids")
        if mask is not None and not bool((mask == 1).all()):
            return "its prompt is padded or masked"
        if any(self._given.get(name) is not None for name in ("token_type_ids", "mm_token_type_ids")):
            return "its tokens have types"
        if positions is not None and not _are_usual(positions, length):
            return "it brings positions of its own"
        return None


class _InBuffers:
    """A text in the buffers: what a `TargetSession` is after prefill.

    Args:
        static: the model's prepared forwards.
        cache: holds the text; with the end it is held there again.
        hands_back: that is wanted.
    """

    def __init__(self, static: StaticModel, cache: DynamicCache, *, hands_back: bool) -> None:
        self._static, self._cache, self._hands_back = static, cache, hands_back
        self._ran = (0, 0)  # tokens of the last forward, and how many of them were padding
        static.load(cache)

    def forward(self, input_ids: Tensor, num_draft_tokens: int, num_padding: int) -> Tensor:
        width, length = num_draft_tokens + num_padding + 1, self._static.length
        try:
            logits = self._static.run(input_ids[:, -width:])
        except BaseException:
            self._static.crop(self._static.length - length)
            raise
        self._ran = (width, num_padding)
        return logits[: num_draft_tokens + 1]

    def take_back(self) -> None:
        self.commit(0)

    def commit(self, num_tokens: int) -> None:
        self._static.crop(self._ran[0] - num_tokens)
        self._ran = (0, 0)

    def cache(self) -> DynamicCache:
        return self._static.view()

    def abort(self, num_tokens: int) -> None:
        width, num_padding = self._ran
        if width:
            self.commit(min(num_tokens + 1, width - num_padding))
        self.finish()

    def finish(self) -> DynamicCache:
        if self._hands_back:
            self._static.save(self._cache)
        return self._cache


def _are_usual(positions: Tensor, length: int) -> bool:
    """Each token stands where it is counted. Args: positions: of the prompt, [1, n], or of what a cache lacks of it."""
    if positions.dim() != 2 or positions.shape[0] != 1:
        return False
    usual = torch.arange(length - positions.shape[1], length, device=positions.device)
    return bool((positions[0] == usual).all())
