"""How the requests in vLLM's rows are sampled: not said to proposers, but kept by whatever calls them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_FRAMES = 4
"""Between the proposer and the model runner that calls it, both included."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen."""

    do_sample: bool
    decoding: str  # as in a record
    temperature: float = 0.0  # 0 when greedy, or not known


UNKNOWN = Sampling(True, "unknown: this vLLM does not show proposers how requests are sampled")
GREEDY = Sampling(False, "greedy")


class Rows:
    """Looks into the rows of a model runner.

    Its batch has, by row, temperatures (0 where a request is greedy), what top-p and top-k are cut to, and repetition
    penalties. They are read as of vLLM 0.32; of a batch of another shape nothing is known.

    Args:
        runner: with `input_batch`, as the batch is now. It is not kept alive.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)

    @property
    def runner(self) -> Any:
        """None once it is gone."""
        return self._runner()

    def __call__(self, row: int) -> Sampling:
        """How the request in a row is sampled; what is neutral is left out, as in the records of a wrapped model."""
        batch = getattr(self._runner(), "input_batch", None)
        temperature = _at(batch, "temperature_cpu", row)
        if temperature is None or temperature < 0.0:
            return UNKNOWN
        words = ["sample" if temperature else "greedy"]
        if temperature:
            top_p, top_k = _at(batch, "top_p_cpu", row), _at(batch, "top_k_cpu", row)
            if temperature != 1.0:
                words.append(f"temperature={temperature:g}")
            vocab_size = getattr(batch, "vocab_size", None)
            if top_k is not None and type(vocab_size) is int and 0 < top_k < vocab_size:
                words.append(f"top_k={top_k:g}")
            if top_p is not None and 0.0 < top_p < 1.0:
                words.append(f"top_p={top_p:g}")
        penalty = _at(batch, "repetition_penalties_cpu", row)
        if penalty is not None and penalty > 0.0 and penalty != 1.0:
            words.append(f"repetition_penalty={penalty:g}")
        return GREEDY if words == ["greedy"] else Sampling(temperature > 0.0, " ".join(words), temperature)


def rows_of_caller(frame: FrameType | None) -> Rows | None:
    """The rows of the object whose method this frame is, or one a little further out: calls may be wrapped.

    None where none of them shows temperatures. Never raises.
    """
    try:
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            runner = frame.f_locals.get("self")
            if _is_column(getattr(getattr(runner, "input_batch", None), "temperature_cpu", None)):
                return Rows(runner)
            frame = frame.f_back
        return None
    except Exception:  # noqa: BLE001  # whatever calls is not ours: properties that fail, a class without weak references
        return None


def _is_column(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "fi"


def _at(batch: Any, name: str, row: int) -> float | None:
    values: NDArray[Any] | None = getattr(batch, name, None)
    if values is None or not _is_column(values) or row >= len(values):
        return None
    return float(np.format_float_positional(values[row], unique=True)) if np.isfinite(values[row]) else None
