from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry import store as store_module
from autospec.telemetry.schema import APPLICATION_ID
from autospec.telemetry.store import Store
from autospec.types import Comparison, Deployment, PhaseSeconds, RequestRecord
from tests.postgres_server import fresh_database

ROOT = Path(__file__).parents[1]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HERE = Deployment("host", "cpu: two threads", "target", "float32", ("draft",), {"torch": "2.9", "autospec": "0.1"})


def record(name: str, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": name,
        "started_at": NOON,
        "segment": "code",
        "policy": "adaptive",
        "is_control": False,
        "do_sample": False,
        "decoding": "greedy",
        "prompt_tokens": 7,
        "output_tokens": 11,
        "seconds": PhaseSeconds(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        "deployment": HERE,
        **changes,
    }
    return RequestRecord(**values)  # type: ignore[arg-type]


def in_children(count: int, work: Callable[[int], None]) -> None:
    """Runs work(0), work(1)... each in a forked child, all at once, and fails if one of them does."""
    barrier = multiprocessing.get_context("fork").Barrier(count)
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                barrier.wait(20)
                work(number)
            except BaseException:  # noqa: BLE001 - nothing of pytest may run on in the child
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


@pytest.fixture(params=["memory", "file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield from _urls(request.param, tmp_path)


@pytest.fixture(params=["file", "postgres"])
def lasting_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield from _urls(request.param, tmp_path)


def _urls(kind: str, folder: Path) -> Iterator[str]:
    if kind == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield "sqlite://" if kind == "memory" else f"sqlite:///{folder / 'telemetry.db'}"


class TestContract:
    def test_records_come_back_as_they_went_in(self, url: str) -> None:
        full = record(
            "a" * 32,
            started_at=datetime(2026, 10, 25, 1, 30, 0, 123457, tzinfo=UTC),
            is_control=True,
            do_sample=True,
            decoding="sample temperature=0.8 top_p=0.95",
            blocks=5,
            num_draft_tokens=20,
            num_judged_tokens=18,
            num_accepted_tokens=9,
            acceptance_lengths={1: 2, 5: 3},
            at_risk=(5, 4),
            accepted=(4, 3),
            actions={"ngram:4": 4, "none": 1},
            fallback_reason="beams",
            error="stopped",
            run="bench",
        )
        bare = record("b", deployment=None)
        with Store(url) as store:
            store.add([full, bare])
            found = list(store.requests())
            assert found == [full, bare]
            assert found[0].started_at.utcoffset() == timedelta(0)
            assert (store.count(), store.runs()) == (2, ["bench"])

    def test_writing_again_changes_nothing(self, url: str) -> None:
        pair = Comparison("control", "a", False, 3, 0.25, True)
        with Store(url) as store:
            store.add([record("a")], [pair])
            store.add(
                [record("a", output_tokens=99), record("b"), record("b")], [pair, Comparison("control", "b", None)]
            )
            assert [item.output_tokens for item in store.requests()] == [11, 11]
            assert store.comparisons() == [pair, Comparison("control", "b", None)]
            with store._transaction() as connection:
                assert connection.scalar(text("SELECT count(*) FROM deployments")) == 1

    def test_filters(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "PAGE_ROWS", 3)
        records = [
            record(
                f"{i:02}",
                segment=["code", "chat"][i % 2],
                run=["old", "new"][i // 5],
                started_at=NOON + i * timedelta(hours=1),
            )
            for i in range(10)
        ]
        with Store(url) as store:
            store.add(records, [Comparison("c", "01", True), Comparison("c", "07", True)])
            assert list(store.requests()) == records
            assert list(store.requests(run="new")) == records[5:]
            assert list(store.requests(segment="chat")) == records[1::2]
            tokyo = timezone(timedelta(hours=9))
            assert list(store.requests(since=(NOON + timedelta(hours=7)).astimezone(tokyo))) == records[7:]
            assert list(store.requests(run="old", segment="code", since=NOON + timedelta(hours=1))) == [
                records[2],
                records[4],
            ]
            assert list(store.requests(run="none such")) == []
            assert store.comparisons(run="new") == [Comparison("c", "07", True)]
            assert store.runs() == ["old", "new"]

    def test_empty(self, url: str) -> None:
        with Store(url) as store:
            store.add([])
            assert (store.count(), store.runs(), store.comparisons(), list(store.requests())) == (0, [], [], [])

    def test_hostile_names_are_kept_apart_and_found(self, url: str) -> None:
        names = [
            "<img src=x onerror=alert(1)>",
            "nul\x00, half \ud800",
            "x" * 10_000,
            "x" * 9_999 + "y",
            "\u202e" + "\u6f22" * 5_000,
        ]
        with Store(url) as store:
            store.add([record(f"{i}", segment=name, run=name, error=name, policy=name) for i, name in enumerate(names)])
            for i, name in enumerate(names):
                assert [item.request_id for item in store.requests(segment=name, run=name)] == [f"{i}"]
            assert len(store.runs()) == len(names)
            assert [item.segment for item in store.requests(segment=names[0])] == [names[0]]

    @pytest.mark.parametrize(
        "bad",
        [
            record("bad", started_at=datetime(2026, 1, 1)),  # noqa: DTZ001
            record("bad", seconds=PhaseSeconds(prefill=float("nan"))),
            record("bad", prompt_tokens=2**80),
        ],
        ids=["naive time", "nan", "too large"],
    )
    def test_a_bad_record_leaves_nothing_behind(self, url: str, bad: RequestRecord) -> None:
        with Store(url) as store:
            with pytest.raises(ConfigurationError):
                store.add([record("good"), bad])
            assert store.count() == 0
            with pytest.raises(ConfigurationError, match="no time zone"):
                store.requests(since=datetime(2026, 1, 1))  # noqa: DTZ001

    def test_a_gap_that_is_no_number_is_absent(self, url: str) -> None:
        with Store(url) as store:
            store.add([], [Comparison("c", "a", False, 3, float("nan"), None)])
            assert store.comparisons() == [Comparison("c", "a", False, 3, None, None)]

    def test_threads(self, url: str) -> None:
        with Store(url) as store:

            def work(number: int) -> None:
                for i in range(20):
                    store.add([record(f"{number}-{i}")])
                    assert sum(1 for _ in store.requests()) > i

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert store.count() == 80

    def test_closed(self, url: str) -> None:
        store = Store(url)
        store.close()
        store.close()
        with pytest.raises(StoreError, match="was closed"):
            store.count()

    @pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
    def test_times_do_not_depend_on_the_zone(self, url: str, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        try:
            times = [datetime(2026, 10, 24, 23, tzinfo=UTC) + i * timedelta(minutes=30) for i in range(60)]
            with Store(url) as store:
                store.add([record(f"{i:02}", started_at=at.astimezone()) for i, at in enumerate(times)])
                assert [item.started_at for item in store.requests()] == times
                assert sum(1 for _ in store.requests(since=datetime(2026, 10, 25, tzinfo=UTC))) == 58
                with store._transaction() as connection:
                    first = connection.scalar(text("SELECT min(started_at) FROM requests"))
                assert first == 1_792_882_800_000_000
        finally:
            monkeypatch.undo()
            time.tzset()


class TestProcesses:
    def test_six_open_a_fresh_database_at_once(self, lasting_url: str) -> None:
        def work(number: int) -> None:
            with Store(lasting_url) as store:
                store.add([record(f"{number}")])

        in_children(6, work)
        with Store(lasting_url) as store:
            assert sorted(item.request_id for item in store.requests()) == list("012345")

    def test_four_write_at_once(self, lasting_url: str) -> None:
        def work(number: int) -> None:
            with Store(lasting_url) as store:
                for i in range(60):
                    store.add([record(f"{number}-{i}", deployment=Deployment(str(i), "", "", "", (), {}))])

        in_children(4, work)
        with Store(lasting_url) as store:
            assert store.count() == 240
            with store._transaction() as connection:
                assert connection.scalar(text("SELECT count(*) FROM deployments")) == 60

    def test_a_store_survives_fork(self, lasting_url: str) -> None:
        with Store(lasting_url) as store:
            store.add([record("before")])

            def work(number: int) -> None:
                assert store.count() >= 1
                store.add([record(f"child {number}")])
                store.close()

            in_children(2, work)
            store.add([record("after")])
            assert sorted(item.request_id for item in store.requests()) == ["after", "before", "child 0", "child 1"]

    def test_fork_while_another_thread_writes(self, lasting_url: str) -> None:
        with Store(lasting_url) as store:
            stop = threading.Event()

            def write() -> None:
                for i in range(100_000):
                    if stop.is_set():
                        return
                    store.add([record(f"parent {i}")])

            writer = threading.Thread(target=write)
            writer.start()
            try:
                for i in range(5):
                    in_children(1, lambda _, i=i: store.add([record(f"child {i}")]))  # type: ignore[misc]
            finally:
                stop.set()
                writer.join()
            assert sum(item.request_id.startswith("child") for item in store.requests()) == 5

    def test_a_database_in_memory_stays_with_its_process(self) -> None:
        with Store("sqlite://") as store:
            store.add([record("parent")])

            def work(number: int) -> None:
                assert store.count() == 0
                store.add([record("child")])
                assert [item.request_id for item in store.requests()] == ["child"]

            in_children(1, work)
            assert [item.request_id for item in store.requests()] == ["parent"]


class TestReadonly:
    def test_reads_and_refuses_to_write(self, lasting_url: str) -> None:
        with Store(lasting_url) as store:
            store.add([record("a")])
        with Store(lasting_url, readonly=True) as store:
            assert [item.request_id for item in store.requests()] == ["a"]
            with pytest.raises(StoreError, match="reading only"):
                store.add([record("b")])
            with pytest.raises(StoreError), store._transaction() as connection:
                connection.execute(text("DELETE FROM requests"))

    def test_follows_a_writer(self, lasting_url: str) -> None:
        with Store(lasting_url) as writer, Store(lasting_url, readonly=True) as reader:
            for i in range(3):
                writer.add([record(f"{i}")])
                assert reader.count() == i + 1

    def test_an_empty_database_is_refused(self, lasting_url: str, tmp_path: Path) -> None:
        if lasting_url.startswith("sqlite"):
            (tmp_path / "telemetry.db").touch()
        with pytest.raises(StoreError, match="is empty"):
            Store(lasting_url, readonly=True)

    def test_a_file_is_left_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "t.db"
        with Store(f"sqlite:///{path}") as store:
            store.add([record("a")])
        before = path.read_bytes()
        with Store(f"sqlite:///{path}", readonly=True) as store:
            assert store.count() == 1
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_a_missing_file_is_not_created(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="there is no telemetry database"):
            Store(f"sqlite:///{tmp_path / 't.db'}", readonly=True)
        assert list(tmp_path.iterdir()) == []

    def test_in_memory_makes_no_sense(self) -> None:
        with pytest.raises(StoreError, match="readonly"):
            Store("sqlite://", readonly=True)


class TestFile:
    def test_settings(self, tmp_path: Path) -> None:
        with Store(f"sqlite:///{tmp_path / 't.db'}") as store, store._transaction(write=True) as connection:
            found = {
                name: connection.execute(text(f"PRAGMA {name}")).scalar()
                for name in ("journal_mode", "synchronous", "busy_timeout", "application_id", "foreign_keys")
            }
        assert found == {
            "journal_mode": "wal",
            "synchronous": 1,
            "busy_timeout": 10_000,
            "application_id": APPLICATION_ID,
            "foreign_keys": 1,
        }

    def test_a_write_waits_for_another_process(self, tmp_path: Path) -> None:
        path = tmp_path / "t.db"
        with (
            Store(f"sqlite:///{path}") as store,
            closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other,
        ):
            other.execute("BEGIN IMMEDIATE")
            threading.Timer(0.3, other.execute, ["COMMIT"]).start()
            started = time.monotonic()
            store.add([record("a")])
            assert time.monotonic() - started > 0.2
            assert store.count() == 1

    def test_relative_to_the_folder_in_which_it_was_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(tmp_path)
        with Store("sqlite:///odd name #%20.db") as store:
            monkeypatch.chdir(elsewhere)
            store.add([record("a")])
            assert store.count() == 1
        assert (tmp_path / "odd name #%20.db").exists()
        assert list(elsewhere.iterdir()) == []

    def test_a_second_store_does_not_drop_the_locks_of_the_first(self, tmp_path: Path) -> None:
        address = f"sqlite:///{tmp_path / 't.db'}"
        with Store(address) as first, first._transaction(write=True):
            Store(address, readonly=True).close()
            code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
            done = subprocess.run([sys.executable, "-c", code, tmp_path / "t.db"], capture_output=True, text=True)
            assert "locked" in done.stderr

    def test_a_deleted_file_is_an_error_not_a_new_one(self, tmp_path: Path) -> None:
        with Store(f"sqlite:///{tmp_path / 't.db'}") as store:
            (tmp_path / "t.db").unlink()
            store._engine.dispose()  # type: ignore[union-attr]
            with pytest.raises(StoreError, match="unable to open"):
                store.add([record("a")])

    @pytest.mark.parametrize("readonly", [False, True])
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: path.write_bytes(b"not a database at all, " * 60), "is not a SQLite database"),
            (lambda path: _run(path, "CREATE TABLE invoices (x)"), "belongs to another application"),
            (lambda path: _run(path, "PRAGMA journal_mode = WAL", "CREATE VIEW v AS SELECT 1"), "another application"),
            (
                lambda path: _run(path, "CREATE TABLE t (x)", "DROP TABLE t", "PRAGMA application_id = 7"),
                "application_id 0x7",
            ),
            (lambda path: _make_newer(path), "newer autospec"),
            (lambda path: path.mkdir(), "is a folder"),
        ],
        ids=["garbage", "foreign table", "foreign view in WAL", "foreign application_id", "newer", "folder"],
    )
    def test_refused_untouched(
        self, tmp_path: Path, make: Callable[[Path], object], message: str, readonly: bool
    ) -> None:
        path = tmp_path / "t.db"
        make(path)
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(StoreError, match=message) as caught:
            Store(f"sqlite:///{path}", readonly=readonly)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        assert before is None or path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="does not exist: create it"):
            Store(f"sqlite:///{tmp_path / 'none' / 't.db'}")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody can create a file")
    def test_a_folder_in_which_nothing_can_be_created(self) -> None:
        with pytest.raises(StoreError, match="/proc"):
            Store("sqlite:////proc/t.db")

    def test_an_empty_file_is_a_fresh_database(self, tmp_path: Path) -> None:
        (tmp_path / "t.db").touch()
        with Store(f"sqlite:///{tmp_path / 't.db'}") as store:
            assert store.count() == 0

    def test_a_restored_dump_is_ours(self, tmp_path: Path) -> None:
        with Store(f"sqlite:///{tmp_path / 'a.db'}") as store:
            store.add([record("a")])
        with (
            closing(sqlite3.connect(tmp_path / "a.db")) as source,
            closing(sqlite3.connect(tmp_path / "b.db")) as target,
        ):
            target.executescript("\n".join(source.iterdump()))
        with Store(f"sqlite:///{tmp_path / 'b.db'}") as store:
            assert store.count() == 1

    def test_unwritable(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Root may write anywhere, so this runs as nobody where need be."""
        folder = tmp_path_factory.mktemp("unwritable")
        with Store(f"sqlite:///{folder / 't.db'}") as store:
            store.add([record("a")])
        shared = Path("/tmp") / f"autospec-{os.getpid()}-{time.time_ns()}"
        folder.rename(shared)
        try:
            (shared / "t.db").chmod(0o444)
            shared.chmod(0o555)

            def work(number: int) -> None:
                if os.getuid() == 0:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                with pytest.raises(StoreError, match=r"t\.db cannot be written to"):
                    Store(f"sqlite:///{shared / 't.db'}")
                with pytest.raises(StoreError, match=r"the folder .* cannot be written to"):
                    Store(f"sqlite:///{shared / 'new.db'}")
                with Store(f"sqlite:///{shared / 't.db'}", readonly=True) as store:
                    assert store.count() == 1

            in_children(1, work)
            assert [path.name for path in shared.iterdir()] == ["t.db"]
        finally:
            shared.chmod(0o755)
            for path in shared.iterdir():
                path.unlink()
            shared.rmdir()


def _run(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def _make_newer(path: Path) -> None:
    Store(f"sqlite:///{path}").close()
    _run(path, "UPDATE autospec_version SET version_num = '9999'")


class TestServer:
    @pytest.fixture
    def address(self) -> Iterator[str]:
        with fresh_database() as address:
            yield address

    def test_plain_postgresql_means_psycopg(self, address: str) -> None:
        with Store(address.replace("+psycopg", "")) as store:
            store.add([record("a")])
            assert store.count() == 1

    @pytest.mark.parametrize("readonly", [False, True])
    def test_refuses_what_is_not_ours(self, address: str, readonly: bool) -> None:
        engine = create_engine(address)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE invoices (x int)"))
        with pytest.raises(StoreError, match="another application"):
            Store(address, readonly=readonly)
        with engine.begin() as connection:
            assert connection.scalar(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")) == 1
        engine.dispose()

    def test_refuses_a_newer_schema(self, address: str) -> None:
        with Store(address) as store, store._transaction(write=True) as connection:
            connection.execute(text("UPDATE autospec_version SET version_num = '9999'"))
        with pytest.raises(StoreError, match="newer autospec"):
            Store(address)

    def test_unreachable(self) -> None:
        with pytest.raises(StoreError, match="cannot be used") as caught:
            Store("postgresql://somebody:secret@127.0.0.1:1/nothing")
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_connections_that_died_are_replaced(self, address: str) -> None:
        with Store(address) as store:
            store.add([record("a")])
            engine = create_engine(address)
            with engine.begin() as connection:
                connection.execute(
                    text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
                )
            engine.dispose()
            store.add([record("b")])
            assert store.count() == 2


class TestUrls:
    @pytest.mark.parametrize(
        "bad",
        [
            "mysql://me:secret@host/db",
            "nonsense",
            "",
            "sqlite:///a.db?mode=ro",
            "sqlite:///a?b.db",
            "sqlite://host/a.db",
        ],
    )
    def test_others_are_refused(self, bad: str) -> None:
        with pytest.raises(ConfigurationError, match=r"sqlite:///file\.db") as caught:
            Store(bad)
        assert "secret" not in str(caught.value)

    def test_a_missing_driver_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'psycopg\[binary\]'"):
            Store("postgresql://host/db")

    def test_importing_loads_no_database_library(self) -> None:
        code = (
            "import sys, autospec, autospec.telemetry\n"
            "heavy = {'sqlalchemy', 'alembic', 'pandas', 'numpy', 'psycopg', 'starlette'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
            "from autospec.telemetry import Store\n"
            "assert 'alembic' not in sys.modules\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
