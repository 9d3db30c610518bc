"""Everything in a database as records that another one can take: merging, exporting, importing."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, func, literal, select, tuple_

from autospec.errors import ConfigurationError
from autospec.telemetry.schema import (
    Base,
    CalibrationRow,
    ComparisonRow,
    DeploymentRow,
    EngineRow,
    HourlyRequests,
    PolicyStateRow,
    PolicyVersionRow,
    RecordingRow,
    RequestRow,
    TraceRow,
    to_microseconds,
)
from autospec.telemetry.spool import Entry
from autospec.telemetry.store import Store

PAGE_ROWS = 2_000
PAGE_STATES = 20  # of policies: one may have megabytes
KINDS = {
    "request": "requests",
    "comparison": "comparisons",
    "policy_version": "policy_versions",
    "calibration": "calibration_samples",
    "policy_state": "policy_states",
    "engine": "engine_counters",
}
"""Kinds of entries, and the names of their tables and files."""

FORMATS = ("parquet", "csv")
_PLACE = "deployment"
_TRACE = "trace"
_RECORDING = "recording"
_JSON_COLUMNS = {
    "request": ("acceptance_lengths", "at_risk", "accepted", "actions", "by_action", "decisions"),
    "comparison": (),
    "policy_version": ("settings",),
    "calibration": (),
    "policy_state": ("inherited",),
    "engine": ("accepted",),
}
_PLACED = ("request", "calibration", "policy_state")
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError)  # JSON or a time that is none
_TIMES = ("started_at", "made_at", "measured_at", "updated_at", "scraped_at", "began_at", "hour")

_log = logging.getLogger("autospec.telemetry")

Progress = Callable[[int], object]


def entries(store: Store) -> Iterator[list[Entry]]:
    """All that is stored, in batches, read in short transactions. Sums by the hour follow from it and are not in it.

    A row that is damaged is left out, which the log says.

    Raises:
        StoreError: the database cannot be read.
    """
    for kind, row_type, key in (
        ("policy_version", PolicyVersionRow, ("version",)),
        ("calibration", CalibrationRow, ("id",)),
        ("policy_state", PolicyStateRow, ("family", "version", "process")),
        ("engine", EngineRow, ("engine", "target", "began_at", "hour")),
        ("request", RequestRow, ("id",)),
        ("comparison", ComparisonRow, ("id",)),
    ):
        last: Any = None
        while True:
            with store.reading() as connection:
                rows, last = _rows(connection, row_type, key, _page(kind), last)
                places = _places(connection, rows)
                traces, recordings = _belongings(connection, rows) if kind == "request" else ({}, {})
            if last is None:
                break
            if rows:
                yield [_entry(kind, row, places, traces, recordings) for row in rows]


def num_entries(store: Store) -> int:
    """How many there are."""
    with store.reading() as connection:
        return sum(connection.scalar(select(func.count()).select_from(row_type)) or 0 for row_type in _TABLES)


def num_pruned(store: Store) -> int:
    """Requests that are only left in the sums by the hour."""
    with store.reading() as connection:
        summed = connection.scalar(select(func.sum(HourlyRequests.requests))) or 0
        return int(summed) - (connection.scalar(select(func.count()).select_from(RequestRow)) or 0)


def merge(target: Store, source: Store, progress: Progress | None = None) -> int:
    """Writes everything of one database into another; what is there already stays as it is.

    Returns:
        How many entries were read.
    """
    total = 0
    for batch in entries(source):
        target.write(batch)
        total += len(batch)
        if progress is not None:
            progress(len(batch))
    return total


def export(
    store: Store, folder: Path, file_format: str, progress: Progress | None = None, *, recordings: bool = True
) -> dict[str, int]:
    """One file for each kind of entry: `requests.parquet` or `requests.csv`, and so on.

    Times are microseconds since 1970 in UTC; nested values, and the deployment of a request, are JSON. Without
    `recordings` no prompt and no answer is in the files.

    Returns:
        File name to number of rows.

    Raises:
        ConfigurationError: the format is unknown, its library is missing, or files are there already.
    """
    if file_format not in FORMATS:
        raise ConfigurationError(f"format {file_format!r}: known are {', '.join(FORMATS)}")
    folder.mkdir(parents=True, exist_ok=True)
    names = {kind: folder / f"{table}.{file_format}" for kind, table in KINDS.items()}
    if there := [str(path) for path in names.values() if path.exists()]:
        raise ConfigurationError(f"{', '.join(there)}: already there; give another folder")
    writers = {kind: _WRITERS[file_format](path) for kind, path in names.items()}
    counts = dict.fromkeys(KINDS, 0)
    try:
        for batch in entries(store):
            kind = _kind_of(batch[0])
            if not recordings:
                batch = [_without(entry, _RECORDING) for entry in batch]
            writers[kind].write([_flat(kind, entry) for entry in batch])
            counts[kind] += len(batch)
            if progress is not None:
                progress(len(batch))
    finally:
        for writer in writers.values():
            writer.close()
    return {names[kind].name: count for kind, count in counts.items() if count}


def read_export(folder: Path) -> Iterator[list[Entry]]:
    """The entries of an exported folder.

    Raises:
        ConfigurationError: there is nothing in it, or a file is not one of ours.
    """
    found = [
        (kind, path)
        for kind, table in KINDS.items()
        for path in (folder / f"{table}.{file_format}" for file_format in FORMATS)
        if path.exists()
    ]
    if not found:
        expected = ", ".join(f"{table}.parquet or .csv" for table in KINDS.values())
        raise ConfigurationError(f"{folder} holds no export: expected are {expected}")
    for kind, path in found:
        try:
            for rows in _READERS[path.suffix[1:]](path, _page(kind)):
                batch = [_unflat(kind, row) for row in rows]
                if any(entry[kind].keys() != _columns(kind) for entry in batch):
                    raise ValueError("other columns")
                yield batch
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{path} is no export of this autospec, or was changed ({type(error).__name__}: {error}): export again"
            ) from error


def _page(kind: str) -> int:
    return PAGE_STATES if kind == "policy_state" else PAGE_ROWS


def _rows(
    connection: Connection, row_type: type[Base], key: Sequence[str], limit: int, last: Any = None
) -> tuple[list[dict[str, Any]], Any]:
    """Those after the key `last` that can be read, and the key of the last one looked at; None: there are no more."""
    table = row_type.__table__
    assert isinstance(table, Table)
    columns = [table.c[name] for name in key]
    keys = select(*columns).order_by(*columns).limit(limit)
    if last is not None:
        keys = keys.where(tuple_(*columns) > _bound(columns, last))
    found = [tuple(row) for row in connection.execute(keys)]
    if not found:
        return [], None
    query = select(table).order_by(*columns)
    try:
        page = query.where(
            tuple_(*columns) >= _bound(columns, found[0]), tuple_(*columns) <= _bound(columns, found[-1])
        )
        return [dict(row) for row in connection.execute(page).mappings()], found[-1]
    except _UNREADABLE:
        pass
    rows = []
    for each in found:
        try:
            rows += [
                dict(row)
                for row in connection.execute(query.where(tuple_(*columns) == _bound(columns, each))).mappings()
            ]
        except _UNREADABLE as error:
            _log.warning("%s %s cannot be read and is left out: %s", table.name, ", ".join(map(str, each)), error)
    return rows, found[-1]


def _bound(columns: Sequence[Any], values: Sequence[Any]) -> Any:
    """A key as the database has it: times are numbers there."""
    return tuple_(*(literal(value, column.type) for column, value in zip(columns, values, strict=True)))


def _places(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> dict[int, Entry]:
    """The deployments of rows, by id."""
    ids = sorted({row["deployment_id"] for row in rows if row.get("deployment_id") is not None})
    query = select(DeploymentRow.__table__).where(DeploymentRow.id.in_(ids))
    found = [dict(row) for row in connection.execute(query).mappings()] if ids else []
    return {row["id"]: _without(row, "id") for row in found}


def _belongings(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, Entry]]:
    """Traces and recorded tokens of requests, by their names."""
    names = [row["request_id"] for row in rows]
    traces = select(TraceRow.request_id, TraceRow.blocks).where(TraceRow.request_id.in_(names))
    tokens = select(RecordingRow.__table__).where(RecordingRow.request_id.in_(names))
    return (
        {name: _text(blocks) for name, blocks in connection.execute(traces)},
        {
            row.request_id: {"prompt": _text(row.prompt), "output": _text(row.output), "options": row.options}
            for row in connection.execute(tokens)
        },
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _entry(
    kind: str,
    row: dict[str, Any],
    places: Mapping[int, Entry],
    traces: Mapping[str, str],
    recordings: Mapping[str, Entry],
) -> Entry:
    values = {
        name: to_microseconds(value) if name in _TIMES else value
        for name, value in row.items()
        if name not in ("id", "deployment_id")
    }
    entry: Entry = {kind: values}
    if "deployment_id" in row:
        entry[_PLACE] = None if row["deployment_id"] is None else places[row["deployment_id"]]
    if kind == "policy_state":
        values["state"] = _text(row["state"])
    if kind == "request":
        values["by_action"] = values["by_action"] or {}
        values["decisions"] = values["decisions"] or {}
        if row["request_id"] in traces:
            entry[_TRACE] = traces[row["request_id"]]
        if row["request_id"] in recordings:
            entry[_RECORDING] = recordings[row["request_id"]]
    return entry


def _kind_of(entry: Entry) -> str:
    return next(kind for kind in KINDS if kind in entry)


def _flat(kind: str, entry: Entry) -> dict[str, Any]:
    row = dict(entry[kind])
    for name in _JSON_COLUMNS[kind]:
        row[name] = json.dumps(row[name])
    if kind in _PLACED:
        row[_PLACE] = json.dumps(entry[_PLACE])
    if kind == "request":
        row[_TRACE] = entry.get(_TRACE)
        row[_RECORDING] = json.dumps(entry[_RECORDING]) if _RECORDING in entry else None
    return row


def _unflat(kind: str, row: dict[str, Any]) -> Entry:
    values = dict(row)
    entry: Entry = {}
    if kind in _PLACED:
        entry[_PLACE] = json.loads(values.pop(_PLACE))
    if kind == "request" and (trace := values.pop(_TRACE)) is not None:
        entry[_TRACE] = trace
    if kind == "request" and (recording := values.pop(_RECORDING)) is not None:
        entry[_RECORDING] = json.loads(recording)
    for name in _JSON_COLUMNS[kind]:
        values[name] = json.loads(values[name])
    return {kind: values, **entry}


def _columns(kind: str) -> set[str]:
    """Those of an entry."""
    table = dict(zip(KINDS, _TABLES, strict=True))[kind].__table__
    return {column.name for column in table.columns} - {"id", "deployment_id"}


def _without(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


class _CsvWriter:
    """Text keeps what CSV cannot say: an empty cell is an absent value, and texts are JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        import csv

        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8", newline="")
            self._writer = csv.DictWriter(self._file, list(rows[0]), lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerows(
            [{name: "" if value is None else json.dumps(value) for name, value in row.items()} for row in rows]
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _ParquetWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        _arrow()

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        arrow, parquet = _arrow()
        if self._writer is None:
            self._schema = arrow.schema([(name, _arrow_type(arrow, name)) for name in rows[0]])
            self._writer = parquet.ParquetWriter(self._path, self._schema)
        self._writer.write_table(arrow.Table.from_pylist(list(rows), schema=self._schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            "Parquet needs pyarrow: pip install 'autospec-decoding[parquet]', or use --format csv"
        ) from error
    return pyarrow, pyarrow.parquet


def _arrow_type(arrow: Any, name: str) -> Any:
    columns = {column.name: column.type.python_type for kind in _TABLES for column in kind.__table__.columns}
    kind = columns.get(name, str)
    if name in _TIMES or kind is int:
        return arrow.int64()
    return {float: arrow.float64(), bool: arrow.bool_()}.get(kind, arrow.string())


def _read_csv(path: Path, page: int) -> Iterator[list[dict[str, Any]]]:
    import csv

    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = []
        for row in csv.DictReader(file):
            rows.append({name: None if value == "" else json.loads(value) for name, value in row.items()})
            if len(rows) == page:
                yield rows
                rows = []
        if rows:
            yield rows


def _read_parquet(path: Path, page: int) -> Iterator[list[dict[str, Any]]]:
    arrow, parquet = _arrow()
    try:
        for batch in parquet.ParquetFile(path).iter_batches(page):
            yield batch.to_pylist()
    except arrow.ArrowException as error:
        raise ConfigurationError(f"{path} cannot be read as Parquet: {error}") from error


_TABLES: tuple[type[Base], ...] = (
    RequestRow,
    ComparisonRow,
    PolicyVersionRow,
    CalibrationRow,
    PolicyStateRow,
    EngineRow,
)
_WRITERS: Mapping[str, Callable[[Path], Any]] = {"csv": _CsvWriter, "parquet": _ParquetWriter}
_READERS: Mapping[str, Callable[[Path, int], Iterable[list[dict[str, Any]]]]] = {
    "csv": _read_csv,
    "parquet": _read_parquet,
}
