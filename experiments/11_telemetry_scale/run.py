"""How fast the report and a dashboard's queries are over millions of requests, on SQLite and on PostgreSQL.

    python experiments/11_telemetry_scale/run.py [--requests 5000000] [--postgres URL] [--work DIR] [--out DIR]

Fills a database with synthetic traffic that has the shape of real one (40 segments of unequal size, days and nights, a
control share, lengths with long tails), then times the production queries on it. Without --postgres a server is started
from the system's own binaries in a temporary folder. --partitions also tries requests split by month.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autospec.telemetry.codec import deployment_to_row  # noqa: E402
from autospec.telemetry.dashboard_queries import recent_hours  # noqa: E402
from autospec.telemetry.hourly import build_hourly_report  # noqa: E402
from autospec.telemetry.recorder import Recorder  # noqa: E402
from autospec.telemetry.schema import (  # noqa: E402
    Base,
    HourlyActions,
    HourlyPositions,
    HourlyRequests,
    RequestRow,
    to_microseconds,
)
from autospec.telemetry.store import Store  # noqa: E402
from autospec.types import ActionTally, Deployment, PhaseSeconds, RequestRecord  # noqa: E402

FOLDER = Path(__file__).parent
SEGMENTS = 40
DAYS = 90
CHUNK = 50_000
HOUR = 3_600_000_000  # microseconds
ACTIONS = (("none", 0), ("ngram", 4), ("ngram", 8), ("suffix", 4), ("suffix", 8), ("assistant", 2))
PLACE = Deployment(
    "host", "cpu: synthetic", "synthetic-135m", "float32", ("ngram", "suffix", "assistant"), {"autospec": "0"}
)
START = datetime(2026, 1, 1, tzinfo=UTC)
REPEATS = 7
RECORDS, BURST = 10_000, 5_000
REPORT_SECONDS, QUERY_SECONDS = 2.0, 0.3


def main() -> int:
    options = parse_options()
    results: dict[str, Any] = {
        "requests": options.requests,
        "segments": SEGMENTS,
        "days": DAYS,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "databases": {},
    }
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        databases = {"sqlite": f"sqlite:///{work / 'scale.db'}"}
        if not options.no_postgres:
            databases["postgresql"] = options.postgres or stack.enter_context(a_server())
        results["record"] = record_cost(f"sqlite:///{work / 'record.db'}")
        print(json.dumps(results["record"], indent=2), flush=True)
        results["fill_seconds"] = round(timed(lambda: fill(list(databases.values()), options.requests))[0], 1)
        for name, url in databases.items():
            results["databases"][name] = found = measure(url)
            if name == "sqlite":
                found["file_bytes"] = (work / "scale.db").stat().st_size
            else:
                found |= partitions(url, options.partitions)
            print(json.dumps({name: found}, indent=2), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    missed = [
        f"{name}: {what}"
        for name, found in results["databases"].items()
        for what, bar in (("report_seconds", REPORT_SECONDS), ("dashboard_seconds", QUERY_SECONDS))
        if found[what] > bar
    ]
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5_000_000)
    parser.add_argument("--postgres", default=None, help="URL of an empty database")
    parser.add_argument("--no-postgres", action="store_true")
    parser.add_argument("--partitions", type=int, default=1_000_000, help="requests in the trial of partitions")
    parser.add_argument("--work", type=Path, default=None, help="folder for the SQLite file; kept")
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser.parse_args()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = call()
    return time.perf_counter() - started, value


class Traffic:
    """Synthetic requests in order of time, chunk by chunk, and their sums by the hour."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self._random = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, SEGMENTS + 1)
        self._weights = weights / weights.sum()
        self._acceptance = self._random.uniform(0.1, 0.8, SEGMENTS)
        self.hours: dict[tuple[Any, ...], np.ndarray] = {}
        self.actions: dict[tuple[Any, ...], np.ndarray] = {}
        self.positions: dict[tuple[Any, ...], np.ndarray] = {}

    def chunks(self) -> Iterator[list[tuple[Any, ...]]]:
        done = 0
        while done < self.count:
            size = min(CHUNK, self.count - done)
            yield self._chunk(done, size)
            done += size

    def _chunk(self, first: int, size: int) -> list[tuple[Any, ...]]:
        random = self._random
        place = (first + np.sort(random.random(size)) * size) / self.count
        day = np.sin(2 * np.pi * place * DAYS) * 0.03  # days and nights
        started = to_microseconds(START) + ((place * DAYS + day) * 86_400e6).astype(np.int64)
        segment = random.choice(SEGMENTS, size, p=self._weights)
        control = random.random(size) < 0.05
        sampled = random.random(size) < 0.5
        prompt = np.minimum(30_000, random.lognormal(6.0, 1.0, size)).astype(np.int64) + 1
        output = np.minimum(4_000, random.lognormal(5.0, 0.8, size)).astype(np.int64) + 1
        rate = np.where(control, 0.0, self._acceptance[segment])
        action = np.where(control, 0, random.integers(1, len(ACTIONS), size))
        length = np.array([k for _, k in ACTIONS])[action]
        per_block = 1 + np.minimum(length * rate, rate / (1 - rate))
        blocks = np.maximum(1, (output / per_block).astype(np.int64))
        accepted = output - blocks
        drafted = blocks * length
        judged = np.minimum(drafted, accepted + blocks)
        step = random.uniform(0.02, 0.03, size)
        verify = blocks * step * np.where(control, 1.0, 1.1)
        draft = drafted * 0.0005
        prefill, correction = prompt * 1e-4, blocks * 0.001
        emission, other = blocks * 1e-4, np.full(size, 0.003)
        total = prefill + draft + verify + correction + emission + other
        predicted = prefill + output * step + correction + emission + other
        failed = random.random(size) < 0.002
        hour = started - started % HOUR
        self._sum(hour, segment, control, sampled, action, locals())
        rows = zip(
            started.tolist(), segment.tolist(), control.tolist(), sampled.tolist(), prompt.tolist(), output.tolist(),
            blocks.tolist(), drafted.tolist(), judged.tolist(), accepted.tolist(), prefill.tolist(), draft.tolist(),
            verify.tolist(), correction.tolist(), emission.tolist(), other.tolist(), total.tolist(), action.tolist(),
            failed.tolist(), predicted.tolist(), strict=True,
        )  # fmt: skip
        return [self._row(first + index, *values) for index, values in enumerate(rows)]

    @staticmethod
    def _row(
        number: int, started: int, segment: int, control: bool, sampled: bool, prompt: int, output: int, blocks: int,
        drafted: int, judged: int, accepted: int, prefill: float, draft: float, verify: float, correction: float,
        emission: float, other: float, total: float, action: int, failed: bool, predicted: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        source, length = ACTIONS[action]
        label = source if not length else f"{source}:{length}"
        whole, rest = divmod(output, blocks)
        lengths = f'{{"{whole}": {blocks - rest}, "{whole + 1}": {rest}}}'
        return (
            f"{number:032x}", 1, started, f"segment {segment:02}", "off" if control else "auto", control, sampled,
            "sample temperature=0.8" if sampled else "greedy", prompt, output, blocks, drafted, judged, accepted,
            prefill, draft, verify, correction, emission, other, total, lengths,
            f"[{blocks}]" if length else "[]", f"[{min(blocks, accepted)}]" if length else "[]",
            f'{{"{label}": {blocks}}}', None, None,
            "RuntimeError: synthetic" if failed else None, None, "{}", f'{{"{label} best": {blocks}}}',
            None if control else "v1", None if control else predicted, None,
        )  # fmt: skip

    def _sum(self, hour: Any, segment: Any, control: Any, sampled: Any, action: Any, values: dict[str, Any]) -> None:
        v = values
        treated = ~control
        gain = np.where(treated, v["predicted"] - v["total"], 0.0)
        ones = np.ones(len(hour))
        columns = np.column_stack([
            ones, v["failed"], 0 * ones, v["prompt"], v["output"], v["blocks"], v["output"], v["drafted"],
            v["judged"], v["accepted"], v["prefill"], v["draft"], v["verify"], v["correction"], v["emission"],
            v["other"], v["total"], v["total"] ** 2, v["output"].astype(float) ** 2, v["total"] * v["output"],
            treated, treated * v["predicted"], treated * v["total"], gain < 0, np.maximum(gain, 0),
            np.maximum(-gain, 0), 0 * ones,
        ])  # fmt: skip
        _group(self.hours, (hour, segment, control, sampled), columns)
        columns = np.column_stack([
            v["blocks"], v["drafted"], v["judged"], v["accepted"], v["output"], v["draft"], v["verify"],
            v["correction"], v["emission"],
        ])  # fmt: skip
        _group(self.actions, (hour, segment, action), columns)
        for length in sorted({k for _, k in ACTIONS if k}):
            chosen = np.array([k for _, k in ACTIONS])[action] == length
            rate = self._acceptance[segment[chosen]]
            for position in range(1, length + 1):
                at_risk = (v["blocks"][chosen] * rate ** (position - 1)).astype(np.int64)
                columns = np.column_stack([at_risk, (at_risk * rate).astype(np.int64)])
                keys = (hour[chosen], segment[chosen], action[chosen], np.full(chosen.sum(), position))
                _group(self.positions, keys, columns)


def _group(sums: dict[tuple[Any, ...], np.ndarray], keys: tuple[Any, ...], columns: np.ndarray) -> None:
    """Adds the columns of equal keys up: hour in microseconds, then small whole numbers."""
    code = np.asarray(keys[0]) // HOUR
    for key in keys[1:]:
        code = code * 64 + np.asarray(key).astype(np.int64)
    names, index = np.unique(code, return_inverse=True)
    totals = np.column_stack([np.bincount(index, column, len(names)) for column in columns.T])
    for name, total in zip(names.tolist(), totals, strict=True):
        parts = [(name >> (6 * place)) & 63 for place in reversed(range(len(keys) - 1))]
        full = ((name >> (6 * (len(keys) - 1))) * HOUR, *parts)
        known = sums.get(full)
        sums[full] = total if known is None else known + total


def fill(urls: list[str], count: int) -> None:
    """Writes the same traffic into all databases in bulk, past the recorder."""
    for url in urls:
        with Store(url) as store, store.writing() as connection:
            connection.execute(Base.metadata.tables["deployments"].insert(), [deployment_to_row(PLACE)])
    traffic = Traffic(count)
    names = [column.name for column in RequestRow.__table__.columns if column.name != "id"]
    with ExitStack() as stack:
        writers = [stack.enter_context(bulk(url)) for url in urls]
        for rows in tqdm(traffic.chunks(), total=-(-count // CHUNK), desc="requests"):
            for write in writers:
                write("requests", names, rows)
        for row_type, rows in (
            (HourlyRequests, hourly_requests(traffic)),
            (HourlyActions, blocks_of(traffic.actions, 5)),
            (HourlyPositions, positions_of(traffic.positions)),
        ):
            for write in writers:
                write(str(row_type.__tablename__), columns_of(row_type), sorted(rows))
    for url in urls:
        with Store(url) as store:
            store.execute_alone(["ANALYZE"])


def columns_of(row_type: type[Base]) -> list[str]:
    return [column.name for column in row_type.__table__.columns]


def hourly_requests(traffic: Traffic) -> list[tuple[Any, ...]]:
    whole = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 23, 26)
    return [
        (
            *(f"segment {segment:02}", "off" if control else "auto", 1, bool(control), bool(sampled), hour),
            *(int(value) if index in whole else float(value) for index, value in enumerate(values)),
        )
        for (hour, segment, control, sampled), values in traffic.hours.items()
    ]


def blocks_of(sums: dict[tuple[Any, ...], np.ndarray], whole: int) -> list[tuple[Any, ...]]:
    return [
        (
            *(f"segment {segment:02}", *ACTIONS[action], hour),
            *(int(value) if index < whole else float(value) for index, value in enumerate(values)),
        )
        for (hour, segment, action), values in sums.items()
    ]


def positions_of(sums: dict[tuple[Any, ...], np.ndarray]) -> list[tuple[Any, ...]]:
    return [
        (f"segment {segment:02}", *ACTIONS[action], position, hour, int(at_risk), int(accepted))
        for (hour, segment, action, position), (at_risk, accepted) in sums.items()
    ]


@contextmanager
def bulk(url: str) -> Iterator[Callable[[str, list[str], list[tuple[Any, ...]]], None]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")

            def insert(table: str, names: list[str], rows: list[tuple[Any, ...]]) -> None:
                marks = ", ".join("?" * len(names))
                connection.execute("BEGIN")
                connection.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", rows)
                connection.execute("COMMIT")

            yield insert
        return
    import psycopg

    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as server:

        def copy(table: str, names: list[str], rows: list[tuple[Any, ...]]) -> None:
            with server.cursor() as cursor, cursor.copy(f"COPY {table} ({', '.join(names)}) FROM STDIN") as stream:
                for row in rows:
                    stream.write_row(row)

        yield copy


def measure(url: str) -> dict[str, Any]:
    """Medians of repeated queries, each on a store opened anew."""
    since = START + timedelta(days=DAYS - 1)
    queries: dict[str, Callable[[Store], Any]] = {
        "report_seconds": lambda store: build_hourly_report(store),
        "report_by_policy_seconds": lambda store: build_hourly_report(store, group_by=("segment", "policy")),
        "report_last_week_seconds": lambda store: build_hourly_report(
            store, since=START + timedelta(days=DAYS - 7), group_by=("segment", "day")
        ),
        "dashboard_seconds": lambda store: recent_hours(store, since=since),
        "dashboard_of_a_segment_seconds": lambda store: recent_hours(
            store, since=START + timedelta(days=DAYS - 7), segment="segment 03"
        ),
    }
    found: dict[str, Any] = {}
    for name, query in queries.items():
        seconds = []
        with Store(url, readonly=True) as store:
            query(store)  # the file was written just now: what it says is read into memory first
        for _ in range(REPEATS):
            with Store(url, readonly=True) as store:
                seconds.append(timed(lambda query=query, store=store: query(store))[0])
        found[name] = round(statistics.median(seconds), 3)
        found[name.replace("_seconds", "_slowest_seconds")] = round(max(seconds), 3)
    with Store(url, readonly=True) as store, store.reading() as connection:
        for table in ("requests", "hourly_requests", "hourly_actions", "hourly_positions"):
            found[f"rows_{table}"] = connection.exec_driver_sql(f"SELECT COUNT(*) FROM {table}").scalar()
    return found


def record_cost(url: str) -> dict[str, Any]:
    """Microseconds that `record()` takes in the calling thread, one request a millisecond, while others write them."""
    record = RequestRecord(
        "", START, "segment", "auto", False, False, "greedy", 100, 100, PhaseSeconds(0.1, 0.1, 1.0, 0.1, 0.1, 0.1),
        blocks=60, acceptance_lengths={1: 40, 3: 20}, at_risk=(60, 30, 20), accepted=(30, 20, 10),
        actions={"ngram:4": 60}, deployment=PLACE, by_action={"ngram:4": ActionTally(60, 100, 90, 40, 100)},
    )  # fmt: skip
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Recorder(url, spool=folder) as recorder:
        records = [replace(record, request_id=f"{number:032x}") for number in range(RECORDS)]
        microseconds = []
        for each in records:
            time.sleep(0.001)
            started = time.perf_counter()
            recorder.record(each)
            microseconds.append(1e6 * (time.perf_counter() - started))
        started = time.thread_time()
        for each in records[:BURST]:
            recorder.record(each)
        found["burst_cpu_microseconds"] = round(1e6 * (time.thread_time() - started) / BURST, 2)
        recorder.flush(60)
        found |= {
            "records": RECORDS,
            "median_microseconds": round(statistics.median(microseconds), 2),
            "p99_microseconds": round(statistics.quantiles(microseconds, n=100)[98], 1),
            "p999_microseconds": round(statistics.quantiles(microseconds, n=1000)[998], 1),
            "written": recorder.written,
            "dropped": recorder.dropped,
        }
    return found


def partitions(url: str, count: int) -> dict[str, Any]:
    """Requests split by month: what a month costs to fill, to query, and to drop, beside deleting it from one table."""
    if not count:
        return {}
    import psycopg

    names = [column.name for column in RequestRow.__table__.columns if column.name != "id"]
    found: dict[str, Any] = {"partition_requests": count}
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as server:
        server.execute("CREATE TABLE by_month (LIKE requests INCLUDING DEFAULTS) PARTITION BY RANGE (started_at)")
        server.execute("CREATE INDEX ON by_month (segment, started_at)")
        edges = [to_microseconds(START + timedelta(days=30 * month)) for month in range(-1, 5)]
        for month, (low, high) in enumerate(pairwise(edges)):
            server.execute(f"CREATE TABLE by_month_{month} PARTITION OF by_month FOR VALUES FROM ({low}) TO ({high})")
        copied = ", ".join(names)
        started = time.perf_counter()
        chosen = f"SELECT id, {copied} FROM requests ORDER BY md5(request_id) LIMIT {count}"
        server.execute(f"INSERT INTO by_month (id, {copied}) {chosen}")
        found["partition_fill_seconds"] = round(time.perf_counter() - started, 2)
        server.execute("ANALYZE by_month")
        low, high = edges[2], edges[3]
        count_month = (
            "SELECT segment, COUNT(*), SUM(total_seconds) FROM {} "
            f"WHERE started_at >= {low} AND started_at < {high} GROUP BY segment"
        )
        for table in ("by_month", "requests"):
            started = time.perf_counter()
            server.execute(count_month.format(table)).fetchall()
            found[f"month_of_{table}_seconds"] = round(time.perf_counter() - started, 3)
        started = time.perf_counter()
        server.execute("DROP TABLE by_month_2")
        found["drop_a_month_seconds"] = round(time.perf_counter() - started, 3)
        server.execute("DROP TABLE by_month")
    return found


@contextmanager
def a_server() -> Iterator[str]:
    """A PostgreSQL server of our own, settings as they come but for memory and durability of a trial."""
    from tests.postgres_server import fresh_database

    if shutil.which("postgres") is None and not list(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        raise SystemExit("PostgreSQL is not installed: give --postgres URL or --no-postgres")
    with fresh_database() as url:
        yield url


if __name__ == "__main__":
    sys.exit(main())
