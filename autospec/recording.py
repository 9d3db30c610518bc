"""Prompts and answers as token ids, kept only where recording is switched on: in the database, or as traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from autospec.calls import Call
from autospec.errors import ConfigurationError
from autospec.notices import warn
from autospec.traffic.recording import Redact, Traffic
from autospec.traffic.request import request_of
from autospec.types import RecordedTokens, RequestRecord

__all__ = ["SETTINGS", "Redact", "TokenRecorder", "needs_store", "options_of"]

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


def needs_store(record: object) -> bool:
    """Are tokens to go into the database?"""
    return record is not False and not isinstance(record, (str, Path, Traffic))


def options_of(call: Call) -> dict[str, object]:
    """How a call chooses its tokens, as plain JSON values."""
    values = {name: call.setting(name) for name in SETTINGS}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, list))}


class TokenRecorder:
    """Decides what of a request's tokens is kept.

    Args:
        record: False: nothing; True: all; a function: what it gives. When the function fails, nothing is kept. These
            go into the database; with a folder or `Traffic`, requests go there and none into the database.

    Raises:
        ConfigurationError: it is none of them.
    """

    def __init__(self, record: bool | Redact | str | Path | Traffic) -> None:
        if isinstance(record, (str, Path)):
            record = Traffic(record)
        self._traffic = record if isinstance(record, Traffic) else None
        if isinstance(record, Traffic):
            record = record.redact or True
        if not isinstance(record, bool) and not callable(record):
            raise ConfigurationError(
                f"record={record!r}: True, False, a function of prompt and answer, a folder or Traffic is needed"
            )
        self._record = record
        self._has_warned = False

    def attach(self, tokenizer: Any | None, target: str) -> None:
        """Make the folder of traffic, if there is to be one, or check that it is of this tokenizer.

        Raises:
            ConfigurationError: there is no tokenizer, or another one.
            AutospecError: the folder cannot be written.
        """
        if self._traffic is None:
            return
        if tokenizer is None:
            where = f"record={str(self._traffic.folder)!r}"
            raise ConfigurationError(f"{where}: traffic names the tokenizer of its token ids: give tokenizer=, too")
        self._traffic.belong_to(tokenizer, target)

    def for_store(self, call: Call, output: Any, *, is_encoder_decoder: bool) -> RecordedTokens | None:
        """What the database keeps of a call; None: nothing."""
        return None if self._traffic is not None else self._tokens(call, output, is_encoder_decoder=is_encoder_decoder)

    def to_traffic(self, record: RequestRecord, call: Call, output: Any, *, is_encoder_decoder: bool) -> None:
        """Write what traffic keeps of a call, if there is to be traffic. Raises nothing."""
        if self._traffic is None or not self._traffic.takes_next():
            return
        try:
            tokens = self._tokens(call, output, is_encoder_decoder=is_encoder_decoder)
            if tokens is not None:
                self._traffic.write(request_of(record, tokens))
        except Exception as error:  # noqa: BLE001  # the answer is there
            self._traffic.fail(error)

    def close(self) -> None:
        """Close the file of traffic."""
        if self._traffic is not None:
            self._traffic.close()

    def _tokens(self, call: Call, output: Any, *, is_encoder_decoder: bool) -> RecordedTokens | None:
        """Prompt and answer as far as they may be kept. Batches and prompts that are not given as ids are not kept."""
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
        return RecordedTokens(tuple(prompt), tuple(answer), options_of(call))


def _checked(token: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**32:
        raise ValueError(f"{token!r} is no token id")
    return token
