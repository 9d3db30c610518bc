"""What a forward would take if it cost only reading its weights from memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from autospec.memory import weight_bytes

BUFFER_BYTES = 512 * 1024**2
"""Beyond the caches."""
REPEATS = 9


def bandwidth() -> dict[str, float]:
    """Bytes a second of the best of some repeats: summing a float32 buffer, and copying it (read and written)."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    other = torch.empty_like(buffer)
    ways = {"sum": (lambda: buffer.sum(), BUFFER_BYTES), "copy": (lambda: other.copy_(buffer), 2 * BUFFER_BYTES)}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS):
        for name, (run, _) in ways.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started)
    return {name: size / best[name] for name, (_, size) in ways.items()}


def floor(models: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a forward of each model over the higher of the two bandwidths: the lowest floor that was seen."""
    measured = bandwidth()
    fastest = max(measured.values())
    sizes = {name: weight_bytes([model]) for name, model in models.items()}
    return {
        "bytes_per_second": measured,
        "buffer_bytes": BUFFER_BYTES,
        "weight_bytes": sizes,
        "weight_dtype": {name: str(model.dtype).removeprefix("torch.") for name, model in models.items()},
        "forward_seconds": {name: size / fastest for name, size in sizes.items()},
    }
