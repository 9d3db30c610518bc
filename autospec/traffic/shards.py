"""The files of a folder of traffic: one JSON object a line, each line a zstd frame of its own.

A file is written by one process, and only at its end. Each frame carries a checksum: one that was cut off or damaged is
found out, and the next one is found by the bytes that every frame begins with. `zstd -dc FILE` reads it, too.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl.zst"
PARTIAL_SUFFIX = SUFFIX + ".partial"
MAGIC = b"\x28\xb5\x2f\xfd"
LEVEL = 3
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Frame:
    """A part of a file: a line, or None and why it could not be read."""

    position: int  # of its first byte
    num_bytes: int
    content: bytes | None
    reason: str = ""


def new_name(*, is_partial: bool = False) -> str:
    return f"{os.getpid()}-{uuid.uuid4().hex}{PARTIAL_SUFFIX if is_partial else SUFFIX}"


def shard_files(folder: Path) -> list[Path]:
    """Those that are whole in themselves; what an import has not finished is none of them."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def folder_bytes(folder: Path) -> int:
    """What all shards take on the disk, unfinished imports with them."""
    total = 0
    for path in folder.glob(f"*{SUFFIX}*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # gone in the meantime
    return total


def encode(content: dict[str, Any]) -> bytes:
    """One frame.

    Raises:
        ValueError: a value is no JSON.
        TypeError: likewise.
    """
    import zstandard  # loaded where traffic is kept: answers are decoded without it

    line = json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(line)


def frames(data: memoryview) -> Iterator[Frame]:
    """All frames of a file one after the other; what lies between them is given as damaged."""
    position = 0
    while position < len(data):
        frame = read_frame(data, position)
        if frame.content is not None:
            yield frame
            position += frame.num_bytes
            continue
        end = _next_frame(data, position + 1)
        yield Frame(position, end - position, None, "cut off" if end == len(data) else frame.reason)
        position = end


def read_frame(data: memoryview, position: int) -> Frame:
    """The frame that begins at a place, whether or not there is one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor().decompressobj()
    parts, place = [], position
    try:
        while not decompressor.eof:
            chunk = data[place : place + CHUNK_BYTES]
            if not chunk:
                return Frame(position, place - position, None, "cut off")
            parts.append(decompressor.decompress(chunk))
            place += len(chunk)
    except zstandard.ZstdError:
        return Frame(position, 0, None, "damaged")
    return Frame(position, place - len(decompressor.unused_data) - position, b"".join(parts))


def _next_frame(data: memoryview, start: int) -> int:
    """Where the next readable frame begins; the end where there is none."""
    place = start
    while True:
        place = _find(data, place)
        if place >= len(data) or read_frame(data, place).content is not None:
            return place
        place += 1


def _find(data: memoryview, start: int) -> int:
    overlap = len(MAGIC) - 1
    for place in range(start, len(data), CHUNK_BYTES):
        found = bytes(data[place : place + CHUNK_BYTES + overlap]).find(MAGIC)
        if found >= 0:
            return place + found
    return len(data)
