"""Keeps the costs of one wrapped model true: taught by every block, measured anew when they no longer hold."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autospec.costs.measuring import cost_model, measure
from autospec.drafts.base import DraftSource
from autospec.fetching import one_line
from autospec.forks import renew_after_fork
from autospec.types import BlockOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.backends.backend import Backend
    from autospec.costs.model import CostModel

LEAST_SECONDS_BETWEEN = 600.0
"""Between two calibrations for drift."""
MOST_SHARE = 0.01
"""Of the time that calibrations for drift may take altogether."""
SHORT_BUDGET_SECONDS = 1.5
"""Of a calibration for drift: it stands between two requests."""

_log = logging.getLogger("autospec")


class Upkeep:
    """Measures (or reads from the disk) when it is made.

    Args:
        target: the model that verifies.
        sources: draft sources by name, attached.
        clock: seconds, for the time between calibrations.
        backend: how forwards run; None: as the models themselves run them.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        sources: Mapping[str, DraftSource],
        *,
        clock: Callable[[], float] = time.monotonic,
        backend: Backend | None = None,
    ) -> None:
        self._target = target
        self._sources = sources
        self._clock = clock
        self._backend = backend
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._place = self._tried = (target.device, target.dtype)
        self.costs: CostModel = cost_model(target, sources, backend)
        self._not_before = clock() + LEAST_SECONDS_BETWEEN

    def before_request(self) -> None:
        """Measure anew if the target was moved, or if the device has drifted and the last time is long enough ago.

        Costs belong to a device and a number format; those of a place known before are read from the disk. A failure
        leaves the costs as they are, for as long as between two calibrations: they decide how fast an answer comes,
        never what it says.
        """
        place = (self._target.device, self._target.dtype)
        has_moved = place != self._place
        is_time = self._clock() >= self._not_before
        if not (place != self._tried or (is_time and (has_moved or self.costs.needs_calibration))):
            return
        if not self._lock.acquire(blocking=False):
            return  # another request is at it
        try:
            self._tried = place
            started = self._clock()
            if has_moved:
                self._backend = None  # prepared for where the target was
                measured = measure(self._target, self._sources)
            else:
                measured = measure(
                    self._target,
                    self._sources,
                    fresh=True,
                    budget_seconds=SHORT_BUDGET_SECONDS,
                    backend=self._backend,
                )
                _log.info("measured costs anew: verification had come to %.2f times its cost", self.costs.drift)
            self.costs.recalibrate(measured.table, is_asynchronous=place[0].type == "cuda")
            self._place = place
        except Exception as error:  # noqa: BLE001  # whatever it is, the request can be answered
            _log.warning("costs could not be measured anew: %s: %s", type(error).__name__, one_line(error))
        finally:
            now = self._clock()
            self._not_before = now + max(LEAST_SECONDS_BETWEEN, (now - started) / MOST_SHARE)
            self._lock.release()

    def watching(self, chooser: Any) -> Any:
        """The chooser of a request, whose blocks the cost model then sees as well."""
        return _Watched(chooser, self.costs, is_prepared=self.is_prepared)

    @property
    def is_prepared(self) -> bool:
        """Are these the costs of prepared forwards? They say nothing of others, nor others of them."""
        return self._backend is not None and not self._backend.is_eager


class _Watched:
    """In all else the chooser itself.

    Args:
        chooser: of a request.
        costs: the policy's.
        is_prepared: they are those of prepared forwards. A block that ran in the others teaches no seconds.
    """

    is_off = False  # costs are learned from plain steps, too

    def __init__(self, chooser: Any, costs: CostModel, *, is_prepared: bool = False) -> None:
        self._chooser = chooser
        self._costs = costs
        self._is_prepared = is_prepared

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._chooser, name)
        if callable(found):
            setattr(self, name, found)  # asked for in every block
        return found

    def observe(self, outcome: BlockOutcome) -> None:
        if outcome.is_prepared == self._is_prepared:
            self._chooser.observe(outcome)
            self._costs.observe(outcome)
        else:
            self._chooser.observe(outcome.untimed())
