from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry.recorder import Recorder
from autospec.telemetry.store import Store
from autospec.types import Comparison, PhaseSeconds, RequestRecord

ROOT = Path(__file__).parents[1]
START = """
import os, sys, time
from datetime import UTC, datetime
from autospec.telemetry.recorder import Recorder
from autospec.types import PhaseSeconds, RequestRecord

def record(name):
    return RequestRecord(name, datetime.now(UTC), "code", "p", False, False, "greedy", 1, 1, PhaseSeconds(1.0))

recorder = Recorder(sys.argv[1])
"""


def record(name: str, at: datetime | None = None) -> RequestRecord:
    at = datetime.now(UTC) if at is None else at
    return RequestRecord(name, at, "code", "p", False, False, "greedy", 1, 1, PhaseSeconds(1.0))


def names(address: str) -> list[str]:
    with Store(address, readonly=True) as store:
        return [item.request_id for item in store.requests()]


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", START + code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


class Faulty(Store):
    """A store that can be told to fail or to hang."""

    def __init__(self) -> None:
        super().__init__("sqlite://")
        self.is_away = False
        self.hold = threading.Event()
        self.hold.set()
        self.calls = 0

    def write(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self.calls += 1
        self.hold.wait(20)
        if self.is_away:
            raise StoreError("the server went away")
        super().write(entries)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 't.db'}"


def test_what_is_recorded_is_written_in_order(address: str) -> None:
    with Recorder(address) as recorder:
        for i in range(1_200):
            recorder.record(record(f"{i}"))
        recorder.compare(Comparison("c", "0", True))
        assert recorder.flush()
        assert names(address) == [f"{i}" for i in range(1_200)]
        assert (recorder.recorded, recorder.written, recorder.dropped) == (1_201, 1_201, 0)
        assert (recorder.failed_batches, recorder.last_error) == (0, None)
    with Store(address) as store:
        assert store.comparisons() == [Comparison("c", "0", True)]


def test_records_are_written_without_flush_within_the_interval(address: str) -> None:
    with Recorder(address, flush_seconds=0.05) as recorder:
        recorder.record(record("a"))
        until(lambda: recorder.written == 1, 2.0)


