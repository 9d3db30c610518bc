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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry import codec, endings
from autospec.telemetry.spool import (
    HEADER,
    Entry,
    SpoolFile,
    decode,
    default_folder,
    encode,
    folder_of,
    orphans,
)
from autospec.telemetry.store import Store
from autospec.types import CalibrationSample, Comparison, PolicyVersion, RequestRecord

BATCH_RECORDS = 500
LONGEST_PAUSE_SECONDS = 5.0
CLOSING_PAUSE_SECONDS = 0.1
ORPHAN_SECONDS = 60.0
SPOOL_BYTES = 256 << 20

_log = logging.getLogger("autospec.telemetry")


@dataclass(slots=True)
class _Waiting:
    """Records that the database has not taken yet, oldest first: in the spool from `start` on, or in memory."""

    count: int
    start: int = 0
    entries: list[Entry] | None = None


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
        self._folder: Path | None = None
        if spool is not False and self._store.is_lasting:
            self._folder = folder_of(self._store.url, default_folder() if spool is True else Path(spool))
        self._spool_bytes = spool_bytes
        self._spool: SpoolFile | None = None
        self._start_afresh()
        endings.register(self)

    def _start_afresh(self) -> None:
        if self._spool is not None:  # the parent's, after a fork
            self._spool.close()
            self._spool = None
        self._changed = threading.Condition(threading.RLock())  # re-entrant: a signal handler may wait here, too
        self._bell: SimpleQueue[bool] = SimpleQueue()  # wakes the gatherer; True: it shall not wait for more
        self._has_rung = self._has_rung_twice = False  # a signal handler may ring in the middle of a ring
        self._queue: deque[codec.Record] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._num_in_flight = 0  # with the writer
        self._is_flight_spooled = False
        self._gatherer: threading.Thread | None = None
        self._writer: threading.Thread | None = None
        self._closed = False
        self._gathered_all = False
        self._give_up_at: float | None = None  # set while closing
        self._hurry = False
        self._has_warned = False
        self._orphans_at = 0.0
        self._num_taken = 0  # from the queue
        self._num_settled = 0
        self._num_counted = 0  # of those taken, counted in `spooled` or settled before
        self.written = 0
        self.dropped = 0
        self.spooled = 0
        self.replayed = 0
        self.damaged = 0
        self.failed_batches = 0
        self.last_error: str | None = None

    @property
    def recorded(self) -> int:
        """Records and comparisons handed in."""
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

    def record(self, record: RequestRecord) -> None:
        """Queues a request. Never waits for the database and never raises."""
        self._put(record)

    def compare(self, comparison: Comparison) -> None:
        """Queues a comparison. Never waits for the database and never raises."""
        self._put(comparison)

    def note(self, item: PolicyVersion | CalibrationSample) -> None:
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
                if self._closed and self._gathered_all:
                    return False
                self._start_threads()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return self.dropped == dropped

    def replay(self) -> bool:
        """Writes what recorders of this database that are gone have left in the spool.

        Returns:
            Whether nothing is left; it is not lost otherwise.
        """
        if self._folder is None:
            return True
        for orphan in orphans(self._folder):
            if not self._replay(orphan):
                orphan.close()
                return False
        return True

    def secure(self, timeout: float) -> None:
        """Waits until all is safe from the end of this process: in the spool or, without one, in the database."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._wake()
            while self._queue or self._num_at_risk():
                self._start_threads()
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, CLOSING_PAUSE_SECONDS))

    def close(self, timeout: float = endings.CLOSE_SECONDS) -> None:
        """Writes what is queued, for at most `timeout` seconds, and stops. Closing twice is harmless.

        Args:
            timeout: what cannot be written within these seconds is left in the spool; without one it is dropped and
                counted.
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
            elif self._queue or self._waiting:  # it could not be started
                work()
        with self._changed:
            self._gathered_all = True
            kept = sum(part.count for part in self._waiting if part.entries is None)
            lost = self._drop_oldest(keep=0)
            if self._queue:  # the gatherer did not come to it
                lost += len(self._queue)
                self._drop_from_queue(len(self._queue))
        if lost:
            _log.warning("%s records could not be written before the recorder was closed", lost)
        if kept:
            _log.warning("%s records wait in %s for the next recorder of this database", kept, self._folder)
        if self._owns_store and self._num_in_flight == 0:
            self._store.close()
        endings.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, item: codec.Record) -> None:
        """Takes no lock as long as there is room."""
        queue = self._queue
        queue.append(item)
        if self._writer is None or self._closed or len(queue) > self._capacity:
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

    def _drop_oldest(self, keep: int) -> int:
        """Drops of what waits in memory; how many."""
        in_memory = [part for part in self._waiting if part.entries is not None]
        excess = total = max(0, sum(part.count for part in in_memory) - keep)
        for part in in_memory:
            assert part.entries is not None
            gone = min(excess, part.count)
            del part.entries[:gone]
            part.count -= gone
            excess -= gone
        self._waiting = deque(part for part in self._waiting if part.count)
        self._settle(dropped=total)
        return total

    def _settle(self, *, written: int = 0, dropped: int = 0) -> None:
        self.written += written
        self.dropped += dropped
        self._num_settled += written + dropped

    def _num_at_risk(self) -> int:
        """Taken from the queue, but neither in the spool nor settled."""
        spooled = sum(part.count for part in self._waiting if part.entries is None)
        spooled += self._num_in_flight if self._is_flight_spooled else 0
        return self._num_taken - self._num_settled - spooled

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
        """The first thread: from the queue to the spool."""
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
        entries, error = _encoded(items)
        lines = [encode(entry) for entry in entries]
        with self._changed:
            if error is not None:
                self._failed(error)
                self._settle(dropped=len(items) - len(entries))
            if entries:
                start = self._append(lines)
                if start is None:
                    self._waiting.append(_Waiting(len(entries), entries=entries))
                    self._drop_oldest(keep=self._capacity)
                elif self._waiting and self._waiting[-1].entries is None:
                    self._waiting[-1].count += len(entries)
                else:
                    self._waiting.append(_Waiting(len(entries), start=start))
            self._changed.notify_all()

    def _append(self, lines: Sequence[bytes]) -> int | None:
        """Where the lines begin in the spool; None if there is none that could take them."""
        if self._folder is None:
            return None
        try:
            if self._spool is None:
                self._spool = SpoolFile.create(self._folder)
            if self._spool.end + sum(map(len, lines)) > self._spool_bytes:
                raise OSError(f"{self._spool.path} has reached its {self._spool_bytes} bytes")
            return self._spool.append(lines)
        except OSError as error:
            self.last_error = f"no record can be put aside in {self._folder}: {error.strerror or error}"
            return None

    def _write_all(self) -> None:
        """The second thread: from the spool, or from memory, to the database."""
        failures = 0
        while True:
            batch = self._next_batch()
            if batch is None:
                break
            part, entries, damaged, position = batch
            lost = self._write(entries)
            with self._changed:
                self._num_in_flight = 0
                if lost is None:
                    failures += 1
                    self._put_back(part, entries, damaged)
                    if not self._may_go_on() or (self._closed and self._is_all_spooled()):
                        break
                else:
                    failures = 0
                    self.damaged += damaged
                    self._settle(written=len(entries) - lost, dropped=lost + damaged)
                    if part.entries is None:
                        self._advance(part, position)
                self._changed.notify_all()
                if failures:
                    self._pause(min(self._flush_seconds * 2**failures, LONGEST_PAUSE_SECONDS))
            if not failures:
                self._replay_orphans()
        self._leave()

    def _next_batch(self) -> tuple[_Waiting, list[Entry], int, int] | None:
        """The oldest records that wait, how many of them are damaged, and where the spool goes on; None: the end."""
        with self._changed:
            while not self._waiting:
                if self._gathered_all:
                    return None
                self._hurry = self._hurry and bool(self._queue)
                self._changed.wait()
            part = self._waiting[0]
            count = min(BATCH_RECORDS, part.count)
            if part.entries is not None:
                entries, position = part.entries[:count], 0
                del part.entries[:count]
            else:
                assert self._spool is not None
                entries, position = self._read(self._spool, part.start, count)
            part.count -= count
            if not part.count:
                self._waiting.popleft()
            self._num_in_flight, self._is_flight_spooled = count, part.entries is None
            return part, entries, count - len(entries), position

    def _read(self, spool: SpoolFile, position: int, count: int) -> tuple[list[Entry], int]:
        try:
            lines, position = spool.read(position, count)
        except OSError as error:
            self.last_error = f"{spool.path} cannot be read: {error.strerror or error}"
            return [], spool.end
        return [entry for line in lines if (entry := decode(line)) is not None], position

    def _put_back(self, part: _Waiting, entries: list[Entry], damaged: int) -> None:
        """The database failed: the batch waits again, as the oldest."""
        if not part.count:
            self._waiting.appendleft(part)
        part.count += len(entries) + damaged
        if part.entries is not None:
            part.entries[:0] = entries
            self._drop_oldest(keep=self._capacity if self._may_go_on() else 0)
        waiting = self._num_taken - max(self._num_counted, self._num_settled)
        if self._spool is not None and waiting > 0:
            self.spooled += waiting
            self._num_counted = self._num_taken

    def _advance(self, part: _Waiting, position: int) -> None:
        part.start = position
        assert self._spool is not None
        if not any(other.entries is None for other in self._waiting):
            self._spool.clear()

    def _pause(self, seconds: float) -> None:
        """Waits before the next attempt; a flush that begins meanwhile ends the pause, and closing shortens it."""
        self._hurry = False
        started = time.monotonic()
        while not self._hurry:
            left = started + (min(seconds, CLOSING_PAUSE_SECONDS) if self._closed else seconds) - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _is_all_spooled(self) -> bool:
        return self._gathered_all and all(part.entries is None for part in self._waiting)

    def _may_go_on(self) -> bool:
        return self._give_up_at is None or time.monotonic() < self._give_up_at

    def _write(self, entries: list[Entry]) -> int | None:
        """Writes a batch; how many of it can never be stored, or None if the database failed."""
        if not entries:
            return 0
        try:
            self._store.write(entries)
        except StoreError as error:
            self._failed(error)
            return None
        except Exception as error:  # noqa: BLE001 - one record cannot be stored: find it, keep the others
            self._failed(error)
            if len(entries) == 1:
                return 1
        else:
            return 0
        lost = 0
        for entry in entries:
            one = self._write([entry])
            if one is None:
                return None  # what was written already is skipped by the store next time
            lost += one
        return lost

    def _replay_orphans(self) -> None:
        """Now and then."""
        if time.monotonic() >= self._orphans_at:
            self._orphans_at = time.monotonic() + ORPHAN_SECONDS
            self.replay()

    def _replay(self, orphan: SpoolFile) -> bool:
        """Whether all of it could be written."""
        position, damaged = len(HEADER), 0
        while position < orphan.end:
            if self._closed and not self._may_go_on():
                return False
            lines, position = orphan.read(position, BATCH_RECORDS)
            entries = [entry for line in lines if (entry := decode(line)) is not None]
            lost = self._write(entries)
            if lost is None:
                return False
            damaged += len(lines) - len(entries)
            with self._changed:
                self.replayed += len(entries) - lost
        if damaged:
            kept = orphan.set_aside()
            with self._changed:
                self.damaged += damaged
            self._warn(f"{damaged} lines of a spool could not be read; the others were written, the file is {kept}")
        else:
            orphan.remove()
        return True

    def _leave(self) -> None:
        """The end of the second thread: an empty spool goes, a full one stays for others."""
        with self._changed:
            if not self._closed:
                return
            spool, self._spool = self._spool, None
            if spool is not None and any(part.entries is None for part in self._waiting):
                spool.close()
            elif spool is not None:
                spool.remove()
            self._changed.notify_all()

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
        """The parent writes what the parent recorded: the child begins with nothing, and threads of its own."""
        self._start_afresh()


def _encoded(items: Sequence[codec.Record]) -> tuple[list[Entry], Exception | None]:
    """What can be stored, and why something cannot."""
    entries, failure = [], None
    for item in items:
        try:
            entries.append(codec.to_entry(item))
        except Exception as error:  # noqa: BLE001 - anything may have been handed in
            failure = error
    return entries, failure
