"""The blocks of a request one by one, and why each was as it was, compressed: some ten bytes for each block."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from autospec.errors import ConfigurationError
from autospec.types import Action, BlockOutcome

VERSION = 2
_READABLE = (1, 2)  # the first kept only the kinds of reasons
MOST_BYTES = 16 << 20
"""Of a trace when it is unpacked; a request of a million blocks has less."""

_COUNTS = (
    "context_tokens",
    "num_draft_tokens",
    "num_judged_tokens",
    "num_accepted_tokens",
    "num_committed_tokens",
)
_SECONDS = ("draft_seconds", "verify_seconds", "correction_seconds", "emission_seconds", "catch_up_seconds")


def pack(outcomes: Sequence[BlockOutcome]) -> bytes:
    """The blocks as columns of whole numbers, seconds in microseconds, compressed."""
    actions = list(
        dict.fromkeys((each.action.source, each.action.block_length, each.action.reason) for each in outcomes)
    )
    numbers = {action: index for index, action in enumerate(actions)}
    columns: dict[str, list[int]] = {
        "action": [numbers[each.action.source, each.action.block_length, each.action.reason] for each in outcomes]
    }
    columns |= {name: [getattr(each, name) for each in outcomes] for name in _COUNTS}
    columns |= {name: [round(1e6 * getattr(each, name)) for each in outcomes] for name in _SECONDS}
    content = {"version": VERSION, "actions": actions, "columns": columns}
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode("ascii"), 6)


def unpack(data: bytes, segment: str) -> list[BlockOutcome]:
    """The blocks of a request of this segment; seconds to the microsecond.

    Raises:
        ConfigurationError: this is no trace, or one of a newer autospec.
    """
    try:
        unpacker = zlib.decompressobj()
        content = json.loads(unpacker.decompress(data, MOST_BYTES))
        if not unpacker.eof:
            raise ValueError("it is cut short")
        if content["version"] not in _READABLE:
            raise ConfigurationError(f"the trace has version {content['version']!r}: a newer autospec can read it")
        actions = [Action(source, length, reason) for source, length, reason in content["actions"]]
        columns = content["columns"]
        return [
            BlockOutcome(
                segment=segment,
                action=actions[columns["action"][index]],
                **{name: columns[name][index] for name in _COUNTS},
                **{name: columns[name][index] / 1e6 for name in _SECONDS},
            )
            for index in range(len(columns["action"]))
        ]
    except (zlib.error, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(f"this is no trace of blocks ({type(error).__name__}: {error})") from error
