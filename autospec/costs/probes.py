"""What calibration times: target forwards and proposals, each after a context of a given length."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from autospec.cache_room import Room
from autospec.caches import CACHE_KEYWORD, append, decoding_cache, drop_last, why_not_rollback
from autospec.drafts.base import DraftRequest, DraftSource, hidden_layers_of
from autospec.randomness import TorchRandomness

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

    from autospec.backends.backend import Lease

SHORT = 64
"""Tokens that are really run to make a cache of any length: what a cache holds makes no difference to the time."""


_MOST_PROPOSALS = 512
"""Tokens that follow a context and repeat nothing."""


class VerifyProbe:
    """Target forwards after one context, taken back each time.

    Args:
        target: the model that verifies.
        context: tokens in the cache.
        most_tokens: the widest forward.
        lease: prepared forwards, timed where they would run.
    """

    def __init__(self, target: PreTrainedModel, context: int, most_tokens: int, lease: Lease | None = None) -> None:
        self._target = target
        self._context = context
        tokens = some_tokens(target, context + most_tokens)
        self._following = tokens[:, context:]
        self._cache = filled_cache(target, tokens[:, :context])
        self.can_roll_back = why_not_rollback(self._cache) is None
        Room(self._cache)  # it grows as while decoding
        self._has_logits_to_keep = bool(target._supports_logits_to_keep())
        static = lease.target if lease is not None and self.can_roll_back else None
        self._static = static if static is not None and context + most_tokens <= static.capacities[-1] else None

    def seconds(self, width: int) -> float:
        """One forward over `width` tokens. A target that cannot be rolled back is decoded plainly: always one token."""
        if not self.can_roll_back:
            return self._forward(1)
        if self._static is not None:
            return self._prepared(width)
        taken = self._forward(width)
        drop_last(self._cache, width)
        return taken

    def _forward(self, width: int) -> float:
        mask = torch.ones((1, self._context + width), dtype=torch.long, device=self._target.device)
        if not self.can_roll_back:
            self._context += 1  # the token stays
        kwargs: dict[str, Any] = {CACHE_KEYWORD: self._cache}
        if self._has_logits_to_keep:
            kwargs["logits_to_keep"] = width
        ids = self._following[:, :width]
        started = now(self._target.device)
        self._target(input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **kwargs)
        return now(self._target.device) - started

    def _prepared(self, width: int) -> float:
        assert self._static is not None
        self._static.pretend(self._context)
        started = now(self._target.device)
        self._static.run(self._following[:, :width])
        taken = now(self._target.device) - started
        self._static.crop(width)
        return taken


class DraftProbe:
    """Proposals of one source along a text that repeats itself, so that retrieval sources find something.

    Where a model drafts, too, nothing repeats itself: a blend is then timed at what its model takes, and what retrieval
    saves is learnt in service. The text grows by a token with every proposal, as if the target had rejected all drafts.
    """

    def __init__(self, target: PreTrainedModel, source: DraftSource, context: int, lease: Lease | None = None) -> None:
        self._target = target
        self._session: Any = source.start(
            DraftRequest(
                device=target.device,
                vocab_size=int(target.get_output_embeddings().weight.shape[0]),
                do_sample=False,
                processors=LogitsProcessorList(),
                randomness=TorchRandomness(target.device),
                scores_dtype=torch.float32,
                is_paired=True,
                static_draft=None if lease is None else lease.draft,
            )
        )
        self._period = max(1, context // 2)
        drafts_by_model = getattr(source, "model", None) is not None
        tokens: list[int] = some_tokens(target, context + _MOST_PROPOSALS)[0].tolist()
        self._text = tokens[:context] if drafts_by_model else (tokens[: self._period] * 3)[:context]
        self._following = tokens[context:] if drafts_by_model else []
        self._layers = hidden_layers_of(source)
        self._hidden_size = int(getattr(target.config.get_text_config(decoder=True), "hidden_size", 1))
        self._num_shown = 0
        self.catch_up_seconds: float | None = None  # what the first proposal took to read the context

    def seconds(self, block_length: int) -> float:
        """One proposal, what it took to catch up left out."""
        self._show_states()
        started = now(self._target.device)
        proposal = self._session.propose(self._text, block_length)
        taken = now(self._target.device) - started - float(proposal.catch_up_seconds)
        if self.catch_up_seconds is None:
            self.catch_up_seconds = float(proposal.catch_up_seconds)
        if self._following:
            self._text.append(self._following.pop())
        else:
            self._text.append(self._text[-self._period] if len(self._text) > self._period else self._text[-1])
        return max(taken, 1e-9)  # a clock may stand still over a retrieval

    def _show_states(self) -> None:
        """Any numbers do: what they are makes no difference to the time."""
        if not self._layers:
            return
        shape = (len(self._text) - 1 - self._num_shown, self._hidden_size)
        new = torch.zeros(shape, dtype=self._target.dtype, device=self._target.device)
        self._session.see([new] * len(self._layers))
        self._num_shown += len(new)


def filled_cache(target: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    """A cache that holds as many tokens as there are. Args: tokens: [1, n].

    Of plain layers a short forward is repeated to the wanted length, which saves a prefill of seconds.
    """
    wanted = tokens.shape[1]
    _, cache = append(target, tokens[:, : min(wanted, SHORT)], decoding_cache(target))
    held: int = cache.get_seq_length()
    if held < wanted and all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers):
        for layer in cache.layers:
            times = -(-wanted // held)
            layer.keys = layer.keys.repeat(1, 1, times, 1)[:, :, :wanted].contiguous()
            layer.values = layer.values.repeat(1, 1, times, 1)[:, :, :wanted].contiguous()
    elif held < wanted:
        _, cache = append(target, tokens[:, held:], cache)
    if why_not_rollback(cache) is None:
        drop_last(cache, 0)  # trims layers that record
    return cache


def some_tokens(target: PreTrainedModel, count: int) -> Tensor:
    """[1, count], the same every time, without touching the global generator."""
    generator = torch.Generator().manual_seed(0)
    size = int(target.get_input_embeddings().weight.shape[0])
    return torch.randint(0, size, (1, max(1, count)), generator=generator).to(target.device)


def now(device: torch.device) -> float:
    """After all that was started on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
