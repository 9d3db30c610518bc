"""Reads a folder of traffic in the order in which requests arrived, over all its files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from autospec.errors import AutospecError, ConfigurationError
from autospec.traffic.manifest import NAME, Manifest
from autospec.traffic.request import TrafficRequest
from autospec.traffic.shards import Frame, frames, read_frame, shard_files


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a file that could not be read."""

    file: str
    position: int  # of its first byte
    num_bytes: int
    reason: str  # `cut off` at the end of a file whose writer was killed, or while it is writing


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request is, and what decides whether and when it is given."""

    started_at: datetime
    turn: int  # later turns of a conversation have the time of its first one
    request_id: str
    rank: tuple[bool, int]  # of those with one id, the highest counts: answered, then by revision
    file: int
    position: int


class TrafficReader:
    """All requests of a folder, the first to arrive first. Damaged parts are left out and counted.

    The folder is gone through once for an index (a few hundred bytes for each request) and then read again request by
    request. Of several records with one id the completed one counts, then the highest revision.

    Args:
        folder: of the traffic.
        tokenizer: that the token ids are to be of; None takes any.

    Raises:
        ConfigurationError: it holds no traffic, traffic of another tokenizer, or of a newer autospec.
    """

    def __init__(self, folder: str | Path, tokenizer: Any | None = None) -> None:
        self.folder = Path(folder)
        found = Manifest.read(self.folder)
        if found is None:
            raise ConfigurationError(
                f"{self.folder} holds no traffic (no {NAME}): give a folder that wrap(record=...), autospec record or "
                "autospec traffic import has written to"
            )
        if tokenizer is not None:
            found.check_same(Manifest.of(tokenizer), self.folder)
        self.manifest = found
        self.num_files = 0
        self.num_superseded = 0
        self.damages: tuple[Damage, ...] = ()

    def __iter__(self) -> Iterator[TrafficRequest]:
        files = shard_files(self.folder)
        for file, positions in _runs(self._index(files)):
            with _contents(files[file]) as data:
                for position in positions:
                    content = read_frame(data, position).content
                    if content is not None:  # it was readable a moment ago
                        yield _decode(content)

    def _index(self, files: list[Path]) -> list[_Place]:
        best: dict[str, _Place] = {}
        damages: list[Damage] = []
        superseded = 0
        for number, path in enumerate(files):
            with _contents(path) as data:
                for frame in frames(data):
                    place = _place(frame, number)
                    if isinstance(place, str):
                        damages.append(Damage(path.name, frame.position, frame.num_bytes, place))
                        continue
                    earlier = best.get(place.request_id)
                    superseded += earlier is not None
                    if earlier is None or place.rank > earlier.rank:
                        best[place.request_id] = place
        self.num_files, self.num_superseded, self.damages = len(files), superseded, tuple(damages)
        return sorted(best.values(), key=lambda place: (place.started_at, place.turn, place.file, place.position))


def _runs(places: list[_Place]) -> Iterator[tuple[int, list[int]]]:
    """Neighbours in one file together, so that it is opened once for them."""
    run: list[int] = []
    file = -1
    for place in places:
        if place.file != file and run:
            yield file, run
            run = []
        file = place.file
        run.append(place.position)
    if run:
        yield file, run


def _place(frame: Frame, file: int) -> _Place | str:
    if frame.content is None:
        return frame.reason
    try:
        request = _decode(frame.content)
    except ValueError as error:
        return f"not a request ({' '.join(str(error).split()):.80})"
    rank = (not request.is_pending, request.revision)
    return _Place(request.started_at, request.turn, request.request_id, rank, file, frame.position)


def _decode(content: bytes) -> TrafficRequest:
    try:
        return TrafficRequest.from_json(json.loads(content))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@contextmanager
def _contents(path: Path) -> Iterator[memoryview]:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                yield memoryview(b"")
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                yield data
    except OSError as error:
        raise AutospecError(f"cannot read {path}: {error.strerror or type(error).__name__}") from error
