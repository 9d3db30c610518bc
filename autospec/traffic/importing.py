"""From a file that people already have to a folder of traffic, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from autospec.errors import AutospecError, ConfigurationError
from autospec.traffic.importers import BrokenEntryError, ImportedRequest, Importer, detect, importer_named
from autospec.traffic.importers.detect import LOOKED_AT
from autospec.traffic.manifest import Manifest, check_folder, open_folder
from autospec.traffic.request import FollowUp, TrafficRequest
from autospec.traffic.tokenising import output_ids, prompt_ids
from autospec.traffic.writer import MAX_BYTES, ShardWriter

SHOWN_BROKEN = 10
DEFAULT_SEGMENT = "default"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a file, or one element of its array."""

    number: int  # from 1 on
    raw: bytes
    content: dict[str, Any] | None
    reason: str = ""  # why there is no content


@dataclass(frozen=True, slots=True)
class Broken:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did."""

    format: str
    entries: int
    requests: int
    pending: int  # of the requests, those without an answer
    num_broken: int
    broken: tuple[Broken, ...]  # the first ten


def import_file(
    path: Path,
    folder: Path,
    tokenizer: Any,
    *,
    target: str | None = None,
    format: str = "auto",  # noqa: A002
    tolerate: float = 0.01,
    segment: str | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[int], Any] = lambda count: None,
) -> Imported:
    """Add the requests of a file to a folder of traffic; nothing is added when it is refused.

    A request's id follows from the file's bytes: the same file again changes nothing that is read.

    Args:
        path: JSON Lines, or one JSON array, in UTF-8.
        folder: made if missing.
        tokenizer: the target's.
        target: name of the model that the traffic is for.
        format: one of `IMPORTERS` by name; `auto` looks at the first entries.
        tolerate: share of the entries that may be broken.
        segment: of requests whose entry names none.
        max_bytes: bound of the folder.
        progress: told how many bytes of the file were read since it was last told.

    Raises:
        ConfigurationError: the file or the folder cannot be used, or too much of the file is broken.
        AutospecError: the folder cannot be written, or has reached its bound.
    """
    importer = importer_named(format) if format != "auto" else _detected(path)
    wanted = Manifest.of(tokenizer, target)
    check_folder(folder, wanted)
    was_there = folder.exists()
    writer = ShardWriter(folder, max_bytes=max_bytes, is_partial=True)
    started_at = datetime.now(UTC)
    entries = requests = pending = 0
    broken: list[Broken] = []
    num_broken = 0
    try:
        for entry in read_entries(path):
            entries += 1
            try:
                made = _requests(entry, importer, tokenizer, segment, started_at + timedelta(microseconds=requests))
            except BrokenEntryError as error:
                num_broken += 1
                if len(broken) < SHOWN_BROKEN:
                    broken.append(Broken(entry.number, str(error)))
                made = []
            for request in made:
                writer.write(request)
                requests += 1
                pending += request.is_pending
            progress(len(entry.raw) + 1)
        if num_broken > tolerate * entries or not requests:
            raise ConfigurationError(_refusal(path, entries, num_broken, tolerate, broken))
        open_folder(folder, wanted)
        writer.publish()
    except OSError as error:
        _undo(writer, folder, was_there=was_there)
        raise AutospecError(f"cannot write to {folder}: {error.strerror or type(error).__name__}") from error
    except BaseException:
        _undo(writer, folder, was_there=was_there)
        raise
    return Imported(importer.name, entries, requests, pending, num_broken, tuple(broken))


def _undo(writer: ShardWriter, folder: Path, *, was_there: bool) -> None:
    writer.discard()
    if not was_there:
        with suppress(OSError):  # somebody else has put something into it
            folder.rmdir()


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a file of JSON Lines, or of one JSON array; blank lines are left out.

    Raises:
        ConfigurationError: it cannot be read, or is an array that is no JSON.
    """
    try:
        with path.open("rb") as file:
            if file.read(3) != b"\xef\xbb\xbf":  # a byte order mark
                file.seek(0)
            start = file.tell()
            first = file.readline()
            while first and not first.strip():
                first = file.readline()
            if first.lstrip().startswith(b"["):
                file.seek(start)
                yield from _array(path, file.read())
                return
            file.seek(start)
            for number, line in enumerate(file, start=1):
                if raw := line.strip():
                    yield _entry(number, raw)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from error


def _array(path: Path, data: bytes) -> Iterator[Entry]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON ({error})") from error
    for number, value in enumerate(values, start=1):
        raw = json.dumps(value, sort_keys=True).encode("ascii")
        reason = "" if isinstance(value, dict) else "not an object"
        yield Entry(number, raw, value if isinstance(value, dict) else None, reason)


def _entry(number: int, raw: bytes) -> Entry:
    try:
        value = json.loads(raw)
    except UnicodeDecodeError as error:
        return Entry(number, raw, None, f"byte 0x{raw[error.start]:02x} is not UTF-8")
    except (ValueError, RecursionError) as error:
        return Entry(number, raw, None, f"not JSON ({error})")
    if not isinstance(value, dict):
        return Entry(number, raw, None, "not an object")
    return Entry(number, raw, value)


def _detected(path: Path) -> Importer:
    first = (entry.content for entry in read_entries(path) if entry.content is not None)
    try:
        return detect(list(islice(first, LOOKED_AT)))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _requests(
    entry: Entry, importer: Importer, tokenizer: Any, segment: str | None, order: datetime
) -> list[TrafficRequest]:
    if entry.content is None:
        raise BrokenEntryError(entry.reason)
    return [
        _request(each, tokenizer, _id(entry, index), f"import:{importer.name}", segment, order)
        for index, each in enumerate(importer.read(entry.content))
    ]


def _request(
    found: ImportedRequest, tokenizer: Any, request_id: str, origin: str, segment: str | None, order: datetime
) -> TrafficRequest:
    return TrafficRequest(
        request_id=request_id,
        started_at=found.started_at or order,
        segment=found.segment or segment or DEFAULT_SEGMENT,
        prompt=prompt_ids(tokenizer, found),
        output=output_ids(tokenizer, found),
        options=found.options,
        total_seconds=found.total_seconds,
        seconds=found.seconds,
        acceptance_lengths=found.acceptance_lengths,
        num_draft_tokens=found.num_draft_tokens,
        conversation=found.conversation,
        origin=origin,
        is_arrival_known=found.started_at is not None,
        follow_up=FollowUp(found.messages, found.later_turns) if found.later_turns else None,
    )


def _id(entry: Entry, index: int) -> str:
    return hashlib.blake2b(b"%d %d " % (entry.number, index) + entry.raw, digest_size=16).hexdigest()


def _refusal(path: Path, entries: int, num_broken: int, tolerate: float, broken: list[Broken]) -> str:
    if not entries:
        return f"{path}: nothing in it; nothing is written"
    shown = "; ".join(f"line {each.number}: {each.reason}" for each in broken)
    more = f"; and {num_broken - len(broken)} more" if num_broken > len(broken) else ""
    return (
        f"{path}: {num_broken} of {entries} lines are broken, at most a share of {tolerate:g} is tolerated "
        f"(--tolerate); nothing is written; {shown}{more}"
    )
