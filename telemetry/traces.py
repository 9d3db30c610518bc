"""The blocks of a request one by one, and why each was as it was, compressed: some ten bytes for each block."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from autospec.errors import ConfigurationError
from autospec.types import Action, BlockOutcome

VERSION = 2
_READABLE = (1, 2)  # the first kept only the kinds of reasons
MOST_BYTES = 16 << 20
"""Of a trace when it is unpacked; a request of a million blocks has less."""
_MOST = 1 << 63  # in size, of a number in it

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
        dict.fromkeys((each.action.source, each.action.block_length, str(each.action.reason)) for each in outcomes)
    )
    numbers = {action: index for index, action in enumerate(actions)}
    columns: dict[str, list[int]] = {
        "action": [numbers[each.action.source, each.action.block_length, str(each.action.reason)] for each in outcomes]
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
        actions = [_action(*each) for each in content["actions"]]
        columns: dict[str, Any] = {
            **{name: _whole_numbers(content["columns"][name], low=0) for name in ("action", *_COUNTS)},
            **{name: _whole_numbers(content["columns"][name], low=-_MOST) for name in _SECONDS},
        }
        if len({len(column) for column in columns.values()}) != 1:
            raise ValueError("columns that differ in length")
        return [
            BlockOutcome(
                segment=segment,
                action=actions[columns["action"][index]],
                **{name: columns[name][index] for name in _COUNTS},
                **{name: columns[name][index] / 1e6 for name in _SECONDS},
            )
            for index in range(len(columns["action"]))
        ]
    except ConfigurationError:
        raise
    except (zlib.error, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigurationError(f"this is no trace of blocks ({type(error).__name__}: {error})") from error


def _action(source: object, block_length: object, reason: object) -> Action:
    if not isinstance(source, str) or not isinstance(reason, str) or type(block_length) is not int or block_length < 0:
        raise TypeError("an action is a source, a block length and a reason")
    return Action(source, block_length, reason)


def _whole_numbers(column: list[Any], low: int) -> list[int]:
    if not all(type(value) is int and low <= value <= _MOST for value in column):
        raise TypeError("columns are whole numbers")
    return column
