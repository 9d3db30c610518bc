"""Writes entries, as `codec.to_entry` makes them, within a transaction. What is there already is skipped."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert

from autospec.telemetry import rollups
from autospec.telemetry.schema import (
    Base,
    CalibrationRow,
    ComparisonRow,
    DeploymentRow,
    HorizonRow,
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
    table = row_type.__table__
    assert isinstance(table, Table)
    dialect: Callable[[Table], Any] = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement: Insert = dialect(table).on_conflict_do_nothing()
    return statement
