"""The recorder: takes records without ever making the decoding thread wait, and writes them in the background.

Two threads: the first moves records from memory to the spool within a flush interval, the second from the spool to the
database. So a database that is slow, locked or away costs nothing but room in the spool.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry import codec, endings
from autospec.telemetry.backlog import Backlog
from autospec.telemetry.spool import START, Entry, decode, encode, folder_for, orphans
from autospec.telemetry.store import Store
from autospec.types import CalibrationSample, Comparison, EngineCounters, PolicyState, PolicyVersion, RequestRecord

BATCH_RECORDS = 500
LONGEST_PAUSE_SECONDS = 5.0
CLOSING_PAUSE_SECONDS = 0.1
ORPHAN_SECONDS = 60.0
SPOOL_BYTES = 256 << 20

_log = logging.getLogger("autospec.telemetry")


class Recorder:
    """Writes records to a store from background threads.

    Every `flush_seconds` what was recorded is appended to a spool file, and from there it is written to the database.
    While the database fails, it is tried again with growing pauses, and records wait in the spool, also beyond the end
    of the process: the next recorder for the same database, in any process, writes them, once. Only where no spool can
    be written do they wait in memory up to `capacity`; then the oldest are dropped and counted. What a `kill -9` loses
    is at most the last `flush_seconds`.

    Args:
        store: a store, or the URL of one (which is then opened here and closed with the recorder).
        flush_seconds: how long records gather in memory.
        capacity: how many records are kept in memory.
        spool: the folder of spools; True: `$AUTOSPEC_SPOOL`, else `autospec/spool` in the user's state folder; False:
            none. A database in memory has none.
        spool_bytes: how large this recorder's spool may grow.

    Attributes:
        written: records and comparisons known to be in the database.
        dropped: those lost: memory was full, one could not be stored, or time ran out at the end without a spool.
        spooled: those that had to wait in the spool because the database did not take them.
        replayed: those written for recorders that are gone; no part of the numbers above.
        damaged: lines of such spools that could not be read.
        failed_batches: attempts to write that failed.
        last_error: the latest reason, None if nothing failed.

    Raises:
        ConfigurationError: a value is out of range, or the URL is not supported.
        StoreError: the URL's database cannot be used.
    """

    def __init__(
        self,
        store: Store | str,
        flush_seconds: float = 0.2,
        capacity: int = 50_000,
        *,
        spool: bool | str | os.PathLike[str] = True,
        spool_bytes: int = SPOOL_BYTES,
    ) -> None:
        if not flush_seconds > 0:
            raise ConfigurationError(f"flush_seconds={flush_seconds!r} must be a positive number of seconds")
        for name, value in (("capacity", capacity), ("spool_bytes", spool_bytes)):
            if value < 1:
                raise ConfigurationError(f"{name}={value!r} must be at least 1")
        self._owns_store = isinstance(store, str)
        self._store = Store(store) if isinstance(store, str) else store
        self._flush_seconds = flush_seconds
        self._capacity = capacity
        is_spooled = spool is not False and self._store.is_lasting
        self._folder = folder_for(self._store.url, None if spool is True else Path(str(spool))) if is_spooled else None
        self._spool_bytes = spool_bytes
        self._start_afresh()
        endings.register(self)

    def _start_afresh(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # re-entrant: a signal handler may wait here, too
        self._bell: SimpleQueue[bool] = SimpleQueue()  # wakes the gatherer; True: it shall not wait for more
        self._has_rung = self._has_rung_twice = False  # a signal handler may ring in the middle of a ring
        self._queue: deque[codec.Record] = deque()
        self._backlog = Backlog(self._folder, self._spool_bytes, self._capacity)
        self._gatherer: threading.Thread | None = None
        self._writer: threading.Thread | None = None
        self._closed = False
        self._gathered_all = False
        self._has_left = False  # the writer
        self._give_up_at: float | None = None  # set while closing
        self._hurry = False
        self._warned: set[str] = set()
        self._orphans_at = 0.0
        self._steps: Generator[None, None, bool] | None = None  # of replaying orphans
        self._num_taken = 0  # from the queue
        self._num_encoding = 0  # of these, not in the backlog yet
        self._num_given_up = 0  # counted as dropped although the writer, that outlives close(), is still at them
        self._num_settled = 0
        self.written = 0
        self.dropped = 0
        self.spooled = 0
        self.replayed = 0
        self.damaged = 0
        self.failed_batches = 0
        self.last_error: str | None = None

    @property
    def recorded(self) -> int:
        """Records handed in."""
        with self._changed:
            return self._num_taken + len(self._queue)

    @property
    def waiting(self) -> int:
        """Those neither written nor dropped so far."""
        with self._changed:
            return self._num_taken + len(self._queue) - self._num_settled

    @property
    def url(self) -> str:
        """The database, as it is shown."""
        return self._store.url

    @property
    def store(self) -> Store:
        """The database. Writing to it directly waits for it."""
        return self._store

    def record(self, record: RequestRecord) -> None:
        """Queues a request. Never waits for the database and never raises."""
        self._put(record)

    def compare(self, comparison: Comparison) -> None:
        """Queues a comparison. Never waits for the database and never raises."""
        self._put(comparison)

    def note(self, item: PolicyVersion | CalibrationSample | PolicyState | EngineCounters) -> None:
        """Queues what is known besides requests. Never waits for the database and never raises."""
        self._put(item)

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
            self._wake()
            while self._num_settled < target:
                if self._has_left:
                    return False
                self._start_threads()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return self.dropped == dropped

    def secure(self, timeout: float) -> None:
        """Waits until all is safe from the end of this process: in the spool or, without one, in the database."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._wake()
            while self._queue or self._num_encoding or self._backlog.num_in_memory:
                self._start_threads()
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, CLOSING_PAUSE_SECONDS))

    def replay(self) -> bool:
        """Writes what recorders of this database that are gone have left in the spool.

        Returns:
            Whether all of it could be written; it is not lost otherwise.
        """
        steps = self._replay_steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return bool(end.value)

    def close(self, timeout: float = endings.CLOSE_SECONDS) -> None:
        """Writes what is queued, for at most `timeout` seconds, and stops. Closing twice is harmless.

        Args:
            timeout: what cannot be written within these seconds is left in the spool; without one it is dropped and
                counted. Should a write that is under way succeed after that, it is counted as written instead.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            deadline = self._give_up_at = time.monotonic() + timeout
            self._wake()
        for thread, work in ((self._gatherer, self._gather_all), (self._writer, self._write_all)):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
            elif self._queue or self._backlog:  # it could not be started
                work()
        with self._changed:
            self._gathered_all = True
            lost = len(self._queue)
            self._drop_from_queue(lost)  # the gatherer did not come to them
            dropped = self._backlog.drop(keep=0)
            self._num_given_up = self._backlog.num_in_memory
            dropped += self._num_given_up
            self._settle(dropped=dropped)
            lost, kept = lost + dropped, len(self._backlog) - self._num_given_up
            if self._writer is None or self._has_left:
                self._leave()
        if lost:
            _log.warning("%s records could not be written before the recorder was closed", lost)
        if kept:
            _log.warning("%s records wait in %s for the next recorder of this database", kept, self._folder)
        endings.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, item: codec.Record) -> None:
        """Takes no lock as long as there is room and both threads live."""
        queue = self._queue
        queue.append(item)
        gatherer, writer = self._gatherer, self._writer
        is_running = gatherer is not None and writer is not None and gatherer.is_alive() and writer.is_alive()
        if not is_running or len(queue) > self._capacity:
            with self._changed:
                self._drop_from_queue(len(queue) if self._gathered_all else len(queue) - self._capacity)
                self._start_threads()
        if not self._has_rung:
            self._has_rung = True
            self._bell.put(False)
        if len(queue) >= BATCH_RECORDS and not self._has_rung_twice:
            self._has_rung_twice = True
            self._bell.put(True)

    def _wake(self) -> None:
        self._hurry = True  # once: a database that fails is not to be tried without pause
        self._bell.put(True)
        self._changed.notify_all()

    def _drop_from_queue(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft()
            self._num_taken += 1
            self._settle(dropped=1)

    def _settle(self, *, written: int = 0, dropped: int = 0) -> None:
        self.written += written
        self.dropped += dropped
        self._num_settled += written + dropped

    def _start_threads(self) -> None:
        if self._closed:
            return
        try:
            if self._gatherer is None or not self._gatherer.is_alive():
                endings.expect_the_end_of_a_child()
                thread = threading.Thread(target=self._gather_all, name="autospec-gatherer", daemon=True)
                thread.start()
                self._gatherer = thread
            if self._writer is None or not self._writer.is_alive():
                thread = threading.Thread(target=self._write_all, name="autospec-writer", daemon=True)
                thread.start()
                self._writer = thread
        except RuntimeError as error:  # no more threads, or the interpreter is ending: close() writes the rest
            self.last_error = str(error)

    def _gather_all(self) -> None:
        """The first thread: from the queue to the backlog."""
        while True:
            self._wait_for_records()
            is_last = self._closed
            self._has_rung = self._has_rung_twice = False
            while self._queue:
                self._gather()
            with self._changed:
                self._gathered_all = is_last
                self._changed.notify_all()
            if is_last:
                return

    def _wait_for_records(self) -> None:
        """Until there are some, and then until there are many, or `flush_seconds`."""
        is_urgent = self._closed or self._bell.get()
        until = time.monotonic() + self._flush_seconds
        while not is_urgent and (left := until - time.monotonic()) > 0:
            with suppress(Empty):
                is_urgent = self._bell.get(timeout=left)

    def _gather(self) -> None:
        """Takes one batch from the queue."""
        with self._changed:
            items = [self._queue.popleft() for _ in range(min(BATCH_RECORDS, len(self._queue)))]
            self._num_taken += len(items)
            self._num_encoding = len(items)
        entries, lines, error = _encoded(items)
        with self._changed:
            self._num_encoding = 0
            self._settle(dropped=len(items) - len(entries))
            if entries:
                self._settle(dropped=self._backlog.add(entries, lines))
            if self._has_left:  # nobody writes what came too late for the spool
                self._settle(dropped=self._backlog.drop(keep=0))
            trouble = self._backlog.last_error if self._folder is not None else None
            self.last_error = trouble or self.last_error
            self._changed.notify_all()
        if error is not None:
            self._failed("record", error)
        if trouble is not None:
            self._warn("spool", trouble)

    def _write_all(self) -> None:
        """The second thread: from the backlog to the database and, when there is nothing to do, orphans."""
        failures = 0
        while self._wait_for_work():
            with self._changed:
                batch = self._backlog.peek(BATCH_RECORDS)
            if batch is None:
                self._replay_some()
                continue
            lost = self._write(batch.entries)
            with self._changed:
                if lost is None:
                    failures += 1
                    self.spooled += self._backlog.postpone()
                    if not self._may_go_on() or (self._is_all_safe() and self._closed):
                        break
                    self._pause(min(self._flush_seconds * 2**failures, LONGEST_PAUSE_SECONDS))
                else:
                    failures = 0
                    self._warned.discard("database")
                    self._backlog.settle(batch)
                    self._settle(dropped=-self._num_given_up)  # written after all
                    self._num_given_up = 0
                    self.damaged += batch.num_damaged
                    self._settle(written=len(batch.entries) - lost, dropped=lost + batch.num_damaged)
                    if self._folder is not None and self._steps is None and time.monotonic() >= self._orphans_at:
                        self._steps = self._replay_steps()
                self._changed.notify_all()
        with self._changed:
            self._has_left = True
            if self._steps is not None:
                self._steps.close()
            if self._closed:
                self._leave()
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Whether there is some; False: the recorder is closed and all is written."""
        with self._changed:
            while not self._backlog:
                if self._gathered_all:
                    return False
                self._hurry = self._hurry and bool(self._queue)
                if self._steps is not None:
                    return True
                self._changed.wait()
            return True

    def _pause(self, seconds: float) -> None:
        """Waits before the next attempt; a flush that begins meanwhile ends the pause, and closing shortens it."""
        self._hurry = False
        started = time.monotonic()
        while not self._hurry:
            left = started + (min(seconds, CLOSING_PAUSE_SECONDS) if self._closed else seconds) - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _is_all_safe(self) -> bool:
        return self._gathered_all and self._backlog.num_in_memory == 0

    def _may_go_on(self) -> bool:
        return self._give_up_at is None or time.monotonic() < self._give_up_at

    def _write(self, entries: list[Entry]) -> int | None:
        """Writes a batch; how many of it can never be stored, or None if the database failed."""
        if not entries:
            return 0
        try:
            self._store.write(entries)
        except StoreError as error:
            self._failed("database", error)
            return None
        except Exception as error:  # noqa: BLE001 - one record cannot be stored: find it, keep the others
            if len(entries) == 1:
                self._failed("record", error)
                return 1
        else:
            return 0
        half = len(entries) // 2
        lost = 0
        for part in (entries[:half], entries[half:]):
            count = self._write(part)
            if count is None:
                return None  # what was written already is skipped by the store next time
            lost += count
        return lost

    def _replay_some(self) -> None:
        """One batch of an orphan."""
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            self._orphans_at = time.monotonic() + ORPHAN_SECONDS

    def _replay_steps(self) -> Generator[None, None, bool]:
        """Writes what orphans hold, a batch at each step; at the end whether all of it could be written."""
        for orphan in orphans(self._folder) if self._folder is not None else ():
            position, num_bad = START, 0
            try:
                while position < orphan.end:
                    lines, position = orphan.read(position, BATCH_RECORDS)
                    if not lines:
                        break
                    entries = [entry for line in lines if (entry := decode(line)) is not None]
                    lost = self._write(entries)
                    if lost is None:
                        return False
                    num_bad += len(lines) - len(entries) + lost
                    with self._changed:
                        self.replayed += len(entries) - lost
                        self.damaged += len(lines) - len(entries) + lost
                    yield
                if num_bad:
                    kept = orphan.set_aside()
                    self._warn(
                        "orphan", f"{num_bad} lines of a spool could not be read or stored; it is kept as {kept}"
                    )
                else:
                    orphan.remove()
            finally:
                orphan.close()
        return True

    def _leave(self) -> None:
        """Lets go of files and store, once nobody uses them any more."""
        self._backlog.close()
        if self._owns_store:
            self._store.close()

    def _failed(self, kind: str, error: Exception) -> None:
        with self._changed:
            self.failed_batches += 1
            self.last_error = str(error) or type(error).__name__
        what = "cannot be stored" if kind == "record" else "telemetry is not being written, decoding goes on"
        self._warn(kind, f"{what}: {self.last_error}")

    def _warn(self, kind: str, text: str) -> None:
        """Once for each kind of trouble, until it is over."""
        with self._changed:
            if kind in self._warned:
                return
            self._warned.add(kind)
        _log.warning("%s", text)

    def _after_fork_in_child(self) -> None:
        """The parent writes what the parent recorded: the child begins with nothing, and threads of its own."""
        self._start_afresh()


def _encoded(items: Sequence[codec.Record]) -> tuple[list[Entry], list[bytes], Exception | None]:
    """What can be stored, as entries and as lines, and why something cannot."""
    entries: list[Entry] = []
    lines: list[bytes] = []
    failure: Exception | None = None
    for item in items:
        try:
            entry = codec.to_entry(item)
            lines.append(encode(entry))
            entries.append(entry)
        except Exception as error:  # noqa: BLE001 - anything may have been handed in
            failure = error
    return entries, lines, failure
