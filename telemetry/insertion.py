"""Writes entries, as `codec.to_entry` makes them, within a transaction.

What is there already is skipped; a policy's state takes the place of an older one of the same process.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert

from autospec.telemetry import engines, rollups
from autospec.telemetry.schema import (
    Base,
    CalibrationRow,
    ComparisonRow,
    DeploymentRow,
    HorizonRow,
    PolicyStateRow,
    PolicyVersionRow,
    RecordingRow,
    RequestRow,
    TraceRow,
    from_microseconds,
)

Entries = Sequence[Mapping[str, Any]]
Row = dict[str, Any]


def insert(connection: Connection, entries: Entries) -> None:
    """Writes all kinds of entries. Requests that are new, and only those, are added to the sums by the hour."""
    places = _insert_places(connection, entries)
    _insert_requests(connection, [entry for entry in entries if "request" in entry], places)
    _insert_if_any(connection, ComparisonRow, [dict(entry["comparison"]) for entry in entries if "comparison" in entry])
    versions = [entry["policy_version"] for entry in entries if "policy_version" in entry]
    _insert_if_any(connection, PolicyVersionRow, [_timed(row, "made_at") for row in versions])
    samples = [_placed(entry, "calibration", places) for entry in entries if "calibration" in entry]
    _insert_if_any(connection, CalibrationRow, [_timed(row, "measured_at") for row in samples])
    _insert_states(connection, [_placed(entry, "policy_state", places) for entry in entries if "policy_state" in entry])
    engines.insert(connection, [entry["engine"] for entry in entries if "engine" in entry])


def _insert_places(connection: Connection, entries: Entries) -> dict[str, int]:
    """Deployments by fingerprint, and their row ids."""
    places = {place["fingerprint"]: place for entry in entries if (place := entry.get("deployment"))}
    if not places:
        return {}
    ordered = [places[key] for key in sorted(places)]  # in one order, or two writers could deadlock
    connection.execute(_insert_new(connection, DeploymentRow), ordered)
    known = select(DeploymentRow.fingerprint, DeploymentRow.id).where(DeploymentRow.fingerprint.in_(list(places)))
    return {row[0]: row[1] for row in connection.execute(known)}


def _insert_requests(connection: Connection, entries: Entries, places: Mapping[str, int]) -> None:
    rows: dict[str, Row] = {}
    for entry in entries:
        rows.setdefault(entry["request"]["request_id"], _timed(_placed(entry, "request", places), "started_at"))
    if rows and (horizon := connection.scalar(select(HorizonRow.pruned_before))) is not None:
        rows = {name: row for name, row in rows.items() if row["started_at"] >= horizon}
    if not rows:
        return
    insert_new = _insert_new(connection, RequestRow).returning(RequestRow.request_id)
    new = list(connection.scalars(insert_new, list(rows.values())))
    rollups.add(connection, [rows[name] for name in new])
    for kind, row_type, decode in (("trace", TraceRow, _trace), ("recording", RecordingRow, _recording)):
        found: dict[str, Row] = {}
        for entry in entries:
            name = entry["request"]["request_id"]
            if kind in entry and name not in found:
                found[name] = {"request_id": name, **decode(entry[kind])}
        _insert_if_any(connection, row_type, [found[name] for name in new if name in found])


def _insert_states(connection: Connection, rows: Sequence[Row]) -> None:
    """States that are newer than what is there, or new; what they have taken over is deleted."""
    newest: dict[tuple[str, str, str], Row] = {}
    for row in sorted(rows, key=lambda row: int(row["updated_at"])):
        newest[row["family"], row["version"], row["process"]] = row
    kept = [newest[key] for key in sorted(newest)]  # in one order, or two writers could deadlock
    kept = [{**_timed(row, "updated_at"), "state": base64.b64decode(row["state"])} for row in kept]
    if kept and (horizon := connection.scalar(select(HorizonRow.pruned_before))) is not None:
        kept = [row for row in kept if row["updated_at"] >= horizon]
    if not kept:
        return
    upsert = _dialect(connection)(_table(PolicyStateRow))
    new = {name: upsert.excluded[name] for name in ("deployment_id", "policy", "updated_at", "inherited", "state")}
    is_newer = PolicyStateRow.updated_at < upsert.excluded.updated_at
    key = ("family", "version", "process")
    connection.execute(upsert.on_conflict_do_update(index_elements=key, set_=new, where=is_newer), kept)
    for row in kept:
        taken_over = [
            and_(PolicyStateRow.process == process, PolicyStateRow.updated_at <= from_microseconds(made_at))
            for process, made_at in row["inherited"].items()
        ]
        if taken_over:
            is_alike = and_(PolicyStateRow.family == row["family"], PolicyStateRow.version == row["version"])
            connection.execute(delete(PolicyStateRow).where(is_alike, or_(*taken_over)))


def _placed(entry: Mapping[str, Any], kind: str, places: Mapping[str, int]) -> Row:
    place = entry["deployment"]
    return {**entry[kind], "deployment_id": places[place["fingerprint"]] if place else None}


def _timed(row: Mapping[str, Any], name: str) -> Row:
    return {**row, name: from_microseconds(row[name])}


def _trace(trace: str) -> Row:
    return {"blocks": base64.b64decode(trace)}


def _recording(recording: Mapping[str, Any]) -> Row:
    return {
        "prompt": base64.b64decode(recording["prompt"]),
        "output": base64.b64decode(recording["output"]),
        "options": recording["options"],
    }


def _insert_if_any(connection: Connection, row_type: type[Base], rows: Sequence[Row]) -> None:
    if rows:
        connection.execute(_insert_new(connection, row_type), rows)


def _insert_new(connection: Connection, row_type: type[Base]) -> Insert:
    """An insert that skips rows that are already there."""
    statement: Insert = _dialect(connection)(_table(row_type)).on_conflict_do_nothing()
    return statement


def _dialect(connection: Connection) -> Callable[[Table], Any]:
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def _table(row_type: type[Base]) -> Table:
    table = row_type.__table__
    assert isinstance(table, Table)
    return table
