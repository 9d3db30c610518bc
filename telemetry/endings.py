"""How recorders meet the ends of a process: exit, exception, SIGTERM, the end of a forked child, and fork itself."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autospec.telemetry.recorder import Recorder

CLOSE_SECONDS = 5.0

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_expected_in: int | None = None


def register(recorder: Recorder) -> None:
    """From now on the recorder is closed with the process, and secured when the process is told to terminate.

    SIGTERM is only handled where nobody else does, and then ends the process as it would have without us. Python lets
    the main thread alone set that up: where every recorder is made in another one, SIGTERM is like `kill -9`.
    """
    _recorders.add(recorder)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def forget(recorder: Recorder) -> None:
    _recorders.discard(recorder)


def expect_the_end_of_a_child() -> None:
    """multiprocessing's children end without atexit, but with these."""
    global _expected_in
    if _expected_in != os.getpid():
        _expected_in = os.getpid()
        multiprocessing.util.Finalize(None, _close_all, exitpriority=10)


def _close_all() -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for recorder in list(_recorders):
        recorder.close(max(0.1, deadline - time.monotonic()))


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for recorder in list(_recorders):
        recorder.secure(max(0.1, deadline - time.monotonic()))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _after_fork_in_child() -> None:
    for recorder in list(_recorders):
        recorder._after_fork_in_child()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
