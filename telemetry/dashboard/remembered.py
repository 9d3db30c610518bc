"""What pages were made of, kept while the database is as it was; what took long is kept a little beyond that."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: str  # of the database, when it was made
    made_at: float
    seconds: float  # that making it took
    value: Any


@dataclass(slots=True)
class _Turn:
    """Of those who want one result made."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: int = 0


class Remembered:
    """Results by key.

    Args:
        most: results that are kept.
        slow_seconds: one that took longer than this is given out again for `share` times its seconds though the
            database has changed, so that live traffic and many readers cannot keep the host busy with it.
        share: see there.
        clock: seconds.
    """

    def __init__(
        self,
        most: int = 64,
        *,
        slow_seconds: float = 0.5,
        share: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._slow_seconds = slow_seconds
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._turns: dict[Hashable, _Turn] = {}

    def get(self, key: Hashable, stamp: str, make: Callable[[], T], *, exact: bool = False) -> tuple[T, str]:
        """The result, made now if need be, and the database's stamp at the time it was made.

        Args:
            key: what it is made of, besides the database.
            stamp: of the database as it is now.
            make: makes it.
            exact: never give out what was made before the database became as it is, however long making it takes: for
                what goes into something else, which is then kept as being of this stamp.
        """
        with self._making(key):  # whoever asks for it meanwhile waits, and takes what was made
            with self._lock:
                entry = self._found.get(key)
                if entry is not None and (entry.stamp == stamp or (not exact and self._may_be_older(entry))):
                    self._found.move_to_end(key)
                    return entry.value, entry.stamp
            began = self._clock()
            value = make()
            made_at = self._clock()
            with self._lock:
                self._found[key] = _Entry(stamp, made_at, made_at - began, value)
                self._found.move_to_end(key)
                while len(self._found) > self._most:
                    self._found.popitem(last=False)
            return value, stamp

    @contextmanager
    def _making(self, key: Hashable) -> Iterator[None]:
        """Lets one in at a time for each key."""
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            turn.waiting += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.waiting -= 1
                if not turn.waiting:
                    del self._turns[key]

    def _may_be_older(self, entry: _Entry) -> bool:
        return entry.seconds > self._slow_seconds and self._clock() - entry.made_at < self._share * entry.seconds
