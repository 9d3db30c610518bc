"""`autospec db`, and the report's newer options."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import select

from autospec.cli.main import group
from autospec.telemetry.codec import to_entry
from autospec.telemetry.hourly import build_hourly_report, num_requests
from autospec.telemetry.recorder import Recorder
from autospec.telemetry.report import to_dict
from autospec.telemetry.schema import CalibrationRow
from autospec.telemetry.store import Store
from autospec.telemetry.upkeep import prune
from autospec.types import CalibrationSample, Comparison, PolicyState, PolicyVersion, RecordedTokens
from tests.postgres_server import fresh_database
from tests.test_telemetry_hourly import COUNTED_ALIKE, HERE, NOON, traffic
from tests.test_telemetry_spool import Locked


@pytest.fixture(params=["file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield f"sqlite:///{tmp_path / 't.db'}"


LEARNED = {"segments": {"z": {"blocks": 3}, "a": {"blocks": 0.1}}}
OLDER = {"a process before": NOON - timedelta(days=1)}
SAVED = [(f"process {n:02}", NOON + timedelta(hours=n)) for n in range(45)]  # more than are read at a time

TOKENS = RecordedTokens((1, 2, 70_000), (3,), {"temperature": 0.8, "eos_token_id": [2]})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, list(arguments), catch_exceptions=False)


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fill(url: str, count: int = 200) -> None:
    with Store(url) as store:
        store.add(traffic(count), [Comparison("0-1", "0-2", True), Comparison("0-3", "0-4", False, 7, 0.5, True)])
        store.write(
            [
                to_entry(PolicyVersion("auto", "abc", {"gain": 0.02, "nested": {"a": [1]}}, "wrap", NOON)),
                to_entry(CalibrationSample(HERE, NOON, "target", 2, 64, 0.05)),
                *(to_entry(PolicyState(HERE, "auto", "abc", name, when, LEARNED, OLDER)) for name, when in SAVED),
                to_entry(replace(traffic(1, seed=9)[0], trace=b"\x00\xffbytes", tokens=TOKENS)),
            ]
        )


def content(url: str) -> tuple[object, ...]:
    with Store(url, readonly=True) as store:
        records = {record.request_id: record for record in store.requests()}
        with store.reading() as connection:
            rest = [
                sorted(map(repr, connection.exec_driver_sql(query).all()))
                for query in (
                    "SELECT name, version, made_by, made_at FROM policy_versions",
                    "SELECT source, tokens, context_tokens, seconds FROM calibration_samples",
                    "SELECT request_id FROM block_traces",
                    "SELECT family, version, process, policy, updated_at FROM policy_states",
                )
            ]
        report = to_dict(build_hourly_report(store))
        rest.append(list(map(repr, store.recordings())))
        states, num_damaged = store.policy_states(HERE, "abc", NOON - timedelta(days=1), 1_000)
        assert not num_damaged
        assert all(list(each.state["segments"]) == ["z", "a"] for each in states)  # type: ignore[call-overload]
        rest.append(list(map(repr, states)))
        return records, sorted(store.comparisons(), key=repr), rest, report["all"]["requests"]


class TestTransfer:
    @pytest.mark.parametrize("file_format", ["csv", "parquet"])
    def test_there_and_back(self, url: str, tmp_path: Path, file_format: str) -> None:
        fill(url)
        out = tmp_path / "export"
        text = said("db", "export", "--store", url, "--out", str(out), "--format", file_format)
        assert f"requests.{file_format}: 201 rows" in text
        other = f"sqlite:///{tmp_path / 'other.db'}"
        assert said("db", "import", "--store", other, str(out)) == "201 new requests\n"
        assert said("db", "import", "--store", other, str(out)) == "0 new requests\n"
        assert content(other) == content(url)
        again = run("db", "export", "--store", url, "--out", str(out), "--format", file_format)
        assert again.exit_code == 2
        assert "already there" in again.stderr

    def test_prompts_can_stay_behind(self, tmp_path: Path) -> None:
        fill(url := f"sqlite:///{tmp_path / 't.db'}", 5)
        out = tmp_path / "export"
        said("db", "export", "--store", url, "--out", str(out), "--format", "csv", "--without-recordings")
        other = f"sqlite:///{tmp_path / 'other.db'}"
        said("db", "import", "--store", other, str(out))
        with Store(other) as store:
            assert store.count() == 6
            assert list(store.recordings()) == []

    def test_merging_two_that_overlap(self, url: str, tmp_path: Path) -> None:
        fill(url, 150)
        other = f"sqlite:///{tmp_path / 'other.db'}"
        fill(other, 200)
        assert said("db", "merge", url, other) == "50 new requests\n"
        assert said("db", "merge", url, other) == "0 new requests\n"
        assert content(url) == content(other)

    def test_files_that_are_not_ours(self, tmp_path: Path) -> None:
        store = f"sqlite:///{tmp_path / 'x.db'}"
        folder = tmp_path / "export"
        folder.mkdir()
        empty = run("db", "import", "--store", store, str(folder))
        assert (empty.exit_code, "holds no export" in empty.stderr) == (2, True)
        for name, text in (
            ("requests.csv", b"a,b\n1,2\n"),
            ("requests.csv", b"a,b\nplain text,2\n"),
            ("comparisons.csv", b'request_id\n"x"\n'),
            ("requests.parquet", b"no parquet at all"),
        ):
            (folder / name).write_bytes(text)
            wrong = run("db", "import", "--store", store, str(folder))
            assert wrong.exit_code == 2
            assert len(wrong.stderr.splitlines()) == 1
            (folder / name).unlink()
        with Store(store) as opened:
            assert opened.count() == 0


class TestPrune:
    def test_requests_go_and_sums_stay(self, url: str) -> None:
        fill(url)
        with Store(url, readonly=True) as store:
            before = to_dict(build_hourly_report(store))
            comparisons = len(store.comparisons())
        age = f"{(datetime.now(UTC) - NOON - timedelta(hours=40)) // timedelta(hours=1)}h"
        text = said("db", "prune", "--store", url, "--older-than", age, "--dry-run")
        assert "nothing was deleted" in text
        count = int(text.split()[0])
        assert 50 < count < 150
        assert said("db", "prune", "--store", url, "--older-than", age).startswith(f"{count} requests deleted")
        assert said("db", "vacuum", "--store", url) == "done\n"
        with Store(url, readonly=True) as store:
            assert store.count() == 201 - count
            left, _ = store.policy_states(HERE, "abc", NOON - timedelta(days=1), 1_000)
            assert [each.process for each in left] == [f"process {n}" for n in range(44, 40, -1)]
            found = to_dict(build_hourly_report(store))
            for ours, theirs in zip(
                [*found["segments"], found["all"]], [*before["segments"], before["all"]], strict=True
            ):
                assert [ours[name] for name in COUNTED_ALIKE] == [theirs[name] for name in COUNTED_ALIKE]
                assert ours["seconds"] == pytest.approx(theirs["seconds"])
            assert len(store.comparisons()) <= comparisons
        assert said("db", "check", "--store", url) == "no damage found\n"
        fill(url)  # as a replay or an import of what was pruned would
        with Store(url, readonly=True) as store:
            assert store.count() == 201 - count
            assert len(store.policy_states(HERE, "abc", NOON - timedelta(days=1), 1_000)[0]) == 4
            assert num_requests(store) == 201
        assert said("db", "check", "--store", url) == "no damage found\n"
        said("db", "prune", "--store", url, "--older-than", age, "--hours")
        with Store(url, readonly=True) as store:
            assert build_hourly_report(store).all.requests < before["all"]["requests"]

    def test_what_a_device_cost_goes_once_it_was_measured_again(self, url: str) -> None:
        """Engines write it every ten minutes."""
        other = replace(HERE, device="another")
        when = [(HERE, NOON), (HERE, NOON + timedelta(hours=1)), (HERE, datetime.now(UTC)), (other, NOON)]
        with Store(url) as store:
            store.write(
                [
                    to_entry(CalibrationSample(place, time, "target", tokens, 0, 0.05))
                    for place, time in when
                    for tokens in (1, 2)
                ]
            )
            prune(store, NOON + timedelta(hours=2))
            with store.reading() as connection:
                left = connection.execute(select(CalibrationRow.measured_at, CalibrationRow.tokens)).all()
        assert sorted(tuple(row) for row in left) == [
            (time, tokens) for time in (NOON, when[2][1]) for tokens in (1, 2)
        ]

    @pytest.mark.parametrize("age", ["1", "-3d", "3 d", "99999999999w", "x", "3h"])
    def test_ages_that_make_no_sense(self, tmp_path: Path, age: str) -> None:
        fill(url := f"sqlite:///{tmp_path / 't.db'}", 10)
        result = run("db", "prune", "--store", url, f"--older-than={age}")
        assert result.exit_code == 2
        with Store(url) as store:
            assert store.count() == 11


class TestCheck:
    def test_a_sound_database(self, url: str) -> None:
        fill(url)
        assert said("db", "check", "--store", url) == "no damage found\n"

    @pytest.mark.parametrize(
        ("damage", "word"),
        [
            ("UPDATE hourly_requests SET requests = 0", "sums"),
            ("UPDATE hourly_requests SET requests = 2 * requests", "sums"),
            ("DROP TABLE hourly_requests", "hourly_requests is missing"),
            ("DELETE FROM hourly_requests", "sums"),
            ("DROP INDEX ix_requests_segment_started_at", "index"),
            ("ALTER TABLE requests DROP COLUMN decisions", "lacks decisions"),
            ("DROP TABLE block_traces", "block_traces is missing"),
            ("DROP TABLE policy_states", "policy_states is missing"),
            (
                "UPDATE policy_states SET state = SUBSTR(state, 1, 5) WHERE process < 'process 03'",
                "3 of 45 learned states",
            ),
        ],
    )
    def test_damage_is_named(self, url: str, damage: str, word: str) -> None:
        fill(url)
        with Store(url) as store, store.writing() as connection:
            connection.exec_driver_sql(damage)
        result = run("db", "check", "--store", url)
        assert result.exit_code == 1
        assert word in result.stdout

    def test_a_file_with_a_hole(self, tmp_path: Path) -> None:
        fill(f"sqlite:///{tmp_path / 't.db'}", 400)
        with sqlite3.connect(tmp_path / "t.db") as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        data = bytearray((tmp_path / "t.db").read_bytes())
        data[len(data) // 2 : len(data) // 2 + 8_192] = b"\xaa" * 8_192
        (tmp_path / "t.db").write_bytes(data)
        result = run("db", "check", "--store", f"sqlite:///{tmp_path / 't.db'}")
        assert result.exit_code == 1
        assert "damaged" in result.output or "malformed" in result.output


@pytest.mark.parametrize("command", [["vacuum"], ["replay"], ["prune", "--older-than", "9d"]])
def test_a_mistyped_path_makes_no_database(tmp_path: Path, command: list[str]) -> None:
    result = run("db", *command, "--store", f"sqlite:///{tmp_path / 'typo.db'}")
    assert result.exit_code == 2
    assert "there is no telemetry database" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_waits_is_named_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOSPEC_SPOOL", str(tmp_path / "spools"))
    monkeypatch.setattr("autospec.telemetry.sqlite.BUSY_SECONDS", 0.02)
    monkeypatch.setattr("autospec.telemetry.store.RETRY_SECONDS", 0.05)
    url = f"sqlite:///{tmp_path / 't.db'}"
    recorder = Recorder(url, flush_seconds=0.01)
    with Locked(tmp_path / "t.db"):
        for record in traffic(30):
            recorder.record(record)
        recorder.close(timeout=0.3)
    assert "records wait in 1 spool files" in said("db", "check", "--store", url)
    assert said("db", "replay", "--store", url) == "30 records written\n"
    assert said("db", "replay", "--store", url) == "0 records written\n"
    with Store(url) as store:
        assert store.count() == 30


class TestReport:
    def test_csv(self, url: str) -> None:
        fill(url)
        rows = list(csv.DictReader(io.StringIO(said("report", "--store", url, "--by", "segment,policy", "--csv"))))
        assert [row["segment"] for row in rows] == ["code", "code", "prose", "prose", "all"]
        whole = json.loads(said("report", "--store", url, "--by", "segment,policy", "--json"))
        assert [row["requests"] for row in rows] == [str(r["requests"]) for r in (*whole["segments"], whole["all"])]
        assert float(rows[0]["seconds.total"]) == pytest.approx(whole["segments"][0]["seconds"]["total"])

    def test_a_name_is_no_formula(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 't.db'}"
        with Store(url) as store:
            store.add([replace(record, segment="=1+1") for record in traffic(5)])
        assert "'=1+1" in said("report", "--store", url, "--csv")

    def test_from_sums(self, url: str) -> None:
        fill(url)
        summed = json.loads(said("report", "--store", url, "--basis", "hours", "--json"))
        single = json.loads(said("report", "--store", url, "--basis", "requests", "--json"))
        assert summed["all"]["requests"] == single["all"]["requests"]
        assert "sums by the hour" in said("report", "--store", url, "--basis", "hours")

    def test_many_requests_are_summed_by_themselves(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(url)
        monkeypatch.setattr("autospec.cli.report.MOST_REQUESTS", 100)
        assert json.loads(said("report", "--store", url, "--json"))["basis"] == "hours"
        assert json.loads(said("report", "--store", url, "--json", "--by", "source"))["basis"] == "requests"

    def test_a_period(self, url: str) -> None:
        fill(url)
        assert "requests" in said("report", "--store", url, "--since", "2026-03-01T12:30", "--json")
        until = f"{NOON + timedelta(hours=20):%Y-%m-%dT%H:%M}"
        counts = [
            json.loads(said("report", "--store", url, "--until", until, "--basis", basis, "--json"))["all"]["requests"]
            for basis in ("requests", "hours")
        ]
        assert counts[0] == counts[1] > 0

    @pytest.mark.parametrize(
        "options",
        [
            ["--by", "tenant"],
            ["--basis", "hours", "--by", "source"],
            ["--basis", "hours", "--since", "2026-03-01T10:30"],
            ["--json", "--csv"],
            ["--since", "x"],
        ],
    )
    def test_wrong_questions(self, tmp_path: Path, options: list[str]) -> None:
        fill(url := f"sqlite:///{tmp_path / 't.db'}", 5)
        assert run("report", "--store", url, *options).exit_code == 2

    def test_by_day_and_source(self, url: str) -> None:
        fill(url)
        rows = json.loads(said("report", "--store", url, "--by", "day,source", "--json"))["segments"]
        assert {row["group"]["source"] for row in rows} == {"ngram"}
        assert rows[0]["group"]["day"] == "2026-03-01"
        assert rows[0]["control_requests"] > 0
