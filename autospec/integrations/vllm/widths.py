"""A proposer for `autospec calibrate --vllm`: drafts blocks of known lengths, and writes down what each step took."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.errors import ConfigurationError
from autospec.integrations.vllm.engine import limits_of, read_call
from autospec.integrations.vllm.telemetry import describe_engine
from autospec.memory import weight_bytes
from autospec.telemetry.codec import deployment_to_row

BLOCK_LENGTHS = (0, 1, 2, 4, 8, 16)
HELD = 3
"""Steps that a block length stays."""
SETTING = "autospec_steps"
"""In vLLM's additional configuration: the file that steps are written to, a line of JSON each."""


class Widths:
    """vLLM's proposer of draft tokens (`custom_class`), which are arbitrary: cost is what they are for.

    The first line of the file is the engine's deployment; each other one the tokens that a step verified, and its
    seconds.
    Failures end the engine: what cannot be measured is not to seem measured.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        ConfigurationError: no file is named, or this vLLM is not one that can be served.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        limits = limits_of(vllm_config)
        settings = getattr(vllm_config, "additional_config", None)
        path = settings.get(SETTING) if isinstance(settings, dict) else None
        if not path:
            raise ConfigurationError(f"additional_config has no {SETTING}: this proposer is for autospec calibrate")
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115  # open as long as the engine
        lengths = sorted({min(length, limits.num_speculative_tokens) for length in BLOCK_LENGTHS})
        self._lengths = block_lengths(lengths)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._verified: int | None = None  # by the step under way; None: not known
        self._expected: NDArray[np.int64] | None = None  # [rows], tokens of each before that step
        self._returned = 0.0

    def load_model(self, target_model: Any = None, *args: Any, **named: Any) -> None:
        """vLLM has loaded the target: say what and where it is."""
        size = weight_bytes([target_model]) or None if target_model is not None else None
        row = deployment_to_row(describe_engine(self._config, {}, name=None, model_bytes=size))
        self._write({"deployment": {name: value for name, value in row.items() if name != "fingerprint"}})

    def propose(self, *args: Any, **named: Any) -> list[list[int]]:
        """Draft tokens for each row, all of one length."""
        now = time.perf_counter()
        call = read_call(args, named)
        counts = np.array([len(tokens) for tokens in call.sampled], dtype=np.int64)
        lengths = call.lengths[: len(counts)].astype(np.int64)
        if self._is_pure(counts, lengths, call.num_step_tokens):
            self._write({"tokens": self._verified, "seconds": now - self._returned})
        length = next(self._lengths)
        drafts = [self._draft(tokens, length) if tokens else [] for tokens in call.sampled]
        self._verified = sum(len(tokens) + 1 for tokens in drafts) if len(counts) and counts.all() else None
        self._expected = lengths
        self._returned = time.perf_counter()
        return drafts

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()

    def _is_pure(self, counts: NDArray[np.int64], lengths: NDArray[np.int64], num_step_tokens: int | None) -> bool:
        """Has the step verified what was drafted, for the same requests, and read no prompt?"""
        if self._verified is None or self._expected is None or len(self._expected) != len(counts):
            return False
        is_whole = num_step_tokens is None or num_step_tokens >= self._verified
        return is_whole and bool(counts.all()) and np.array_equal(np.sort(lengths - counts), np.sort(self._expected))

    def _draft(self, sampled: Sequence[int], length: int) -> list[int]:
        return [(sampled[-1] + 1 + place) % self._vocab_size for place in range(length)]

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def block_lengths(lengths: Sequence[int]) -> Iterator[int]:
    """Each for a few steps, again and again in another order."""
    chance = random.Random(0)
    while True:
        for length in chance.sample(lengths, len(lengths)):
            yield from [length] * HELD
