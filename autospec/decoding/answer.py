"""The answer under construction: tokens enter one at a time, exactly as transformers' own loop adds them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from autospec.caches import CACHE_KEYWORD

_log = logging.getLogger("autospec")


class Answer:
    """Committed tokens, stopping criteria, streamer and recorded scores of one request.

    Args:
        input_ids: [1, n], the prompt.
        stopping_criteria: evaluated after every single token, so that any of them can end a block in the middle.
        generation_config: as `generate` prepared it.
        streamer: sees each committed token once, in order.
    """

    def __init__(
        self,
        input_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.input_ids = input_ids
        self.num_tokens = 0
        self.is_finished = False
        self._criteria = stopping_criteria
        self._streamer = streamer
        returns_dict = bool(generation_config.return_dict_in_generate)
        self._returns_dict = returns_dict
        self._scores: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_scores else None
        self._logits: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_logits else None

    def append(self, token: int, logits: Tensor, scores: Tensor) -> None:
        """Commit one token. Args: logits, scores: [1, vocab_size], raw and processed."""
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)
        tokens = torch.tensor([token], device=self.input_ids.device)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        self.num_tokens += 1
        self.is_finished = bool(self._criteria(self.input_ids, self._scores).all())
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())

    def end_stream(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    def break_stream(self) -> None:
        """End the stream while an error is on its way, so that no reader waits for ever; the error stays the first."""
        try:
            self.end_stream()
        except Exception:  # noqa: BLE001  # logged with its traceback
            _log.exception("the streamer's end() failed while another error was being raised")

    def output(self, cache: Any | None) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        if not self._returns_dict:
            return self.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids, scores=self._scores, logits=self._logits, **{CACHE_KEYWORD: cache}
        )
