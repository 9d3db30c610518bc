"""The side of the benchmark that asks: one process for each environment, kept alive, one request at a time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "worker.py"
ROOT = SCRIPT.parent.parent.parent


class ArmError(Exception):
    """What was asked for raised over there, or the process ended."""


class Process:
    """One that answers JSON lines, as `worker.serve` does.

    Args:
        command: that starts it.
        environment: its variables, all of them.
        log: what it writes to stderr.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("a", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=dict(environment),
            )
        self.hello: dict[str, Any] = self.ask("hello")

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            ArmError: it raised over there (the process goes on), or the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ArmError(f"the worker ended with status {self._process.wait()} at {do!r}: see {self._log}")
        reply = json.loads(line)
        if "error" in reply:
            raise ArmError(reply["error"])
        found: dict[str, Any] = reply["reply"]
        return found

    def close(self) -> None:
        """Closing stdin ends it."""
        with self._process, suppress(BrokenPipeError):  # it may have ended by itself
            assert self._process.stdin is not None
            self._process.stdin.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Client(Process):
    """A running worker.

    Args:
        python: of the environment.
        threads: for torch over there.
        log: what the process writes to stderr, and what packages print.
        is_own: the environment that autospec runs in; others do not see this checkout.
        costs: where autospec keeps the costs that it measures.
    """

    def __init__(self, python: Path, threads: int, log: Path, *, is_own: bool, costs: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "AUTOSPEC_COSTS": str(costs)}
        if is_own:
            environment["PYTHONPATH"] = str(ROOT)
        super().__init__([str(python), str(SCRIPT), "--threads", str(threads)], environment, log)