def test_threads_record_at_once(address: str) -> None:
    with Recorder(address) as recorder:

        def work(number: int) -> None:
            for i in range(300):
                recorder.record(record(f"{number}-{i}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert recorder.flush()
    assert len(set(names(address))) == 1_200


def test_recording_never_waits_for_a_database_that_hangs() -> None:
    with Faulty() as store:
        store.hold.clear()
        recorder = Recorder(store, flush_seconds=0.01)
        recorder.record(record("first"))
        until(lambda: store.calls == 1)
        started = time.perf_counter()
        for i in range(1_000):
            recorder.record(record(f"{i}"))
        assert time.perf_counter() - started < 1.0
        assert not recorder.flush(timeout=0.05)
        store.hold.set()
        assert recorder.flush()
        assert store.count() == 1_001
        recorder.close()


def test_a_database_that_comes_back_gets_everything(caplog: pytest.LogCaptureFixture) -> None:
    with Faulty() as store:
        store.is_away = True
        recorder = Recorder(store, flush_seconds=0.01)
        with caplog.at_level(logging.WARNING, "autospec.telemetry"):
            for i in range(20):
                recorder.record(record(f"{i}"))
            until(lambda: recorder.failed_batches >= 3)
        assert recorder.last_error == "the server went away"
        assert (recorder.written, recorder.dropped) == (0, 0)
        assert len(caplog.records) == 1
        store.is_away = False
        assert recorder.flush()
        assert [item.request_id for item in store.requests()] == [f"{i}" for i in range(20)]
        recorder.close()


def test_retries_pause_even_while_somebody_waits_for_flush() -> None:
    with Faulty() as store:
        store.is_away = True
        recorder = Recorder(store, flush_seconds=0.05)
        recorder.record(record("a"))
        assert not recorder.flush(timeout=0.5)
        assert store.calls <= 6
        recorder.close(timeout=0.1)


def test_the_oldest_are_dropped_and_counted_when_memory_is_full() -> None:
    with Faulty() as store:
        store.is_away = True
        recorder = Recorder(store, flush_seconds=0.01, capacity=10)
        for i in range(25):
            recorder.record(record(f"{i:02}"))
        until(lambda: recorder.failed_batches > 0)
        until(lambda: recorder.dropped == 15)
        store.is_away = False
        recorder.flush()
        assert [item.request_id for item in store.requests()] == [f"{i}" for i in range(15, 25)]
        assert recorder.recorded == recorder.written + recorder.dropped == 25
        recorder.close()


def test_flush_tells_when_something_was_lost() -> None:
    with Faulty() as store:
        recorder = Recorder(store)
        recorder.record(record("naive", datetime(2026, 1, 1)))  # noqa: DTZ001
        assert not recorder.flush()
        recorder.close()


def test_one_bad_record_does_not_hold_up_the_others(address: str) -> None:
    with Recorder(address) as recorder:
        recorder.record(record("a"))
        recorder.record(record("naive", datetime(2026, 1, 1)))  # noqa: DTZ001
        recorder.record("not a record")  # type: ignore[arg-type]
        recorder.record(record("b"))
        recorder.flush()
        assert names(address) == ["a", "b"]
        assert (recorder.written, recorder.dropped) == (2, 2)
        assert recorder.last_error


def test_close_writes_what_is_queued_and_closes_the_store_it_opened(address: str) -> None:
    recorder = Recorder(address, flush_seconds=60)
    for i in range(700):
        recorder.record(record(f"{i}"))
    recorder.close()
    recorder.close()
    assert len(names(address)) == 700
    recorder.record(record("late"))
    assert (recorder.written, recorder.dropped) == (700, 1)
    with pytest.raises(StoreError, match="was closed"):
        recorder._store.count()


def test_close_gives_up_in_time_and_counts() -> None:
    with Faulty() as store:
        store.is_away = True
        recorder = Recorder(store, flush_seconds=0.01)
        for i in range(30):
            recorder.record(record(f"{i}"))
        started = time.monotonic()
        recorder.close(timeout=0.3)
        assert time.monotonic() - started < 2
        assert (recorder.written, recorder.dropped) == (0, 30)


def test_a_store_handed_in_stays_open() -> None:
    with Store("sqlite://") as store:
        with Recorder(store) as recorder:
            recorder.record(record("a"))
        assert store.count() == 1


@pytest.mark.parametrize("options", [{"flush_seconds": 0}, {"flush_seconds": -1}, {"capacity": 0}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        Recorder("sqlite://", **options)


def test_leaving_the_program_drains(address: str) -> None:
    run("for i in range(200): recorder.record(record(str(i)))", address)
    assert len(names(address)) == 200


def test_fork(address: str) -> None:
    """The parent's pending rows are the parent's; the child has a thread and a queue of its own."""
    recorder = Recorder(address, flush_seconds=30)
    recorder.record(record("parent"))
    child = os.fork()
    if child == 0:
        try:
            recorder.record(record("child"))
            done = recorder.flush(10) and (recorder.recorded, recorder.written, recorder.dropped) == (1, 1, 0)
            recorder.close()
        finally:
            os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert names(address) == ["child"]
    assert recorder.flush()
    assert (recorder.recorded, recorder.written) == (1, 1)
    recorder.close()
    assert names(address) == ["child", "parent"]


@pytest.mark.parametrize("method", ["fork", "os.fork"])
def test_a_forked_child_drains_when_it_ends(address: str, method: str) -> None:
    """multiprocessing's children skip atexit; a plain fork runs it. Neither may lose a row or write one twice."""
    child = {
        "fork": (
            "import multiprocessing\n"
            "def work():\n"
            "    for i in range(100): recorder.record(record(f'child {i}'))\n"
            "process = multiprocessing.get_context('fork').Process(target=work)\n"
            "process.start()\n"
            "process.join()\n"
            "assert process.exitcode == 0\n"
        ),
        "os.fork": (
            "child = os.fork()\n"
            "if child == 0:\n"
            "    for i in range(100): recorder.record(record(f'child {i}'))\n"
            "    sys.exit()\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
        ),
    }[method]
    run("for i in range(100): recorder.record(record(f'parent {i}'))\n" + child, address)
    found = names(address)
    assert len(found) == len(set(found)) == 200


def test_kill_loses_at_most_one_flush_interval(address: str, tmp_path: Path) -> None:
    code = (
        "i = 0\n"
        "while True:\n"
        "    recorder.record(record(str(i)))\n"
        "    print(i, time.time(), flush=True)\n"
        "    i += 1\n"
        "    time.sleep(0.002)\n"
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", START + code, address], cwd=ROOT, stdout=log)
        try:
            until(lambda: (tmp_path / "log").read_text().count("\n") > 800, 30)
        finally:
            killed = time.time()
            process.send_signal(signal.SIGKILL)
            process.wait()
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines() if line.count(" ") == 1]
    old = {name for name, at in lines if float(at) < killed - 1.0}
    assert (tmp_path / "t.db-wal").exists()
    found = names(address)
    with closing(sqlite3.connect(tmp_path / "t.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(old) > 50
    assert old <= set(found)
    assert len(found) == len(set(found))
    with Recorder(address) as recorder:  # and it goes on
        recorder.record(record("after"))
        assert recorder.flush()
