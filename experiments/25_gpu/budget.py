"""The time that a run may take, counted from when this module was loaded: before torch is."""

from __future__ import annotations

import signal
import time
from types import FrameType

STARTED = time.perf_counter()
CLOSING_SECONDS = 5.0
"""Kept for the last table and for giving the device back."""


class OutOfTime(BaseException):
    """The time is up. Not an `Exception`: nothing on the way may take it for a failure of its own and go on."""


class Clock:
    """Args: minutes: of the whole run."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._end = STARTED + 60.0 * minutes - CLOSING_SECONDS

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds."""
        return time.perf_counter() - STARTED

    def ring(self) -> None:
        """Have `OutOfTime` raised in the main thread when the time is up, whatever it is doing."""

        def raise_it(number: int, frame: FrameType | None) -> None:
            raise OutOfTime

        signal.signal(signal.SIGALRM, raise_it)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.left))

    def silence(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
