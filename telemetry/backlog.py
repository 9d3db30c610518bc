"""What the database has not taken yet, oldest first: in spool files as far as they can be written, else in memory.

Nothing here is thread-safe: the recorder holds its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autospec.telemetry.spool import Entry, SpoolFile, decode

ROTATE_BYTES = 8 << 20
"""A spool file longer than this is followed by another one, so that what the database has taken is deleted."""


@dataclass(slots=True)
class _Part:
    """Records that lie together, in a file or in memory."""

    count: int
    spool: SpoolFile | None = None
    start: int = 0  # in the file
    end: int = 0
    entries: list[Entry] | None = None
    num_reported: int = 0  # of these, counted as having waited in the spool


@dataclass(frozen=True, slots=True)
class Batch:
    """The oldest records. They stay in the backlog until they are settled."""

    entries: list[Entry]
    count: int  # damaged ones included
    position: int  # where the file goes on

    @property
    def num_damaged(self) -> int:
        return self.count - len(self.entries)


class Backlog:
    """A queue of records on their way to the database.

    Args:
        folder: of spool files; None: everything waits in memory.
        most_bytes: how much may wait in spool files.
        capacity: how many records may wait in memory.

    Attributes:
        last_error: why records wait in memory although there is a folder.
    """

    def __init__(self, folder: Path | None, most_bytes: int, capacity: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._capacity = capacity
        self._parts: deque[_Part] = deque()
        self._current: SpoolFile | None = None
        self._num_peeked = 0  # of the first part
        self.last_error: str | None = None

    def __len__(self) -> int:
        return sum(part.count for part in self._parts)

    @property
    def num_in_memory(self) -> int:
        return sum(part.count for part in self._parts if part.spool is None)

    def add(self, entries: list[Entry], lines: Sequence[bytes]) -> int:
        """Takes records in. Returns: how many of the oldest in memory had to be dropped."""
        last = self._parts[-1] if self._parts else None
        spool = self._append(lines)
        if spool is None:
            self._parts.append(_Part(len(entries), entries=list(entries)))
            return self.drop(keep=self._capacity)
        if last is not None and last.spool is spool:
            last.count += len(entries)
            last.end = spool.end
        else:
            start = spool.end - sum(map(len, lines))
            self._parts.append(_Part(len(entries), spool, start, spool.end))
        return 0

    def peek(self, limit: int) -> Batch | None:
        """The oldest records, `limit` at most; None when there are none."""
        if not self._parts:
            return None
        part = self._parts[0]
        self._num_peeked = count = min(limit, part.count)
        if part.entries is not None:
            return Batch(part.entries[:count], count, 0)
        assert part.spool is not None
        try:
            lines, position = part.spool.read(part.start, count)
        except OSError as error:
            self.last_error = f"{part.spool.path} cannot be read: {error.strerror or error}"
            lines, position = [], part.end
        return Batch([entry for line in lines if (entry := decode(line)) is not None], count, position)

    def settle(self, batch: Batch) -> None:
        """Forgets the batch that was peeked at last: it is written, or never can be."""
        part = self._parts[0]
        part.count -= batch.count
        part.num_reported = max(0, part.num_reported - batch.count)
        part.start = batch.position
        self._num_peeked = 0
        if part.entries is not None:
            del part.entries[: batch.count]
        if not part.count:
            self._parts.popleft()
            self._clean(part.spool)

    def postpone(self) -> int:
        """The batch waits on. Returns: how many records wait in the spool that were not reported so before."""
        self._num_peeked = 0
        new = 0
        for part in self._parts:
            if part.spool is not None:
                new += part.count - part.num_reported
                part.num_reported = part.count
        return new

    def drop(self, keep: int) -> int:
        """Drops the oldest records in memory beyond `keep`, but for those just peeked at. Returns: how many."""
        excess = total = max(0, self.num_in_memory - keep)
        for index, part in enumerate(self._parts):
            if part.entries is None or not excess:
                continue
            first = self._num_peeked if index == 0 else 0
            gone = min(excess, part.count - first)
            del part.entries[first : first + gone]
            part.count -= gone
            excess -= gone
        self._parts = deque(part for part in self._parts if part.count)
        return total - excess

    def close(self) -> None:
        """Leaves what waits in files to others, and deletes the files of which nothing waits."""
        spools = {id(part.spool): part.spool for part in self._parts if part.spool is not None}
        for spool in spools.values():
            spool.close()
        if self._current is not None and id(self._current) not in spools:
            self._current.remove()
        self._current = None

    def _append(self, lines: Sequence[bytes]) -> SpoolFile | None:
        """The file that the lines are in; None if there is none that could take them."""
        if self._folder is None:
            return None
        try:
            if self._current is None or self._current.end > ROTATE_BYTES:
                self._current = SpoolFile.create(self._folder)
            waiting = sum(part.end - part.start for part in self._parts)
            if waiting + sum(map(len, lines)) > self._most_bytes:
                raise OSError(f"{self._most_bytes} bytes wait there already")
            self._current.append(lines)
        except OSError as error:
            self.last_error = f"no record can be put aside in {self._folder}: {error.strerror or error}"
            return None
        self.last_error = None
        return self._current

    def _clean(self, spool: SpoolFile | None) -> None:
        if spool is None or any(part.spool is spool for part in self._parts):
            return
        if spool is self._current:
            spool.clear()
        else:
            spool.remove()
