"""What the proposer takes of a step, measured where vLLM calls it. vLLM adds this to its worker's class."""

from __future__ import annotations

import time
from typing import Any


class Stopwatch:
    """vLLM's `worker_extension_cls`. A step is the time from one return of `propose` to the next."""

    model_runner: Any
    _steps: list[tuple[float, float]] | None = None  # when each call of `propose` began and ended

    def watch(self) -> None:
        """Measure from now on. Without a proposer there is nothing to measure."""
        drafter = getattr(self.model_runner, "drafter", None)
        if drafter is None:
            return
        if self._steps is None:
            propose = drafter.propose

            def watched(*args: Any, **named: Any) -> Any:
                began = time.perf_counter()
                drafts = propose(*args, **named)
                self._steps.append((began, time.perf_counter()))
                return drafts

            drafter.propose = watched
        self._steps = []

    def watched(self) -> dict[str, Any] | None:
        """Steps since `watch`, the first of which has no beginning and is left out."""
        if self._steps is None:
            return None
        steps = self._steps
        return {
            "steps": max(0, len(steps) - 1),
            "step_seconds": steps[-1][1] - steps[0][1] if steps else 0.0,
            "proposer_seconds": sum(ended - began for began, ended in steps[1:]),
        }
