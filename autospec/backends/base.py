"""What a backend of fixed shapes is made of: its settings, and the runner that prepares one forward of each shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autospec.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

RUNNERS = ("plain", "inductor", "cuda_graph")
WIDTHS = (1, 2, 3, 5, 9, 17)
"""Tokens of a forward: those of block lengths 1, 2, 4, 8 and 16; others are padded."""
CAPACITIES = (512, 1024, 2048, 4096, 8192)
"""Tokens of a cache that a forward looks at."""

Forward = Callable[[], "Tensor"]
"""Runs the model on its buffers. Returns: logits, [width, vocab_size], valid until the next forward of the model."""


class CannotPrepareError(Exception):
    """Why a model, or a forward of it, is left to run as it is; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Static:
    """Settings of a backend of fixed shapes.

    Args:
        runner: `plain` (the model's own forward over static buffers), `inductor` (torch.compile) or `cuda_graph`.
        widths: tokens of a forward, 1 among them; shorter blocks are padded, longer ones run in several.
        capacities: tokens of a cache that a forward looks at; those beyond the model's window are left out. None: as
            the device and its memory suggest.

    Raises:
        ConfigurationError: an unknown runner, or sizes that are not rising whole numbers.
    """

    runner: str
    widths: tuple[int, ...] = WIDTHS
    capacities: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise ConfigurationError(f"runner={self.runner!r}: known are {', '.join(RUNNERS)}")
        for name, sizes in (("widths", self.widths), ("capacities", self.capacities)):
            if sizes is not None and not (isinstance(sizes, tuple) and sizes and _are_rising(sizes)):
                raise ConfigurationError(f"{name}={sizes!r}: a tuple of rising whole numbers from 1 is needed")
        if self.widths[0] != 1:
            raise ConfigurationError(f"widths={self.widths!r}: 1 must be the first, plain steps need it")


class Runner(Protocol):
    """Prepares forwards of one model; what it prepares is run from one thread at a time."""

    name: str
    num_captures: int  # forwards compiled or captured so far

    @property
    def memory_bytes(self) -> int:
        """Held by what was prepared, beside the model's buffers."""

    def prepare(self, forward: Forward) -> Forward:
        """The same forward, to be called again and again.

        Raises:
            CannotPrepareError: with the reason.
        """


def _are_rising(sizes: tuple[int, ...]) -> bool:
    are_whole = all(type(size) is int for size in sizes)
    return are_whole and all(low < high for low, high in zip((0, *sizes), sizes, strict=False))
