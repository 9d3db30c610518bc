"""Prompts and answers as token ids, kept only where recording is switched on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autospec.calls import Call
from autospec.errors import ConfigurationError
from autospec.notices import warn
from autospec.types import RecordedTokens

Redact = Callable[[list[int], list[int]], tuple[Sequence[int], Sequence[int]] | None]
"""Takes prompt and answer, gives what may be kept of them; None: nothing."""

SETTINGS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "max_new_tokens",
    "max_length",
    "eos_token_id",
)


class TokenRecorder:
    """Decides what of a request's tokens is kept.

    Args:
        record: False: nothing; True: all; a function: what it gives. When the function fails, nothing is kept.

    Raises:
        ConfigurationError: it is neither.
    """

    def __init__(self, record: bool | Redact) -> None:
        if not isinstance(record, bool) and not callable(record):
            raise ConfigurationError(f"record={record!r}: True, False or a function of prompt and answer is needed")
        self._record = record
        self._has_warned = False

    def of(self, call: Call, output: Any, *, is_encoder_decoder: bool) -> RecordedTokens | None:
        """What is kept of a call; None: nothing. Batches and prompts that are not given as ids are not kept."""
        if self._record is False:
            return None
        prompt_ids = call.prompt_ids()
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        if prompt_ids is None or len(prompt_ids) != 1 or not isinstance(sequences, Tensor) or len(sequences) != 1:
            return None
        prompt = prompt_ids[0].tolist()
        answer = sequences[0, 1 if is_encoder_decoder else len(prompt) :].tolist()
        try:
            kept = (prompt, answer) if self._record is True else self._record(prompt, answer)
            if kept is None:
                return None
            prompt, answer = ([_checked(token) for token in tokens] for tokens in kept)
        except Exception as error:  # noqa: BLE001  # the answer is there; what may be kept of it is not known
            if not self._has_warned:
                self._has_warned = True
                what = f"record={self._record!r:.80} failed ({type(error).__name__}: {error})"
                warn(f"{what}: nothing of the request is kept")
            return None
        values = {name: call.setting(name) for name in SETTINGS}
        options = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, list))}
        return RecordedTokens(tuple(prompt), tuple(answer), options)


def _checked(token: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**32:
        raise ValueError(f"{token!r} is no token id")
    return token
