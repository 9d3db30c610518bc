"""Forwards captured as CUDA graphs: a replay launches all kernels of a forward at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autospec.backends.base import CannotPrepareError, Forward
from autospec.fetching import one_line

WARM_UPS = 3
"""Forwards before a capture: what a first call allocates and chooses must not be captured."""


class CudaGraphRunner:
    """Captures each forward once, over the model's buffers.

    All captures share one pool of memory: only one of them runs at a time, and its logits are used before the next one
    runs. Source: the documentation of `torch.cuda.graph`.
    """

    name = "cuda_graph"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.num_captures = 0
        self.memory_bytes = 0

    def prepare(self, forward: Forward) -> Forward:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_UPS):
                        forward()
                current.wait_stream(self._stream)
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved(self._device)
                graph = torch.cuda.CUDAGraph()
                # other threads may go on using the device meanwhile
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    logits = forward()
            except RuntimeError as error:  # out of memory, or something that cannot be captured
                current.wait_stream(self._stream)
                raise CannotPrepareError(f"capture failed ({type(error).__name__}: {one_line(error):.200})") from error
        self.memory_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        self._graphs.append(graph)
        self.num_captures += 1

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
