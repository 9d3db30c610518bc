"""Runners by name, and the capacities that a device and its memory suggest."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from autospec.backends.base import CAPACITIES, CannotPrepareError, Runner, Static
from autospec.backends.cuda_graph import CudaGraphRunner
from autospec.backends.inductor import InductorRunner
from autospec.backends.plain import PlainRunner
from autospec.backends.static_cache import layout_of
from autospec.caches import context_window

MEMORY_SHARE = 0.1
"""Of a GPU's free memory, that a cache of fixed shape may take where no capacities are given."""
MOST_BYTES = 1 << 30
"""The same on a CPU."""
COMPILED_CAPACITIES = (1024,)
"""Where each forward is compiled for a minute or so, and no capacities are given."""


def make_runner(name: str, device: torch.device) -> Runner:
    """Raises: CannotPrepareError: it is of another device."""
    if name == "cuda_graph":
        if device.type != "cuda":
            raise CannotPrepareError(f"CUDA graphs need a CUDA device, the model is on {device}")
        return CudaGraphRunner(device)
    return InductorRunner() if name == "inductor" else PlainRunner()


def capacities_for(model: PreTrainedModel, settings: Static) -> tuple[int, ...]:
    """Rising, all within the model's window; those given, or as many as the memory has room for.

    Raises:
        CannotPrepareError: there is no room for any.
    """
    window = context_window(model) or 0
    if settings.capacities is not None:
        fitting = tuple(each for each in settings.capacities if each <= window)
        if not fitting:
            raise CannotPrepareError(f"its window of {window} tokens is shorter than every capacity")
        return fitting
    wanted = COMPILED_CAPACITIES if settings.runner == "inductor" else CAPACITIES
    device = model.device
    room = int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else MOST_BYTES
    most = room // layout_of(model).token_bytes
    fitting = tuple(each for each in wanted if each < window and each <= most)
    if window <= most and window <= max(wanted):
        fitting = (*fitting, window)
    if not fitting:
        raise CannotPrepareError(f"a cache of {min(wanted)} tokens does not fit into {room / 1e6:.0f} MB")
    return fitting
