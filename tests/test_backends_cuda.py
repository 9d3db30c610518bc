"""Capturing CUDA graphs, with torch's part replaced: the order of what is called. On a device, see experiments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from autospec.backends.base import CannotPrepareError
from autospec.backends.cuda_graph import WARM_UPS, CudaGraphRunner


class Cuda:
    """What `CudaGraphRunner` uses of torch.cuda, on the host: a capture keeps the forward, a replay runs it again."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.reserved = 0

    class Stream:
        def __init__(self, device: Any) -> None:
            self.waited: list[Any] = []

        def wait_stream(self, other: Any) -> None:
            self.waited.append(other)

    class CUDAGraph:
        forward: Any = None

        def replay(self) -> None:
            self.forward()

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert pool == "pool"
        assert isinstance(stream, Cuda.Stream)
        self.said.append(f"capture {capture_error_mode}")
        yield
        self.reserved += 1000
        graph.forward = self.forward

    forward: Any = None

    def graph_pool_handle(self) -> str:
        return "pool"

    def device(self, device: Any) -> Any:
        return nullcontext()

    def stream(self, stream: Any) -> Any:
        self.said.append("stream")
        return nullcontext()

    def current_stream(self, device: Any) -> Any:
        return self._current

    _current = Stream(None)

    def synchronize(self, device: Any) -> None:
        self.said.append("synchronize")

    def empty_cache(self) -> None:
        self.said.append("empty_cache")

    def memory_reserved(self, device: Any) -> int:
        return self.reserved


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_warmed_up_captured_and_replayed(cuda: Cuda) -> None:
    runner = CudaGraphRunner(torch.device("cpu"))
    logits, calls = torch.zeros(2, 3), []

    def forward() -> torch.Tensor:
        calls.append(len(cuda.said))
        logits.add_(1.0)
        return logits

    cuda.forward = forward
    replay = runner.prepare(forward)
    assert len(calls) == WARM_UPS + 1
    assert cuda.said == ["stream", "synchronize", "empty_cache", "capture thread_local"]
    assert calls == [1, 1, 1, 4]  # warmed up on the side stream, then captured
    before = logits.clone()
    assert replay() is logits
    assert torch.equal(logits, before + 1.0)
    assert (runner.num_captures, runner.memory_bytes) == (1, 1000)
    runner.prepare(forward)
    assert (runner.num_captures, runner.memory_bytes) == (2, 2000)


@pytest.mark.parametrize("when", ["warming up", "capturing"])
def test_what_cannot_be_captured_has_a_reason(cuda: Cuda, when: str) -> None:
    runner = CudaGraphRunner(torch.device("cpu"))

    def forward() -> torch.Tensor:
        if (when == "capturing") == ("capture thread_local" in cuda.said):
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return torch.zeros(1)

    with pytest.raises(CannotPrepareError, match=r"capture failed \(RuntimeError: operation not permitted when"):
        runner.prepare(forward)
    assert runner.num_captures == 0
