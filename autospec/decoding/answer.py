"""The answer under construction: tokens enter one at a time, exactly as transformers' own loop adds them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import (
    AsyncTextIteratorStreamer,
    BaseStreamer,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from autospec.caches import CACHE_KEYWORD
from autospec.decoding.tokens import Tokens

_log = logging.getLogger("autospec")

# ask only for the tokens, so that they can be asked on the host
_OF_TOKENS = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_OWN_STREAMERS = (AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer)


class Answer:
    """Committed tokens, stopping criteria, streamer and recorded scores of one request.

    Args:
        tokens: the prompt; grows by the answer.
        stopping_criteria: evaluated after every single token, so that any of them can end a block in the middle.
        generation_config: as `generate` prepared it.
        streamer: sees each committed token once, in order.
    """

    def __init__(
        self,
        tokens: Tokens,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        self.num_settled = 0  # of these, seen by all criteria and the streamer; only then is the next forward run
        self.is_finished = False
        is_plain_list = type(stopping_criteria) is StoppingCriteriaList
        self._criteria = list(stopping_criteria) if is_plain_list else [stopping_criteria]
        self._asks = [self._asking(criterion) for criterion in self._criteria]
        self._streamer = streamer
        # criteria and streamer are transformers' own: they look at tokens and time, and touch no scores or noise
        self.is_predictable = all(type(criterion) in _OF_TOKENS for criterion in self._criteria) and (
            streamer is None or type(streamer) in _OWN_STREAMERS
        )
        returns_dict = bool(generation_config.return_dict_in_generate)
        self._returns_dict = returns_dict
        self._scores: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_scores else None
        self._logits: tuple[Tensor, ...] | None = () if returns_dict and generation_config.output_logits else None
        self.keeps_scores = self._scores is not None or self._logits is not None

    def keep_scores(self, logits: Tensor, scores: Tensor) -> None:
        """Of the next token, where it `keeps_scores`. Args: logits, scores: [1, vocab_size], raw and processed."""
        if self._scores is not None:
            self._scores += (scores.clone(),)  # a row of the block's scores, which need not live on
        if self._logits is not None:
            self._logits += (logits.clone(),)

    def append(self, token: int) -> None:
        """Commit one token."""
        self.tokens.append(token)
        self.num_tokens += 1
        for ends in self._asks:  # each is asked, whatever the others say
            if ends(token):
                self.is_finished = True
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        self.num_settled += 1

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
        sequences = self.tokens.on_device.clone()
        if not self._returns_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=self._scores, logits=self._logits, **{CACHE_KEYWORD: cache}
        )

    def _asking(self, criterion: Any) -> Callable[[int], bool]:
        """What tells, once a token is committed, whether the answer ends by this criterion."""
        if type(criterion) is EosTokenCriteria:
            return set(criterion.eos_token_id.tolist()).__contains__
        if type(criterion) is MaxLengthCriteria:
            return partial(self._ends_by_length, criterion)
        return lambda token: self._ends(criterion)

    def _ends_by_length(self, criterion: MaxLengthCriteria, token: int) -> bool:
        length, most = self.tokens.length, criterion.max_position_embeddings
        if most is not None and length > most:
            return self._ends(criterion)  # it may have a warning to give
        return bool(length >= criterion.max_length)

    def _ends(self, criterion: Any) -> bool:
        is_known = type(criterion) in _OF_TOKENS
        done = criterion(self.tokens.on_host if is_known else self.tokens.on_device, self._scores)
        return bool(done.all()) if isinstance(done, Tensor) else bool(done)
