"""Writes requests into files of a folder: whole frames, appended, by one process each."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

from autospec.errors import AutospecError
from autospec.forks import renew_after_fork
from autospec.traffic.request import TrafficRequest
from autospec.traffic.shards import PARTIAL_SUFFIX, SUFFIX, encode, folder_bytes, new_name

MAX_BYTES = 1 << 30
SHARD_BYTES = 64 << 20
MEASURED_EVERY = 16  # times on the way to the bound: other processes write to the folder, too


class TrafficFullError(AutospecError):
    """The folder has reached its bound."""


class ShardWriter:
    """Appends requests to a file of its own, begins the next one when it is large, and stops when the folder is full.

    Threads may share it. A forked child begins a file of its own.

    Args:
        folder: must be there.
        max_bytes: bound of all files of the folder together, about: it is looked at now and then.
        shard_bytes: size from which on the next file is begun.
        is_partial: nobody sees what is written before `publish`.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_BYTES, shard_bytes: int = SHARD_BYTES, is_partial: bool = False
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._shard_bytes = shard_bytes
        self._is_partial = is_partial
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._pid = os.getpid()
        self._descriptor = -1
        self._end = 0
        self._room = 0
        self._unmeasured: int | None = None  # bytes written since the folder was last looked at; None: not yet
        self._files: list[Path] = []

    def write(self, request: TrafficRequest) -> None:
        """Append one request; all of it is with the operating system when this returns.

        Raises:
            OSError: the disk is full, for example; the file is then as it was.
            TrafficFullError: the folder has reached its bound.
            ValueError, TypeError: the request cannot be written as JSON.
        """
        frame = encode(request.to_json())
        with self._lock:
            self._leave_the_parents_file()
            self._check_room(len(frame))
            if self._descriptor < 0 or self._end >= self._shard_bytes:
                self._begin_file()
            self._append(frame)

    def publish(self) -> None:
        """Let readers see what was written, file by file."""
        self.close()
        for path in self._files:
            path.rename(path.with_name(path.name.removesuffix(PARTIAL_SUFFIX) + SUFFIX))
        self._files = []

    def discard(self) -> None:
        """Delete what was written and not published."""
        self.close()
        for path in self._files:
            with suppress(OSError):
                path.unlink()
        self._files = []

    def close(self) -> None:
        """Close the file. A later `write` begins another one."""
        with self._lock:
            self._leave_the_parents_file()
            self._close_file()

    def _leave_the_parents_file(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._close_file()
            self._files = []

    def _check_room(self, num_bytes: int) -> None:
        if self._unmeasured is None or self._unmeasured >= self._max_bytes // MEASURED_EVERY:
            self._room = self._max_bytes - folder_bytes(self._folder)
            self._unmeasured = 0
        if num_bytes > self._room:
            self._unmeasured = None
            raise TrafficFullError(f"{self._folder} has reached its bound of {self._max_bytes} bytes")

    def _begin_file(self) -> None:
        self._close_file()
        path = self._folder / new_name(is_partial=self._is_partial)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end = 0
        if self._is_partial:
            self._files.append(path)

    def _append(self, frame: bytes) -> None:
        written = 0
        try:
            while written < len(frame):
                count = os.write(self._descriptor, frame[written:])
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += count
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(frame)
        self._room -= len(frame)
        self._unmeasured = (self._unmeasured or 0) + len(frame)

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
