"""Hourly sums, added to in the transaction that inserts the requests: each request counts once, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, func
from sqlalchemy.dialects import postgresql, sqlite

from autospec.telemetry.schema import Base, HourlyActions, HourlyPositions, HourlyRequests
from autospec.types import split_label

Row = dict[str, Any]
MOST = frozenset(["most_memory_bytes"])
"""Columns of which the largest is kept instead of a sum."""

_COPIED = ("blocks", "num_draft_tokens", "num_judged_tokens", "num_accepted_tokens")
_PHASES = ("prefill", "draft", "verify", "correction", "emission", "other", "total")
_OF_ACTIONS = (
    *_COPIED,
    "num_committed_tokens",
    "draft_seconds",
    "verify_seconds",
    "correction_seconds",
    "emission_seconds",
)


def add(connection: Connection, requests: Sequence[Mapping[str, Any]]) -> None:
    """Adds requests, as rows of the table, to the hours they started in."""
    _upsert(connection, HourlyRequests, (_of_request(row) for row in requests))
    actions = [found for row in requests for found in _of_actions(row)]
    _upsert(connection, HourlyActions, (row for row, _ in actions))
    _upsert(connection, HourlyPositions, (position for _, positions in actions for position in positions))


def hour_of(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _of_request(row: Mapping[str, Any]) -> Row:
    seconds, tokens = row["total_seconds"], row["output_tokens"]
    predicted = row["predicted_control_seconds"]
    gain = 0.0 if predicted is None else predicted - seconds
    return {
        "hour": hour_of(row["started_at"]),
        "segment": row["segment"],
        "policy": row["policy"],
        "deployment_id": row["deployment_id"] or 0,
        "is_control": row["is_control"],
        "do_sample": row["do_sample"],
        "requests": 1,
        "failed": int(row["error"] is not None),
        "fallbacks": int(row["fallback_reason"] is not None),
        "prompt_tokens": row["prompt_tokens"],
        "output_tokens": tokens,
        "block_tokens": sum(int(length) * blocks for length, blocks in row["acceptance_lengths"].items()),
        **{name: row[name] for name in _COPIED},
        **{f"{phase}_seconds": row[f"{phase}_seconds"] for phase in _PHASES},
        "squared_seconds": seconds * seconds,
        "squared_tokens": float(tokens * tokens),
        "seconds_times_tokens": seconds * tokens,
        "predicted": int(predicted is not None),
        "predicted_control_seconds": predicted or 0.0,
        "predicted_seconds": 0.0 if predicted is None else seconds,
        "predicted_slower": int(gain < 0),
        "saved_seconds": max(0.0, gain),
        "lost_seconds": max(0.0, -gain),
        "most_memory_bytes": row["peak_memory_bytes"] or 0,
    }


def _of_actions(row: Mapping[str, Any]) -> Iterable[tuple[Row, list[Row]]]:
    hour, segment = hour_of(row["started_at"]), row["segment"]
    for label, tally in row["by_action"].items():
        source, block_length = split_label(label)
        key = {"hour": hour, "segment": segment, "source": source, "block_length": block_length}
        positions = [
            {**key, "position": position, "at_risk": at_risk, "accepted": accepted}
            for position, (at_risk, accepted) in enumerate(zip(tally["at_risk"], tally["accepted"], strict=True), 1)
        ]
        yield {**key, **{name: tally[name] for name in _OF_ACTIONS}}, positions


def _upsert(connection: Connection, row_type: type[Base], rows: Iterable[Row]) -> None:
    table = row_type.__table__
    assert isinstance(table, Table)
    key = [column.name for column in table.primary_key]
    added = [column.name for column in table.columns if not column.primary_key]
    sums: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        name = tuple(row[column] for column in key)
        known = sums.get(name)
        if known is None:
            sums[name] = dict(row)
            continue
        for column in added:
            known[column] = max(known[column], row[column]) if column in MOST else known[column] + row[column]
    if not sums:
        return
    is_postgres = connection.dialect.name == "postgresql"
    insert: Any = postgresql.insert(table) if is_postgres else sqlite.insert(table)
    largest = func.greatest if is_postgres else func.max
    changes = {
        column.name: largest(column, insert.excluded[column.name])
        if column.name in MOST
        else column + insert.excluded[column.name]
        for column in table.columns
        if column.name not in key
    }
    # in one order, or two writers could wait for each other
    connection.execute(insert.on_conflict_do_update(index_elements=key, set_=changes), [sums[n] for n in sorted(sums)])
