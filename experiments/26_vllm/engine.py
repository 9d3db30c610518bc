"""Engines that take turns: each is a process with others below it, all of them stopped while it is not asked.

vLLM's processes wait for one another in loops that use a whole core, long after the last request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from common import script

SERVE = Path(__file__).parent / "serve.py"
ROOT = SERVE.parent.parent.parent
PRELOADED = "libiomp5.so"
"""vLLM says that without Intel's OpenMP speculation on the CPU is slow. It comes with vLLM's own requirements."""

client = script("23_benchmark", "client")
ArmError = client.ArmError


class Engine(client.Process):
    """One vLLM engine, or a process that can become one."""

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Let it go on, send a request, wait for the reply, and stop it again. Raises: ArmError: as `Process.ask`."""
        self._signal("resume")
        try:
            found: dict[str, Any] = super().ask(do, **fields)
        finally:
            self._signal("suspend")
        return found

    def idle_share(self, seconds: float) -> float:
        """Of a core, what it uses while it is asked nothing and not stopped."""
        self._signal("resume")
        before = self.cpu_seconds()
        time.sleep(seconds)
        used = self.cpu_seconds() - before
        self._signal("suspend")
        return used / seconds

    def unique_bytes(self) -> int:
        """Memory that would be free if it ended."""
        return sum(process.memory_full_info().uss for process in self._tree())

    def cpu_seconds(self) -> float:
        """That it has used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())

    def close(self) -> None:
        self._signal("resume")
        super().close()

    def _tree(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, name: str) -> None:
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                getattr(process, name)()


def open_engine(python: Path, log: Path, folder: Path, settings: Mapping[str, str], preloaded: str | None) -> Engine:
    """Start a process; `start` then makes an engine in it.

    Args:
        python: of the environment with vLLM.
        log: what it prints.
        folder: for the records of autospec's proposer.
        settings: of autospec's proposer, by name.
        preloaded: library for LD_PRELOAD.
    """
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("AUTOSPEC_VLLM_")
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "AUTOSPEC_SPOOL": str(folder / "spool"),
        "AUTOSPEC_VLLM_STORE": f"sqlite:///{folder}/store.db",
        **{f"AUTOSPEC_VLLM_{name.upper()}": value for name, value in settings.items()},
    }
    if preloaded:
        environment["LD_PRELOAD"] = preloaded
    return Engine([str(python), str(SERVE)], environment, log)


def library(python: Path) -> str | None:
    """Intel's OpenMP as it lies in an environment; None where it does not."""
    found = python.parent.parent / "lib" / PRELOADED
    return str(found) if found.exists() else None
