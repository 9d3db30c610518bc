"""The side of the benchmark that holds a model: answers JSON lines on stdin, one at a time, and sleeps in between.

    python worker.py --threads 2

Every arm runs in such a process, those of other packages in an environment of their own. Time is taken here, around
the call alone. Needs torch and transformers, and whatever the arms need that it is asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parent))

from calm import Others, wait

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
MODULES = {
    "generate": "arms_plain",
    "lookup": "arms_plain",
    "assistant": "arms_assistant",
    "autospec": "arms_autospec",
    "flashspec": "arms_flashspec",
    "economize": "arms_economize",
}
"""Kind of arm -> the module whose `arm(kind, loaded, settings)` makes one."""


class Loaded:
    """The models of this process; `forwards` counts calls of target and assistant since it was last emptied."""

    def __init__(self, folder: str, assistant: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self.folder, self.assistant_folder = folder, assistant
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True)
        self.model.eval()
        self.end = self.model.generation_config.eos_token_id
        self.forwards = {"target": 0, "draft": 0}
        self._assistant: Any = None
        self.count(self.model, "target")

    @property
    def assistant(self) -> Any:
        """The packaged assistant, under ids of its own."""
        if self._assistant is None:
            from transformers import AutoModelForCausalLM

            self._assistant = AutoModelForCausalLM.from_pretrained(
                self.assistant_folder, dtype=self.model.dtype, use_safetensors=True
            ).eval()
            self.count(self._assistant, "draft")
        return self._assistant

    def count(self, model: Any, name: str) -> None:
        """Count its forwards from now on, by those of its first layer: not everybody calls the model as a whole."""

        def add(module: Any, *arguments: Any) -> None:
            self.forwards[name] += 1

        model.get_decoder().layers[0].register_forward_pre_hook(add)


class Worker:
    """What can be asked for: each method takes the request's fields and returns the reply's."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._threads = threads
        self._loaded: Loaded | None = None
        self._arms: dict[str, Any] = {}

    def hello(self) -> dict[str, Any]:
        import torch

        packages = ("torch", "transformers", "flashspec", "economize", "numpy")
        return {
            "versions": {"python": platform.python_version(), **{p: v for p in packages if (v := _version(p))}},
            "threads": torch.get_num_threads(),
        }

    def load(self, folder: str, assistant: str, dtype: str) -> dict[str, Any]:
        """The target in this number format; earlier models and arms are let go."""
        self._arms.clear()
        self._loaded = None
        gc.collect()
        self._loaded = Loaded(folder, assistant, dtype)
        return {}

    def ends(self, are_ignored: bool) -> dict[str, Any]:
        """Whether answers of arms that are made from now on go on past the end of sequence, to their full length."""
        loaded = self._model()
        loaded.model.generation_config.eos_token_id = None if are_ignored else loaded.end
        return {}

    def arm(self, name: str, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Make an arm ready. Seconds are those of all that it does before its first answer."""
        started = time.perf_counter()
        self._arms[name] = import_module(MODULES[kind]).arm(kind, self._model(), dict(settings))
        return {"seconds": time.perf_counter() - started}

    def drop(self, names: list[str]) -> dict[str, Any]:
        for name in names:
            close = getattr(self._arms.pop(name), "close", None)
            if close is not None:
                close()
        return {}

    def answer(
        self, name: str, prompt: list[int], segment: str, seed: int, options: Mapping[str, Any], max_new_tokens: int
    ) -> dict[str, Any]:
        """One timed call. Args: options: `do_sample` and what goes with it."""
        import torch

        arm, loaded = self._arms[name], self._model()
        ids = torch.tensor([prompt])
        torch.manual_seed(seed)
        loaded.forwards.update(target=0, draft=0)
        waited = wait()
        others = Others()
        started = time.perf_counter()
        tokens = arm.answer(ids, segment, dict(options), max_new_tokens)
        seconds, share = time.perf_counter() - started, others.share()
        tokens = [int(token) for token in tokens]
        seen = {"seconds": seconds, "others_share": share, "waited_seconds": round(waited, 3)}
        made = {
            "tokens": tokens,
            **seen,
            **{f"{k}_forwards": n for k, n in loaded.forwards.items()},
        }
        return {**made, **getattr(arm, "told", dict)()}

    def held(self, name: str) -> dict[str, Any]:
        """Bytes that an arm holds besides the target's weights."""
        return self._arms[name].held()

    def judge(self, prompt: list[int], expected: list[int], found: list[list[int]]) -> dict[str, Any]:
        """Greedy answers against plain decoding's: `identical`, `tie` or `different`."""
        from judging import judge

        return {"verdicts": judge(self._model().model, prompt, expected, found)}

    def floor(self) -> dict[str, Any]:
        from floor import floor

        loaded = self._model()
        return floor({"target": loaded.model, "draft": loaded.assistant})

    def forget_peak(self) -> dict[str, Any]:
        """Let `memory` count from now on: what loading a model took for a moment is no arm's."""
        CLEAR.write_text("5")
        return {}

    def memory(self) -> dict[str, Any]:
        """Most that was resident of this process since then."""
        lines = STATUS.read_text().splitlines()
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return {"peak_resident_bytes": kilobytes * 1024}

    def _model(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError("load a model first")
        return self._loaded


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def serve(worker: Worker, requests: TextIO, replies: TextIO) -> None:
    """Until the other side closes. An exception is a reply, and the next request is waited for."""
    for line in requests:
        request = json.loads(line)
        do: Callable[..., dict[str, Any]] = getattr(worker, request.pop("do"))
        try:
            reply = {"reply": do(**request)}
        except Exception as error:  # noqa: BLE001  # the other side decides
            traceback.print_exc()
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what packages print goes to the log
    serve(Worker(options.threads), sys.stdin, replies)


if __name__ == "__main__":
    main()
