"""The spool: files that keep records until the database has taken them, also across a crash.

One file per recorder and process, appended to, its lines checksummed. Its writer holds a lock on it (`flock`) that ends
with the process, however that ends: a file without such a lock is an orphan, and whoever writes to the same database
next replays it. Replaying twice is harmless, since the store knows each record by its key.

Nothing is synced to the disk: a process may die at any time, but a machine that loses power may lose the last seconds,
as it may with SQLite in WAL mode.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
import uuid
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADER = b"autospec-spool 1\n"
START = len(HEADER)
"""Where the first line is."""

SUFFIX = ".spool"
NEW_SUFFIX = ".new"
DAMAGED_SUFFIX = ".damaged"
CHUNK_BYTES = 1 << 20
UNFINISHED_SECONDS = 60.0

Entry = dict[str, Any]
"""A record as `telemetry/codec.py` makes it: plain JSON values."""


def default_folder() -> Path:
    """`$AUTOSPEC_SPOOL`, else `autospec/spool` in `$XDG_STATE_HOME` or `~/.local/state`."""
    if given := os.environ.get("AUTOSPEC_SPOOL"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "autospec" / "spool"


def folder_for(url: str, parent: Path | None = None) -> Path | None:
    """Where records for one database wait.

    Args:
        url: as it is shown, passwords hidden. A file is one of this host.
        parent: the folder of all spools; the default one if None.

    Returns:
        An absolute path; None where the user has no home.
    """
    try:
        parent = (parent or default_folder()).absolute()
    except (RuntimeError, OSError):
        return None
    name = f"{socket.gethostname()} {url}" if url.startswith("sqlite") else url
    return parent / hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def encode(entry: Entry) -> bytes:
    """One line."""
    text = json.dumps(entry, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> Entry | None:
    """The entry of a line without its end; None where the line is damaged."""
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


class SpoolFile:
    """A spool file that this process holds the lock of.

    Args:
        path: of the file.
        descriptor: open for reading and appending, locked.
        end: where the next line begins.
    """

    def __init__(self, path: Path, descriptor: int, end: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.end = end
        _open.add(self)

    @classmethod
    def create(cls, folder: Path) -> SpoolFile:
        """A new, empty file, which nobody sees before it is locked.

        Raises:
            OSError: it cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex}{SUFFIX}"
        unseen = path.with_suffix(NEW_SUFFIX)
        descriptor = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        spool = cls(path, descriptor, 0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            spool._write(HEADER)
            os.rename(unseen, path)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(unseen)
            raise
        return spool

    @classmethod
    def adopt(cls, path: Path) -> SpoolFile | None:
        """An orphan, now locked; None if its writer lives, or somebody else was faster, or it cannot be opened."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            is_ours = status.st_nlink > 0 and os.pread(descriptor, len(HEADER), 0) == HEADER
        except OSError:
            is_ours = False
        if not is_ours:
            os.close(descriptor)
            return None
        return cls(path, descriptor, status.st_size)

    @property
    def is_empty(self) -> bool:
        return self.end <= START

    def append(self, lines: Sequence[bytes]) -> int:
        """Appends all lines or none; where the first of them begins.

        Raises:
            OSError: the disk is full, for example; the file is then as it was.
        """
        start = self.end
        self._write(b"".join(lines))
        return start

    def read(self, position: int, limit: int) -> tuple[list[bytes], int]:
        """Up to `limit` whole lines from `position` on, and where the next one begins.

        A line that was cut short at the end of the file is given, too: without its end, it is damaged.
        """
        lines: list[bytes] = []
        rest = b""
        place = position
        while len(lines) < limit and place < self.end:
            data = os.pread(self._descriptor, min(CHUNK_BYTES, self.end - place), place)
            if not data:
                break
            place += len(data)
            *whole, rest = (rest + data).split(b"\n")
            lines += whole
        if rest and place >= self.end and len(lines) < limit:
            lines.append(rest)
        lines = lines[:limit]
        return lines, min(position + sum(len(line) + 1 for line in lines), self.end)

    def clear(self) -> None:
        """Empties it. Where that fails, what is in it will be written a second time, which is harmless."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, START)
            self.end = START

    def remove(self) -> None:
        """Deletes it and gives up the lock."""
        with suppress(OSError):
            os.unlink(self.path)
        self.close()

    def set_aside(self) -> Path:
        """Keeps it under a name that is not replayed, for somebody to look at, and gives up the lock."""
        kept = self.path.with_suffix(DAMAGED_SUFFIX)
        with suppress(OSError):
            os.rename(self.path, kept)
        self.close()
        return kept

    def close(self) -> None:
        """Gives up the lock and leaves the file to whoever comes next. In a forked child: only the child's handle."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                count = os.write(self._descriptor, data[written:])
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += count
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.end)
            raise
        self.end += len(data)


def orphans(folder: Path) -> Iterator[SpoolFile]:
    """The files of the folder whose writers are gone, each locked for the caller to replay. Unfinished ones go."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(NEW_SUFFIX):
            _remove_if_old(folder / name)
        elif name.endswith(SUFFIX) and (orphan := SpoolFile.adopt(folder / name)) is not None:
            if orphan.is_empty:
                orphan.remove()
            else:
                yield orphan


def _remove_if_old(path: Path) -> None:
    """A file that was never finished holds nothing; one a minute old is nobody's."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS:
            path.unlink()


def _close_all_in_child() -> None:
    """A child that kept a descriptor would keep the lock, too, when the parent is long gone."""
    for spool in list(_open):
        spool.close()


_open: weakref.WeakSet[SpoolFile] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)
