"""The target during one request: its forwards, and a cache that always holds the committed prefix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import output_capturing

from autospec.cache_room import Room
from autospec.caches import (
    cut_back,
    drop_last,
    find_cache,
    start_recording,
    stop_recording,
    why_not_rollback,
)
from autospec.decoding.carried import Carried
from autospec.errors import DraftError, ExactnessError

_SELECTS_STATES = hasattr(output_capturing, "selected_hidden_states")  # since 5.24
_ROOM = 1024  # tokens that masks and positions are made for at once, at most


class TargetSession:
    """Prefill once; then `forward`, choose, `commit`, and so on.

    Between two calls the cache holds all committed tokens but the last, as transformers' own loop leaves it.

    Args:
        model: the target.
        generation_config: as `generate` prepared it.
        model_kwargs: as `generate` prepared them, the cache among them.
        hands_back: somebody wants the cache at the end.
        is_control: the cache grows as in `generate`, which speed-up is measured against.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        hands_back: bool = True,
        is_control: bool = False,
    ) -> None:
        self._model = model
        self._hands_back = hands_back
        self._grown: Room | None = None  # what the cache grows in
        self._grows_in_place = not is_control
        self._config = generation_config
        self._carried = Carried(model, model_kwargs, min(int(generation_config.max_length), _ROOM))
        self._outputs: Any = None  # of a forward that is not committed yet
        self._width = 1
        self._num_padding = 0
        self._is_recording = False
        self._trims = False  # rejecting nothing, too, takes something out of the cache
        self._states: dict[int, Tensor] = {}  # of the last forward by layer, [n, hidden_size]
        self.hidden_layers: tuple[int, ...] = ()  # of which each forward is asked for hidden states; it need not be any
        self.is_prepared = False  # forwards are prepared ones now
        self.why_eager: str | None = None  # they do not, or not any more, although they might have
        self._prefilled: tuple[Any, Tensor | None, int] = (None, None, 0)  # cache, positions and tokens at that time

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Run the prompt. Args: input_ids: [1, n]. Returns: logits of the next token, [1, vocab_size]."""
        kwargs = self._carried.kwargs
        mask = kwargs.get("attention_mask")
        if self.hidden_layers:
            kwargs["output_hidden_states"] = _selection(self.hidden_layers)
        outputs = self._model._prefill(input_ids, self._config, kwargs, is_first_iteration=True)
        kwargs.pop("output_hidden_states", None)
        cache = find_cache(outputs)
        self._prefilled = cache, kwargs.get("position_ids"), max(input_ids.shape[1], _length(cache))
        logits = self._keep(outputs, width=1)
        for layer, states in self._states.items():
            is_whole = self.prefill_length == input_ids.shape[1]  # nothing came in a cache
            self._states[layer] = _of_prompt(states, input_ids, mask) if is_whole else states[:0]
        return logits

    @cached_property
    def why_no_speculation(self) -> str | None:
        """Why rejected tokens could not be taken back out of its cache; None where they can. Asked after prefill."""
        return why_not_rollback(self._prefilled[0])

    @cached_property
    def prefill_length(self) -> int:
        """Positions used up by the prompt, padding and what a cache held before included."""
        _, positions, num_tokens = self._prefilled
        return num_tokens if positions is None else max(int(positions.max()) + 1, num_tokens)

    def decoding(self) -> AbstractContextManager[None]:
        """What transformers switches in the model between prefill and the end (expert kernels)."""
        context: AbstractContextManager[None] = self._model._optimize_model_for_decode()
        return context

    def forward(self, input_ids: Tensor, num_draft_tokens: int, num_padding: int = 0) -> Tensor:
        """Run the last committed token and the draft tokens after it.

        Args:
            input_ids: [1, n + num_draft_tokens + num_padding], the committed tokens, the drafts, and any tokens.
            num_draft_tokens: 0 is a plain step.
            num_padding: tokens after the drafts that are run for the width's sake; `commit` takes them back.

        Returns:
            logits, [num_draft_tokens + 1, vocab_size], in the model's dtype.
        """
        if self._grows_in_place and self._grown is None:
            self._grown = Room(self._carried.cache)
        num_uncommitted = num_draft_tokens + num_padding
        kwargs = self._carried.ahead(num_uncommitted)
        width = num_uncommitted + 1
        if num_uncommitted:
            self._record()
            cache = self._carried.cache
            length = _length(cache)
        inputs = self._model.prepare_inputs_for_generation(input_ids, next_sequence_length=width, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        if self.hidden_layers:
            inputs["output_hidden_states"] = _selection(self.hidden_layers)
        try:
            outputs = self._model(**inputs, return_dict=True)
        except BaseException:
            if num_uncommitted and cache is not None:
                cut_back(cache, length + 1)  # where a plain step would have stopped
            raise
        if num_uncommitted and (find_cache(outputs) is not cache or length + width != _length(cache)):
            raise ExactnessError("the model did not append the block to its cache: it cannot be verified by blocks")
        logits = self._keep(outputs, width, num_padding)
        return logits[: num_draft_tokens + 1] if num_padding else logits

    def is_broken(self, logits: Tensor) -> bool:
        """Did a token of the last forward break the rows before its own?

        Keys or values that overflowed are hidden from earlier rows, but zero times infinity is not a number. It is
        looked at on the CPU, and in float16 elsewhere: other formats hardly overflow, and the host would have to wait.

        Args:
            logits: [n, vocab_size], as `forward` gave them.
        """
        if logits.device.type != "cpu" and logits.dtype != torch.float16:
            return False
        return bool(logits[:, :: max(1, logits.shape[1] // 8)].isnan().any())  # a broken row is broken throughout

    def take_back(self) -> None:
        """Forget the last forward: everything is as it was in front of it."""
        drop_last(self._carried.cache, self._width)
        self._outputs = None

    def commit(self, num_tokens: int) -> None:
        """Keep what belongs to the last committed tokens but one; forget rejected drafts and padding.

        Call after each forward.
        """
        num_rejected = self._width - num_tokens
        if self._is_recording and (num_rejected or self._trims):
            drop_last(self._carried.cache, num_rejected)
        self._carried.commit(self._outputs, num_tokens)
        self._outputs = None
        if self._states and num_rejected:
            self._states = {layer: states[: len(states) - num_rejected] for layer, states in self._states.items()}

    def committed_states(self, layers: Sequence[int]) -> list[Tensor]:
        """Hidden states of the positions that the last `commit` kept. Args: layers: of those in `hidden_layers`.

        Returns:
            [n, hidden_size] for each layer; of the prompt without its padding, or nothing of it where it was not run in
            one forward.

        Raises:
            DraftError: the target has none of a layer.
        """
        if missing := [layer for layer in layers if layer not in self._states]:
            raise DraftError(f"the target gives no hidden states of layer {missing[0]}")
        return [self._states[layer] for layer in layers]

    def cache(self) -> Any | None:
        """What the target has cached: in front of a block, all committed tokens but the last."""
        return self._carried.cache

    def abort(self, num_tokens: int) -> None:
        """After an error in the middle of a block: leave the cache as plain decoding would have.

        Args:
            num_tokens: committed in this block and seen by criteria and streamer before the error; plain decoding has
                run one forward more.
        """
        if self._outputs is not None:
            self.commit(min(num_tokens + 1, self._width - self._num_padding))
        self.finish()

    def finish(self) -> Any | None:
        """Hand the cache back in the state that `generate` leaves it in."""
        cache = self._carried.cache
        if self._is_recording:
            stop_recording(cache)
        if self._grown is not None:
            self._grown.close(is_kept=self._hands_back)
        return cache

    def _record(self) -> None:
        if not self._is_recording:
            self._trims = start_recording(self._carried.cache)
            self._is_recording = True

    def _keep(self, outputs: Any, width: int, num_padding: int = 0) -> Tensor:
        logits: Tensor = outputs.logits[0]
        if logits.shape[0] != width:
            logits = logits[-width:]
        if self.hidden_layers:
            states = getattr(outputs, "hidden_states", None) or ()
            has = {layer for layer in self.hidden_layers if -len(states) <= layer < len(states)}
            self._states = {layer: states[layer][0] for layer in has if states[layer] is not None}
            outputs.hidden_states = None
        self._outputs = outputs
        self._width, self._num_padding = width, num_padding
        return logits


def _length(cache: Any | None) -> int:
    """Tokens in the cache."""
    return int(cache.get_seq_length()) if cache is not None else 0


def _selection(layers: Sequence[int]) -> list[int] | bool:
    """What `output_hidden_states` must be for these; all, in releases that count the selected ones in another way."""
    return list(layers) if _SELECTS_STATES else True


def _of_prompt(states: Tensor, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """What a prefill of `input_ids` made of the prompt's own tokens. Args: states: [n, hidden_size]."""
    if len(states) != input_ids.shape[1]:
        return states[:0]
    return states if mask is None or mask.shape != input_ids.shape else states[mask[0].to(states.device) != 0]
