"""Records that the database does not take: they wait in the spool and are written later, once."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autospec.errors import ConfigurationError
from autospec.telemetry import spool as spools
from autospec.telemetry.codec import to_entry
from autospec.telemetry.recorder import Recorder
from autospec.telemetry.spool import HEADER, SpoolFile, decode, encode, orphans
from autospec.telemetry.store import Store
from autospec.types import ActionTally, Comparison, PhaseSeconds, RequestRecord
from tests.postgres_server import away, fresh_database
from tests.test_telemetry_recorder import START, names, record, until

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spools"


@pytest.fixture(params=["file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield f"sqlite:///{tmp_path / 't.db'}"


def files(folder: Path) -> list[str]:
    return sorted(path.name.rpartition(".")[2] for path in folder.rglob("*") if path.is_file())


class TestFile:
    def test_lines_come_back_in_pieces(self, folder: Path) -> None:
        spool = SpoolFile.create(folder)
        entries = [{"comparison": {"n": n, "text": "\u2028\n\x00é"}} for n in range(10)]
        assert spool.append([encode(entry) for entry in entries[:4]]) == len(HEADER)
        spool.append([encode(entry) for entry in entries[4:]])
        position, found = len(HEADER), []
        while position < spool.end:
            lines, position = spool.read(position, 3)
            found += [decode(line) for line in lines]
        assert found == entries
        spool.clear()
        assert spool.is_empty
        spool.remove()
        assert files(folder) == []

    def test_a_line_longer_than_a_chunk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spools, "CHUNK_BYTES", 7)
        spool = SpoolFile.create(folder)
        entries = [{"text": "x" * 50}, {"text": "y"}]
        spool.append([encode(entry) for entry in entries])
        assert [decode(line) for line in spool.read(len(HEADER), 9)[0]] == entries
        spool.close()

    @given(st.binary(max_size=80))
    def test_what_was_not_written_by_us_is_no_entry(self, line: bytes) -> None:
        assert decode(line) is None

    @given(st.integers(0, 200), st.integers(1, 255))
    def test_one_changed_byte_is_found(self, place: int, change: int) -> None:
        line = bytearray(encode({"comparison": {"text": "abc", "n": 12}})[:-1])
        line[place % len(line)] ^= change
        assert decode(bytes(line)) is None or decode(bytes(line)) == {"comparison": {"text": "abc", "n": 12}}

    def test_only_orphans_are_adopted(self, folder: Path) -> None:
        mine, gone = SpoolFile.create(folder), SpoolFile.create(folder)
        gone.append([encode({"a": 1})])
        gone.close()
        found = list(orphans(folder))
        assert [orphan.path for orphan in found] == [gone.path]
        assert list(orphans(folder)) == []  # adopted already
        for spool in (*found, mine):
            spool.close()

    def test_another_kind_of_file_is_left_alone(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "a.spool").write_bytes(b"autospec-spool 2\nsomething newer\n")
        (folder / "b.spool").write_bytes(b"")
        (folder / "c.spool").mkdir()
        (folder / "d.txt").write_bytes(HEADER)
        assert list(orphans(folder)) == []
        assert len(list(folder.iterdir())) == 4
        assert list(orphans(folder / "missing")) == []

    def test_what_does_not_fit_leaves_the_file_as_it_was(self, folder: Path) -> None:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            spool = SpoolFile.create(folder)
            spool.append([encode({"a": 1})])
            end = spool.end
            try:
                spool.append([encode({"long": "x" * 500})])
            except OSError:
                spool.append([encode({"b": 2})])
                found = [decode(line) for line in spool.read(len(HEADER), 9)[0]]
                os._exit(0 if spool.end > end and found == [{"a": 1}, {"b": 2}] else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    def test_where_spools_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOSPEC_SPOOL", "/a")
        assert spools.default_folder() == Path("/a")
        monkeypatch.delenv("AUTOSPEC_SPOOL")
        monkeypatch.setenv("XDG_STATE_HOME", "/b")
        assert spools.default_folder() == Path("/b/autospec/spool")
        monkeypatch.delenv("XDG_STATE_HOME")
        assert spools.default_folder() == Path.home() / ".local/state/autospec/spool"


class Locked:
    """Holds a SQLite file's write lock."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def __enter__(self) -> Locked:
        self._connection.execute("BEGIN EXCLUSIVE")
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.execute("COMMIT")
        self._connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autospec.telemetry.sqlite.BUSY_SECONDS", 0.02)
    monkeypatch.setattr("autospec.telemetry.store.RETRY_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
class TestRecorder:
    def test_nothing_is_left_behind(self, path: Path, folder: Path) -> None:
        with Recorder(f"sqlite:///{path}", spool=folder) as recorder:
            for i in range(1_500):
                recorder.record(record(str(i)))
            assert recorder.flush()
            assert (recorder.written, recorder.spooled, recorder.waiting) == (1_500, 0, 0)
        assert files(folder) == []

    def test_a_locked_database_gets_everything_in_order(self, path: Path, folder: Path) -> None:
        recorder = Recorder(f"sqlite:///{path}", flush_seconds=0.01, spool=folder)
        with Locked(path):
            for i in range(30):
                recorder.record(record(str(i)))
            until(lambda: recorder.failed_batches > 1 and recorder.spooled == 30)
            assert recorder.last_error is not None
            assert "locked" in recorder.last_error
            for i in range(30, 60):
                recorder.record(record(str(i)))
            until(lambda: recorder.spooled == 60)
            assert recorder.waiting == 60
        assert recorder.flush()
        assert names(f"sqlite:///{path}") == [str(i) for i in range(60)]
        assert (recorder.written, recorder.dropped, recorder.waiting) == (60, 0, 0)
        recorder.close()
        assert files(folder) == []

    def test_what_is_left_at_the_end_is_written_by_the_next(
        self, path: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        address = f"sqlite:///{path}"
        recorder = Recorder(address, flush_seconds=0.01, spool=folder)
        with Locked(path):
            for i in range(700):
                recorder.record(record(str(i)))
            recorder.compare(Comparison("0", "1", True))
            recorder.close(timeout=0.3)
        assert (recorder.written, recorder.dropped, recorder.waiting) == (0, 0, 701)
        assert "701 records wait in" in caplog.text
        assert set(files(folder)) == {"spool"}  # more than one where the writer was busy when time ran out
        with Recorder(address, spool=folder) as following:
            following.record(record("new"))
            assert following.flush()
            until(lambda: following.replayed == 701)
            assert (following.recorded, following.written) == (1, 1)
        assert sorted(names(address)) == sorted([*map(str, range(700)), "new"])
        with Store(address) as store:
            assert store.comparisons() == [Comparison("0", "1", True)]
        assert files(folder) == []

    def test_replaying_twice_changes_nothing(self, path: Path, folder: Path) -> None:
        """As after a crash between the database's commit and the end of the file."""
        address = f"sqlite:///{path}"
        recorder = Recorder(address, flush_seconds=0.01, spool=folder)
        with Locked(path):
            for i in range(20):
                recorder.record(record(str(i)))
            recorder.close(timeout=0.2)
        (left,) = folder.rglob("*.spool")
        copy = left.with_name("copy.spool")
        copy.write_bytes(left.read_bytes())
        with Recorder(address, spool=folder) as following:
            following.record(record("new"))
            until(lambda: following.replayed == 40)
        assert len(names(address)) == 21
        with Store(address) as store, store._transaction() as connection:
            assert connection.exec_driver_sql("SELECT SUM(requests) FROM hourly_requests").scalar() == 21

    def test_a_torn_tail_and_a_changed_line_cost_themselves_alone(
        self, path: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        address = f"sqlite:///{path}"
        recorder = Recorder(address, flush_seconds=0.01, spool=folder)
        with Locked(path):
            for i in range(5):
                recorder.record(record(f"request {i}"))
            recorder.close(timeout=0.2)
        (left,) = folder.rglob("*.spool")
        data = left.read_bytes().replace(b'"request 2"', b'"request 7"')
        left.write_bytes(data[:-20])
        with Recorder(address, spool=folder) as following:
            following.record(record("new"))
            until(lambda: following.replayed == 3)
            until(lambda: following.damaged == 2)
        assert sorted(names(address)) == ["new", "request 0", "request 1", "request 3"]
        assert "2 lines of a spool could not be read or stored" in caplog.text
        assert files(folder) == ["damaged"]

    def test_without_a_folder_that_can_be_written_records_wait_in_memory(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "a file").write_text("")
        recorder = Recorder(f"sqlite:///{path}", flush_seconds=0.01, spool=tmp_path / "a file", capacity=20)
        with Locked(path):
            for i in range(50):
                recorder.record(record(str(i)))
                time.sleep(0.002)
            until(lambda: recorder.dropped == 30)
            assert recorder.spooled == 0
        recorder.flush()
        found = names(f"sqlite:///{path}")
        assert len(found) == recorder.written == 20
        assert found[-1] == "49"  # the oldest are dropped, but for those that are just being tried
        recorder.close()

    @pytest.mark.parametrize("is_released", [False, True])
    def test_what_was_only_in_memory_at_the_end_is_counted_as_lost(
        self,
        path: Path,
        tmp_path: Path,
        is_released: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Also the batch that the writer is still at: it counts as written only if that succeeds in the end."""
        monkeypatch.setattr("autospec.telemetry.store.RETRY_SECONDS", 2.0)
        (tmp_path / "a file").write_text("")
        recorder = Recorder(f"sqlite:///{path}", flush_seconds=0.01, spool=tmp_path / "a file")
        with Locked(path):
            for i in range(3):
                recorder.record(record(str(i)))
            until(lambda: recorder._backlog._num_peeked > 0)
            recorder.close(timeout=0.1)
            assert (recorder.written, recorder.dropped, recorder.waiting) == (0, 3, 0)
            assert "3 records could not be written" in caplog.text
            assert "wait in" not in caplog.text
            if not is_released:
                until(lambda: recorder._has_left)
        until(lambda: recorder._has_left)
        written = len(names(f"sqlite:///{path}"))
        assert (written > 0) is is_released
        assert (recorder.written, recorder.dropped, recorder.waiting) == (written, 3 - written, 0)

    def test_a_spool_that_is_large_enough(self, path: Path, folder: Path) -> None:
        recorder = Recorder(f"sqlite:///{path}", flush_seconds=0.01, spool=folder, spool_bytes=4_000, capacity=5)
        with Locked(path):
            for i in range(20):
                recorder.record(record(f"{i:02}"))
                time.sleep(0.03)
            until(lambda: recorder.dropped > 0)
        recorder.flush()
        found = names(f"sqlite:///{path}")
        assert recorder.recorded == recorder.written + recorder.dropped == 20
        assert len(found) == recorder.written
        assert found[0] == "00"  # in the spool
        assert found[-1] == "19"  # in memory
        recorder.close()

    def test_files_are_followed_by_others_and_deleted(
        self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A database that is never quite done leaves no spool that grows for ever."""
        monkeypatch.setattr("autospec.telemetry.backlog.ROTATE_BYTES", 3_000)
        recorder = Recorder(f"sqlite:///{path}", flush_seconds=0.01, spool=folder)
        with Locked(path):
            for i in range(40):
                recorder.record(record(f"{i:02}"))
                time.sleep(0.02)
            until(lambda: len(files(folder)) > 3)
        assert recorder.flush()
        assert len(files(folder)) == 1
        assert names(f"sqlite:///{path}") == [f"{i:02}" for i in range(40)]
        recorder.close()
        assert files(folder) == []

    def test_an_orphan_that_cannot_be_stored_is_kept_and_no_other_waits_for_it(self, path: Path, folder: Path) -> None:
        Store(address := f"sqlite:///{path}").close()
        place = spools.folder_for(address, folder)
        assert place is not None
        for content in ({"request": {"request_id": "old"}, "deployment": None}, to_entry(record("fine"))):
            spool = SpoolFile.create(place)
            spool.append([encode(content)])
            spool.close()
        with Recorder(address, spool=folder) as recorder:
            assert recorder.replay()
            assert (recorder.replayed, recorder.damaged) == (1, 1)
        assert names(address) == ["fine"]
        assert files(folder) == ["damaged"]

    def test_what_json_cannot_say_costs_one_record(self, path: Path, folder: Path) -> None:
        odd = replace(record("odd"), by_action={"ngram:2": replace(ActionTally(), blocks=object())})  # type: ignore[arg-type]
        with Recorder(f"sqlite:///{path}", spool=folder) as recorder:
            for item in (record("a"), odd, record("b")):
                recorder.record(item)
            assert not recorder.flush()
            assert (recorder.written, recorder.dropped, recorder.waiting) == (2, 1, 0)
        assert names(f"sqlite:///{path}") == ["a", "b"]

    def test_ones_own_records_do_not_wait_for_those_of_others(
        self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        address = f"sqlite:///{path}"
        Store(address).close()
        place = spools.folder_for(address, folder)
        assert place is not None
        spool = SpoolFile.create(place)
        spool.append([encode(to_entry(record(f"other {i}"))) for i in range(8_000)])
        spool.close()
        write = Store.write
        monkeypatch.setattr(Store, "write", lambda self, entries: (time.sleep(0.1), write(self, entries)))
        with Recorder(address, flush_seconds=0.01, spool=folder) as recorder:
            recorder.record(record("first"))
            until(lambda: recorder.replayed > 0)
            recorder.record(record("second"))
            assert recorder.flush(1.0)
            assert recorder.replayed < 8_000
        assert files(folder) == ["spool"]  # the rest of it

    def test_a_child_does_not_keep_the_lock_of_an_orphan(self, folder: Path) -> None:
        spool = SpoolFile.create(folder)
        spool.append([encode({"a": 1})])
        begun, tells = os.pipe()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tells, b".")
            os.read(reader, 1)
            os._exit(0)
        os.read(begun, 1)  # a child that has not run yet holds what its parent held
        spool.close()
        (found,) = orphans(folder)
        found.close()
        os.write(writer, b".")
        assert os.waitpid(child, 0)[1] == 0

    def test_times_may_go_backwards(self, path: Path, folder: Path) -> None:
        noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
        with Recorder(f"sqlite:///{path}", spool=folder) as recorder:
            for i in range(50):
                recorder.record(record(str(i), noon - timedelta(hours=i)))
            assert recorder.flush()
        assert names(f"sqlite:///{path}") == [str(i) for i in range(50)]

    @pytest.mark.parametrize("options", [{"spool_bytes": 0}, {"capacity": 0}])
    def test_options_out_of_range(self, options: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError):
            Recorder("sqlite://", **options)  # type: ignore[arg-type]


def child_that_records(address: str, folder: Path, log: int) -> None:
    """Records until it is killed, and says when it recorded what."""
    recorder = Recorder(address, spool=folder)
    for i in range(1_000_000):
        name = f"{os.getpid()}-{i}"
        recorder.record(record(name))
        os.write(log, f"{name} {time.monotonic()}\n".encode())
        time.sleep(0.001)


def test_fifty_times_killed(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"sqlite:///{tmp_path / 't.db'}"
    Store(address).close()
    random = Random(5)
    said: dict[str, float] = {}
    late: list[float] = []
    for _ in range(50):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                child_that_records(address, folder, writer)
            finally:
                os._exit(1)
        os.close(writer)
        time.sleep(random.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        killed = time.monotonic()
        os.waitpid(child, 0)
        with open(reader, "rb") as log:
            lines = [line.split() for line in log.read().decode().splitlines(keepends=True) if line.endswith("\n")]
        said |= {name: float(at) for name, at in lines}
        late += [killed] * len(lines)
    ages = dict(zip(said, (kill - at for kill, at in zip(late, said.values(), strict=True)), strict=True))
    # a kill may have come while a spool was made: what is left of it goes a minute later, here at once
    monkeypatch.setattr("autospec.telemetry.spool.UNFINISHED_SECONDS", 0.0)
    with Recorder(address, spool=folder) as recorder:
        recorder.record(record("last"))
        assert recorder.flush()
        until(lambda: files(folder) == ["spool"], 30)  # its own
    found = Counter(names(address))
    assert set(found.values()) == {1}
    assert len(said) > 2_000
    lost = [ages[name] for name in said if name not in found]
    assert max(lost, default=0.0) < 0.2 + 0.5  # half a second for a busy machine
    assert files(folder) == []


def test_eight_processes_at_once(url: str, folder: Path) -> None:
    """20,000 records from each, none lost and none doubled."""
    Store(url).close()
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            try:
                with Recorder(url, spool=folder) as recorder:
                    for i in range(20_000):
                        recorder.record(record(f"{number}-{i}"))
                    done = recorder.flush(300) and recorder.dropped == 0
            finally:
                os._exit(0 if done else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    with Store(url, readonly=True) as store, store._transaction() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*), COUNT(DISTINCT request_id) FROM requests").one() == (
            160_000,
            160_000,
        )
        assert connection.exec_driver_sql("SELECT SUM(requests) FROM hourly_requests").scalar() == 160_000
    assert files(folder) == []


def test_a_database_that_is_away_for_ten_seconds(url: str, folder: Path, tmp_path: Path) -> None:
    recorder = Recorder(url, spool=folder)
    stop = threading.Event()
    count = 0

    def load() -> None:
        nonlocal count
        while not stop.is_set():
            recorder.record(record(str(count)))
            count += 1
            time.sleep(0.002)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        until(lambda: recorder.written > 100)
        with away(url) if url.startswith("postgresql") else Locked(tmp_path / "t.db"):
            time.sleep(10)
            assert recorder.waiting > 1_000
        time.sleep(0.5)
    finally:
        stop.set()
        thread.join()
    assert recorder.flush(30)
    recorder.close()
    assert (recorder.written, recorder.dropped) == (count, 0)
    assert names(url) == [str(i) for i in range(count)]
    assert files(folder) == []


QUOTA = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from autospec.telemetry.store import Store
recorder = Recorder(sys.argv[1], spool=sys.argv[2], flush_seconds=0.01, capacity=100)
for i in range(300):
    recorder.record(record(f"before {i}"))
assert recorder.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for i in range(2_000):
    recorder.record(record(f"full {i}"))
    time.sleep(0.0005)
deadline = time.monotonic() + 20
while not (recorder.failed_batches and recorder.spooled and recorder.dropped):
    assert time.monotonic() < deadline
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
recorder.flush(30)
recorder.close()
assert recorder.recorded == 2_300 == recorder.written + recorder.dropped, (recorder.written, recorder.dropped)
print(recorder.written, recorder.dropped)
"""


def test_a_full_disk(tmp_path: Path, folder: Path) -> None:
    """A quota on files: database and spool cannot grow. What is said to be written is there, the rest is counted."""
    address = f"sqlite:///{tmp_path / 't.db'}"
    code = START.replace("recorder = Recorder(sys.argv[1])", "") + QUOTA
    done = subprocess.run(
        [sys.executable, "-c", code, address, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    written, dropped = map(int, done.stdout.split())
    assert written > 300  # the spool held some
    assert dropped > 0
    found = names(address)
    assert len(found) == len(set(found)) == written
    with closing(sqlite3.connect(tmp_path / "t.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("raise SystemExit(3)", 3),
        ("raise RuntimeError('ours')", 1),
        ("import signal; signal.raise_signal(2)", -signal.SIGINT),
    ],
)
@pytest.mark.parametrize("is_locked", [False, True])
def test_no_end_but_kill_loses_a_record(
    tmp_path: Path, folder: Path, ending: str, status: int, is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"sqlite:///{tmp_path / 't.db'}"
    Store(address).close()
    monkeypatch.setenv("AUTOSPEC_SPOOL", str(folder))
    code = START + "for i in range(400): recorder.record(record(str(i)))\n" + ending + "\ntime.sleep(60)\n"
    lock = Locked(tmp_path / "t.db") if is_locked else None
    if lock:
        lock.__enter__()
    done = subprocess.run([sys.executable, "-c", code, address], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == status, done.stderr
    if lock:
        lock.__exit__()
        assert names(address) == []
    with Recorder(address) as recorder:
        recorder.record(record("last"))
        assert recorder.flush()
        until(lambda: files(folder) == ["spool"])
    assert sorted(names(address)) == sorted([*map(str, range(400)), "last"])


def test_sigterm_is_left_to_who_handles_it(tmp_path: Path) -> None:
    code = (
        "import signal\n"
        "mine = lambda *_: sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, mine)\n" + START + "assert signal.getsignal(signal.SIGTERM) is mine\n"
        "recorder.record(record('a'))\n"
        "os.kill(os.getpid(), 15)\n"
    )
    address = f"sqlite:///{tmp_path / 't.db'}"
    done = subprocess.run(
        [sys.executable, "-c", "import sys, os\n" + code, address], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert names(address) == ["a"]


def test_records_of_other_kinds_are_counted_and_dropped(tmp_path: Path, folder: Path) -> None:
    with Recorder(f"sqlite:///{tmp_path / 't.db'}", spool=folder) as recorder:
        recorder.record("no record")  # type: ignore[arg-type]
        recorder.record(RequestRecord("naive", datetime(2026, 1, 1), "s", "p", False, False, "g", 1, 1, PhaseSeconds()))  # noqa: DTZ001
        recorder.record(record("fine"))
        assert not recorder.flush()
        assert (recorder.written, recorder.dropped) == (1, 2)
