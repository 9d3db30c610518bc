"""The recorder: takes records without ever making the decoding thread wait, and writes them in the background."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import threading
import time
import weakref
from collections import deque
from types import TracebackType
from typing import Self

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry.store import Store
from autospec.types import Comparison, RequestRecord

BATCH_RECORDS = 500
LONGEST_PAUSE_SECONDS = 5.0
CLOSE_SECONDS = 5.0
CLOSING_PAUSE_SECONDS = 0.1

_log = logging.getLogger("autospec.telemetry")


class Recorder:
    """Writes records to a store from a background thread.

    While the database fails, batches are tried again with growing pauses and kept in memory up to `capacity`; then the
    oldest are dropped and counted. What a `kill -9` loses is at most the last `flush_seconds`.

    Args:
        store: a store, or the URL of one (which is then opened here and closed with the recorder).
        flush_seconds: how long records gather before they are written.
        capacity: how many records are kept in memory while they wait.

    Attributes:
        recorded: records and comparisons handed in.
        written: those known to be in the database.
        dropped: those lost: memory was full, one could not be stored, or time ran out at the end.
        failed_batches: attempts to write that failed.
        last_error: the latest reason, None if nothing failed.

    Raises:
        ConfigurationError: a value is out of range, or the URL is not supported.
        StoreError: the URL's database cannot be used.
    """

    def __init__(self, store: Store | str, flush_seconds: float = 0.2, capacity: int = 10_000) -> None:
        if not flush_seconds > 0:
            raise ConfigurationError(f"flush_seconds={flush_seconds!r} must be a positive number of seconds")
        if capacity < 1:
            raise ConfigurationError(f"capacity={capacity!r} must be at least 1")
        self._owns_store = isinstance(store, str)
        self._store = Store(store) if isinstance(store, str) else store
        self._flush_seconds = flush_seconds
        self._capacity = capacity
        self._closed = False
        self._start_afresh()
        _recorders.add(self)

    def _start_afresh(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # re-entrant: a signal handler may record too
        self._queue: deque[RequestRecord | Comparison] = deque()
        self._in_flight = 0  # taken from the queue, not yet settled
        self._thread: threading.Thread | None = None
        self._give_up_at: float | None = None  # set while closing
        self._hurry = False
        self._has_warned = False
        self.recorded = 0
        self.written = 0
        self.dropped = 0
        self.failed_batches = 0
        self.last_error: str | None = None

    def record(self, record: RequestRecord) -> None:
        """Queues a request. Never waits for the database and never raises."""
        self._put(record)

    def compare(self, comparison: Comparison) -> None:
        """Queues a comparison. Never waits for the database and never raises."""
        self._put(comparison)

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until everything recorded before this call is in the database.

        Args:
            timeout: the longest wait in seconds.

        Returns:
            Whether it is; False if the time ran out or something was dropped meanwhile.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            target, dropped = self.recorded, self.dropped
            self._hurry = True  # once: a database that fails is not to be tried without pause
            self._changed.notify_all()
            while self.recorded - len(self._queue) - self._in_flight < target:
                self._start_thread()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return self.dropped == dropped

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Writes what is queued, for at most `timeout` seconds, and stops. Closing twice is harmless.

        Args:
            timeout: what cannot be written within these seconds is dropped and counted.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._give_up_at = time.monotonic() + timeout
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread.is_alive():
            thread.join(timeout + 0.1)
        elif self._queue:
            self._work()  # no thread could be started
        with self._changed:
            lost = len(self._queue)
            self._drop_oldest(keep=0)
        if lost:
            self._warn(f"{lost} records could not be written before the recorder was closed")
        if self._owns_store and self._in_flight == 0:
            self._store.close()
        _recorders.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, item: RequestRecord | Comparison) -> None:
        with self._changed:
            self.recorded += 1
            if self._closed:
                self.dropped += 1
                return
            self._queue.append(item)
            self._drop_oldest(keep=self._capacity)
            self._start_thread()
            if len(self._queue) in (1, BATCH_RECORDS):
                self._changed.notify_all()

    def _drop_oldest(self, keep: int) -> None:
        while len(self._queue) > keep:
            self._queue.popleft()
            self.dropped += 1

    def _start_thread(self) -> None:
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return
        thread = threading.Thread(target=self._work, name="autospec-recorder", daemon=True)
        try:
            _drain_when_a_child_process_ends()
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # no more threads, or the interpreter is ending: close() writes the rest
            self.last_error = str(error)

    def _work(self) -> None:
        failures = 0
        while True:
            batch = self._next_batch()
            if not batch:
                return
            lost = self._write(batch)
            with self._changed:
                self._in_flight = 0
                if lost is None:
                    failures += 1
                    self._queue.extendleft(reversed(batch))
                    self._drop_oldest(keep=self._capacity if self._may_go_on() else 0)
                    if not self._queue:
                        self._changed.notify_all()
                        return
                else:
                    failures = 0
                    self.written += len(batch) - lost
                    self.dropped += lost
                self._changed.notify_all()
                if failures:
                    self._pause(min(self._flush_seconds * 2**failures, LONGEST_PAUSE_SECONDS))

    def _next_batch(self) -> list[RequestRecord | Comparison]:
        """Waits for records, lets more gather for `flush_seconds`, and takes them. Empty: the recorder is closed."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            until = time.monotonic() + self._flush_seconds
            while not self._closed and not self._hurry and len(self._queue) < BATCH_RECORDS:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch = [self._queue.popleft() for _ in range(min(BATCH_RECORDS, len(self._queue)))]
            if not self._queue:
                self._hurry = False
            self._in_flight = len(batch)
            return batch

    def _pause(self, seconds: float) -> None:
        """Waits before the next attempt; a flush that begins meanwhile ends the pause, and closing shortens it."""
        self._hurry = False
        started = time.monotonic()
        while not self._hurry:
            left = started + (min(seconds, CLOSING_PAUSE_SECONDS) if self._closed else seconds) - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _may_go_on(self) -> bool:
        return self._give_up_at is None or time.monotonic() < self._give_up_at

    def _write(self, batch: list[RequestRecord | Comparison]) -> int | None:
        """Writes a batch; how many of it can never be stored, or None if the database failed."""
        try:
            self._add(batch)
        except StoreError as error:
            self._failed(error)
            return None
        except Exception as error:  # noqa: BLE001 - one record cannot be stored: find it, keep the others
            self._failed(error)
            if len(batch) == 1:
                return 1
        else:
            return 0
        lost = 0
        for item in batch:
            one = self._write([item])
            if one is None:
                return None  # what was written already is skipped by the store next time
            lost += one
        return lost

    def _add(self, batch: list[RequestRecord | Comparison]) -> None:
        self._store.add(
            [item for item in batch if not isinstance(item, Comparison)],
            [item for item in batch if isinstance(item, Comparison)],
        )

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self.failed_batches += 1
            self.last_error = str(error) or type(error).__name__
        self._warn(self.last_error)

    def _warn(self, reason: str) -> None:
        with self._changed:
            if self._has_warned:
                return
            self._has_warned = True
        _log.warning("telemetry is not being written, decoding goes on: %s", reason)

    def _after_fork_in_child(self) -> None:
        """The parent writes what the parent recorded: the child begins with nothing, and a thread of its own."""
        self._start_afresh()


def _drain_all() -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for recorder in list(_recorders):
        recorder.close(max(0.1, deadline - time.monotonic()))


def _drain_when_a_child_process_ends() -> None:
    """multiprocessing's children end without atexit, but with these."""
    global _drained_in
    if _drained_in != os.getpid():
        _drained_in = os.getpid()
        multiprocessing.util.Finalize(None, _drain_all, exitpriority=10)


def _after_fork_in_child() -> None:
    for recorder in list(_recorders):
        recorder._after_fork_in_child()


_drained_in: int | None = None
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
atexit.register(_drain_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
