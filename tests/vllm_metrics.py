"""A stand-in for what vLLM counts, made with the library that vLLM makes it with, and a server that shows it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LABELS = ["model_name", "engine"]
POSITIONS = 3


class Counted:
    """Args: model, engine: labels; speculates: with the families of speculative decoding."""

    def __init__(self, model: str = "org/model", engine: str = "0", *, speculates: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model, engine)
        self._made: dict[str, Any] = {}
        for kind, name, extra in (
            (Gauge, "vllm:num_requests_running", []),
            (Counter, "vllm:prompt_tokens", []),
            (Counter, "vllm:generation_tokens", []),
            (Counter, "vllm:request_success", ["finished_reason"]),
            (Histogram, "vllm:iteration_tokens_total", []),
            (Histogram, "vllm:request_generation_tokens", []),
            (Histogram, "vllm:request_inference_time_seconds", []),
            *((Counter, f"vllm:spec_decode_num_{each}", []) for each in ("drafts", "draft_tokens", "accepted_tokens")),
            (Counter, "vllm:spec_decode_num_accepted_tokens_per_pos", ["position"]),
        ):
            if speculates or "spec_decode" not in name:
                self._made[name] = kind(name, "As vLLM has it.", [*LABELS, *extra], registry=self.registry)
                if not extra:
                    self._made[name].labels(*self._labels)
        if speculates:
            for position in range(POSITIONS):
                self._made["vllm:spec_decode_num_accepted_tokens_per_pos"].labels(*self._labels, str(position))

    def of(self, name: str, *more: str) -> Any:
        return self._made[f"vllm:{name}"].labels(*self._labels, *more)

    def request(self, tokens: int, seconds: float, reason: str = "stop") -> None:
        """A request that ended, each token of it in a step of its own."""
        self.of("prompt_tokens").inc(10)
        self.of("generation_tokens").inc(tokens)
        self.of("request_success", reason).inc()
        self.of("request_generation_tokens").observe(tokens)
        self.of("request_inference_time_seconds").observe(seconds)
        for _ in range(tokens):
            self.of("iteration_tokens_total").observe(1)

    def draft(self, drafted: int, accepted: int) -> None:
        self.of("spec_decode_num_drafts").inc()
        self.of("spec_decode_num_draft_tokens").inc(drafted)
        self.of("spec_decode_num_accepted_tokens").inc(accepted)
        for position in range(accepted):
            self.of("spec_decode_num_accepted_tokens_per_pos", str(position)).inc()

    def text(self) -> str:
        return generate_latest(self.registry).decode()


Answer = Callable[[str, dict[str, Any] | None], "tuple[int, str, str] | Iterator[str]"]
"""From a path and a body to a status, a type and a text, or to parts that are streamed."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server on the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(answer(self.path, None))

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._send(answer(self.path, json.loads(self.rfile.read(length))))

        def _send(self, found: Any) -> None:
            if not isinstance(found, tuple):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for part in found:
                    self.wfile.write(part.encode())
                    self.wfile.flush()
                return
            status, kind, text = found
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class OpenAI:
    """A stand-in for `vllm serve`: requests that are there together get their tokens in the same steps.

    Args:
        step_seconds: of a step over so many requests.
        drafts: draft tokens of each request in each step, of which none is accepted.
    """

    def __init__(
        self, step_seconds: Callable[[int], float], *, drafts: int = 0, most: int = 64, together: int = 1
    ) -> None:
        self.counted = Counted(speculates=drafts > 0)
        self.models: list[dict[str, Any]] = [{"id": "org/model", "root": "/models/tiny", "max_model_len": 2048}]
        self.asked: list[dict[str, Any]] = []
        self.breaks: Callable[[int], str | None] = lambda place: None
        self._step_seconds, self._drafts, self._together = step_seconds, drafts, together
        self._lock = threading.Condition()
        self._room = threading.Semaphore(most)
        self._here = self._at = 0

    def __call__(self, path: str, body: dict[str, Any] | None) -> Any:
        if path == "/metrics":
            with self._lock:
                return 200, "text/plain", self.counted.text()
        if path == "/version":
            return 200, "application/json", '{"version": "0.32.0"}'
        if path == "/v1/models":
            return 200, "application/json", json.dumps({"data": self.models})
        if path == "/v1/completions" and body is not None:
            self.asked.append(body)
            return self._stream(body)
        return 404, "application/json", '{"error": {"message": "Not Found"}}'

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        tokens = body["max_tokens"]
        with self._room, self._joined():
            for place in range(tokens):
                if said := self.breaks(place):
                    yield said
                    return
                self._step()
                with self._lock:
                    self.counted.of("generation_tokens").inc()
                    if self._drafts and place:
                        self.counted.draft(self._drafts, 0)
                if (place + 1) % self._together == 0 or place + 1 == tokens:
                    yield _event({"choices": [{"text": "x"}]})
            yield _event({"choices": [], "usage": {"completion_tokens": tokens}})
            yield "data: [DONE]\n\n"

    @contextmanager
    def _joined(self) -> Iterator[None]:
        with self._lock:
            self._here += 1
        try:
            yield
        finally:
            with self._lock:
                self._here -= 1

    def _step(self) -> None:
        time.sleep(self._step_seconds(self._here))


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part)}\n\n"
