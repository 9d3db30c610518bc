"""Traffic that a wrapped model leaves in a folder: `autospec.wrap(..., record=Traffic("traffic/"))`."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autospec.errors import ConfigurationError
from autospec.forks import renew_after_fork
from autospec.notices import warn
from autospec.traffic.manifest import Manifest, open_folder
from autospec.traffic.request import TrafficRequest
from autospec.traffic.writer import MAX_BYTES, SHARD_BYTES, ShardWriter, TrafficFullError

Redact = Callable[[list[int], list[int]], tuple[Sequence[int], Sequence[int]] | None]
"""Takes prompt and answer, gives what may be kept of them; None: nothing."""


class Traffic:
    """Records requests into a folder, and never costs an answer: what cannot be written is counted and warned of once.

    Args:
        folder: for the files, made if missing; several processes may write to it.
        redact: takes prompt and answer as lists of token ids and gives what may be kept of them, None for nothing.
            When it fails, nothing of the request is kept.
        share: of the requests, chosen at random, that are recorded.
        max_bytes: bound of the folder, about. Nothing more is recorded once it is reached.
        shard_bytes: size from which on the next file is begun.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        redact: Redact | None = None,
        share: float = 1.0,
        max_bytes: int = MAX_BYTES,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if not isinstance(folder, (str, Path)) or not str(folder).strip():
            raise ConfigurationError(f"Traffic({folder!r}): the path of a folder is needed")
        if redact is not None and not callable(redact):
            raise ConfigurationError(f"redact={redact!r:.80}: a function of prompt and answer, or None, is needed")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ConfigurationError(f"share={share!r}: a number from 0 to 1 is needed")
        for name, value in (("max_bytes", max_bytes), ("shard_bytes", shard_bytes)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name}={value!r}: a whole number from 1 up is needed")
        self.folder = Path(folder).expanduser()
        self.redact = redact
        self.share = share
        self.manifest: Manifest | None = None
        self.written = 0
        self.failed = 0  # could not be written, or came after the bound was reached
        self.last_error: str | None = None
        self._writer = ShardWriter(self.folder, max_bytes=max_bytes, shard_bytes=shard_bytes)
        self._random = random.Random()  # of our own: the user's global one is not moved
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the counts
        renew_after_fork(self)
        self._is_full = False
        self._has_warned = False

    def belong_to(self, tokenizer: Any, target: str | None = None) -> None:
        """Token ids of this tokenizer will be written: make the folder, or check that it holds such.

        Raises:
            ConfigurationError: it holds traffic of another tokenizer, or is no folder.
            AutospecError: it cannot be written.
        """
        self.manifest = open_folder(self.folder, Manifest.of(tokenizer, target))

    def takes_next(self) -> bool:
        """Is the next request one of the share that is recorded?"""
        if self._pid != os.getpid():  # children of one parent would all choose alike
            self._pid = os.getpid()
            self._random = random.Random()
        return not self._is_full and (self.share >= 1 or self._random.random() < self.share)

    def write(self, request: TrafficRequest) -> None:
        """Record a request. Raises nothing."""
        try:
            self._writer.write(request)
        except Exception as error:  # noqa: BLE001  # the answer is there, whatever the disk says
            self._is_full = self._is_full or isinstance(error, TrafficFullError)
            self.fail(error)
        else:
            with self._lock:
                self.written += 1

    def fail(self, error: Exception) -> None:
        """Count a request that could not be recorded; the first one is warned of."""
        name = "" if isinstance(error, TrafficFullError) else f"{type(error).__name__}: "
        with self._lock:
            self.failed += 1
            self.last_error = f"{name}{error}"
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            rest = "nothing more is recorded" if self._is_full else "requests are answered, but not recorded"
            warn(f"traffic: {self.last_error}: {rest}", stacklevel=3)

    def close(self) -> None:
        """Close the file. What is recorded later goes into another one."""
        self._writer.close()
