"""Engines known by their counters: sums over time, restarts and scrapers, on both databases."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic import command
from click.testing import CliRunner

from autospec.cli.main import group
from autospec.errors import ConfigurationError
from autospec.telemetry.codec import to_entry
from autospec.telemetry.engines import EngineSums, engine_sums
from autospec.telemetry.hourly import build_hourly_report
from autospec.telemetry.migrate import alembic_config
from autospec.telemetry.recorder import Recorder
from autospec.telemetry.render_csv import to_csv
from autospec.telemetry.report import build_report, to_dict, to_html, to_text
from autospec.telemetry.store import Store
from autospec.telemetry.upkeep import check, prune
from autospec.types import EngineCounters
from tests.postgres_server import fresh_database
from tests.test_telemetry_hourly import traffic

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
BEGAN = NOON - timedelta(minutes=30)


@pytest.fixture(params=["file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield f"sqlite:///{tmp_path / 't.db'}"


def counted(minutes: float, tokens: int, began_at: datetime | None = BEGAN, **changes: object) -> EngineCounters:
    """An engine after so many tokens: a request for 100 of them, a draft for 10, of 3 tokens with 2 accepted."""
    drafts = tokens // 10
    found = EngineCounters(
        engine="a:8000",
        target="org/model",
        device="vllm",
        source="ngram",
        scraped_at=NOON + timedelta(minutes=minutes),
        began_at=began_at,
        requests=tokens // 100,
        prompt_tokens=tokens // 2,
        output_tokens=tokens,
        request_tokens=tokens // 100 * 100,
        request_seconds=tokens // 100 * 4.0,
        steps=tokens // 4,
        num_drafts=drafts,
        num_draft_tokens=3 * drafts,
        num_accepted_tokens=2 * drafts,
        accepted=(drafts, drafts, 0),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def write(store: Store, *counters: EngineCounters) -> None:
    store.write([to_entry(each) for each in counters])


def tokens(store: Store, since: datetime | None = None, until: datetime | None = None) -> int | None:
    found = engine_sums(store, since, until)
    return found[0].output_tokens if found else None


def hours(number: float) -> datetime:
    return NOON + timedelta(hours=number)


def test_the_newest_counts_are_the_sums_and_the_same_scrape_again_changes_nothing(url: str) -> None:
    with Store(url) as store:
        for minutes, count in ((1, 100), (20, 450), (20, 450), (1, 100), (59, 900)):
            write(store, counted(minutes, count))
        (found,) = engine_sums(store)
        assert found == EngineSums(
            "a:8000", "org/model", "vllm", "ngram", BEGAN, NOON + timedelta(minutes=59),
            9, 450, 900, 900, 36.0, 225, 90, 270, 180, (90, 90, 0),
        )  # fmt: skip
        assert found.tokens_per_second == 25.0
        assert found.tokens_per_step == 4.0
        assert found.mean_acceptance_length == 3.0
        assert found.share_accepted == (1.0, 1.0, 0.0)
        assert store.count() == 0
        assert check(store) == []


def test_what_is_counted_between_two_times(url: str) -> None:
    with Store(url) as store:
        write(store, *(counted(60 * hour + 5, 1000 * (hour + 1)) for hour in range(5)))
        assert tokens(store) == 5000
        assert tokens(store, hours(1), hours(3)) == 2000
        assert tokens(store, hours(1)) == 4000
        assert tokens(store, None, hours(1)) == 1000
        assert tokens(store, hours(7)) is None
        (found,) = engine_sums(store, hours(1), hours(3))
        assert (found.first, found.last) == (hours(0) + timedelta(minutes=5), hours(2) + timedelta(minutes=5))
        assert found.accepted == (200, 200, 0)


def test_what_began_long_before_belongs_to_no_shorter_time(url: str) -> None:
    with Store(url) as store:
        write(store, counted(10, 5000, NOON - timedelta(days=3)))
        assert tokens(store) == 5000
        assert tokens(store, NOON) is None
        write(store, counted(70, 5600, NOON - timedelta(days=3)))
        assert tokens(store, hours(1)) == 600


@pytest.mark.parametrize("is_known", [True, False])
def test_an_engine_that_is_started_anew_counts_from_nothing(url: str, is_known: bool) -> None:
    again = NOON + timedelta(minutes=31)
    with Store(url) as store:
        write(store, counted(10, 900, BEGAN if is_known else None), counted(30, 1000, BEGAN if is_known else None))
        write(store, counted(40, 200, again if is_known else None), counted(70, 300, again if is_known else None))
        assert tokens(store) == 1300
        assert tokens(store, hours(1)) == 100
        (found,) = engine_sums(store)
        assert found.first == (BEGAN if is_known else NOON + timedelta(minutes=10))
        assert found.requests == 13


def test_a_scrape_that_was_overtaken_is_no_restart(url: str) -> None:
    with Store(url) as store:
        write(store, counted(10, 1000, None))
        write(store, counted(10 + 1 / 60, 990, None))  # read before, written later, by a clock that is ahead
        write(store, counted(9, 900, None))
        assert tokens(store) == 1000


def test_an_old_file_with_a_new_date_takes_nothing_back(url: str) -> None:
    with Store(url) as store:
        write(store, counted(10, 1000))
        write(store, counted(200, 400))
        assert tokens(store) == 1000


def test_scrapes_far_apart_count_from_the_first_one_within(url: str) -> None:
    with Store(url) as store:
        write(store, *(counted(60 * 24 * day, 100 * (day + 1)) for day in range(5)))
        (found,) = engine_sums(store, hours(24 * 2 - 5))
        assert found.output_tokens == 200
        assert found.first == hours(24 * 2)


@pytest.mark.parametrize("is_known", [True, False])
def test_any_number_of_scrapers_count_once(url: str, is_known: bool) -> None:
    """Threads that read one growing engine, and write when they come to it. It is started anew once."""
    lives = [(BEGAN, [counted(n / 2, 100 * n) for n in range(1, 40)]), (hours(1), [])]
    lives[1][1].extend(counted(60 + n / 2, 100 * n, hours(1)) for n in range(1, 40))
    said = [replace(each, began_at=began if is_known else None) for began, life in lives for each in life]
    place, lock = iter(said), threading.Lock()
    failures: list[BaseException] = []

    def scrape(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while True:
                with lock:
                    if (each := next(place, None)) is None:
                        return
                    if chance.random() < 0.5:  # the other half is written late
                        write(store, each)
                        continue
                write(store, each)
        except BaseException as error:  # noqa: BLE001  # for the test to show
            failures.append(error)

    stores = [Store(url) for _ in range(3)]
    threads = [threading.Thread(target=scrape, args=(store, n)) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    total = tokens(stores[0])
    assert total is not None
    assert total == 7800 if is_known else 7500 <= total <= 7800  # the last before the restart may have come too late
    assert len(engine_sums(stores[0])) == 1
    for store in stores:
        store.close()


def test_two_scrapers_that_see_a_restart_at_once_see_one(url: str) -> None:
    """Of an engine that does not say when it began."""
    with Store(url) as store:
        write(store, counted(0, 5000, None))
    barrier = threading.Barrier(2)

    def see(count: int, seconds: float) -> None:
        with Store(url) as store:
            barrier.wait()
            write(store, counted(10 + seconds / 60, count, None))

    threads = [threading.Thread(target=see, args=args) for args in ((300, 0.2), (310, 0.4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(url) as store:
        assert tokens(store) == 5310
        write(store, counted(20, 400, None))
        assert tokens(store) == 5400


def test_engines_are_told_apart_and_filtered(url: str) -> None:
    with Store(url) as store:
        write(
            store,
            counted(1, 100),
            counted(1, 200, engine="b:8000", device="vllm: cuda: H200", num_drafts=None, accepted=()),
            counted(1, 400, target="other"),
        )
        assert [(each.engine, each.target) for each in engine_sums(store)] == [
            ("a:8000", "org/model"),
            ("a:8000", "other"),
            ("b:8000", "org/model"),
        ]
        assert [each.output_tokens for each in engine_sums(store, target="other")] == [400]
        (found,) = engine_sums(store, device="vllm: cuda: H200")
        assert (found.output_tokens, found.num_drafts, found.mean_acceptance_length) == (200, None, None)
        assert found.share_accepted == ()


@pytest.mark.parametrize(
    "changes", [{"output_tokens": -1}, {"request_seconds": float("nan")}, {"accepted": (1 << 63,)}]
)
def test_what_no_engine_counts_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with Store(f"sqlite:///{tmp_path / 't.db'}") as store:
        with pytest.raises(ConfigurationError, match="must hold counts"):
            write(store, counted(1, 100, **changes))
        assert engine_sums(store) == ()


def test_hostile_names_are_stored_and_shown(url: str) -> None:
    name = "<script>alert(1)</script>\x00" + "y" * 5_000
    with Store(url) as store:
        write(store, counted(1, 100, engine=name, target=name, source=name))
        report = replace(build_hourly_report(store), engines=engine_sums(store))
    assert "<script>alert" not in to_html(report)
    assert max(map(len, to_text(report).splitlines())) <= 120


def test_pruning_leaves_what_later_hours_are_compared_with(url: str) -> None:
    old = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=10)
    with Store(url) as store:
        for hour in range(10):
            write(store, counted(0, 100 * (hour + 1), old, scraped_at=old + timedelta(hours=hour, minutes=5)))
        write(store, counted(0, 70, old, engine="gone", scraped_at=old + timedelta(minutes=5)))
        prune(store, old + timedelta(hours=5), hours=True)
        assert tokens(store, old + timedelta(hours=5)) == 500
        (found,) = engine_sums(store)
        assert found.output_tokens == 1000  # counted since it began
        with store.reading() as connection:
            (rows,) = connection.exec_driver_sql("SELECT COUNT(*) FROM engine_counters").one()
        assert rows == 6


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_export_import_and_merge_carry_them(url: str, tmp_path: Path, file_format: str) -> None:
    with Store(url) as store:
        # more than a page, and more than a life
        write(store, *(counted(60 * n, 100 * (n + 1)) for n in range(2100)))
        write(store, counted(60 * 2101, 50, hours(2100), num_drafts=None, accepted=()))
        expected = engine_sums(store), engine_sums(store, hours(10), hours(20))
    other, third = (f"sqlite:///{tmp_path / name}" for name in ("other.db", "third.db"))
    folder = str(tmp_path / "export")
    for arguments in (
        ["export", "--store", url, "--out", folder, "--format", file_format],
        ["import", "--store", other, folder],
        ["import", "--store", other, folder],
        ["merge", third, url],
        ["merge", third, other],
    ):
        done = CliRunner().invoke(group, ["db", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    for each in (other, third):
        with Store(each) as store:
            assert (engine_sums(store), engine_sums(store, hours(10), hours(20))) == expected


def test_a_recorder_writes_them_and_a_spool_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPEC_SPOOL", str(tmp_path / "spool"))
    url = f"sqlite:///{tmp_path / 't.db'}"
    with Recorder(url) as recorder:
        recorder.note(counted(1, 100))
        assert recorder.flush()
    with Store(url) as store:
        assert tokens(store) == 100


def test_an_older_database_gets_the_table(url: str) -> None:
    with Store(url) as store:
        store.add(traffic(20))
        with store.writing() as connection:
            command.downgrade(alembic_config(connection), "0003")
    with Store(url) as store:
        assert store.count() == 20
        assert check(store) == []
        write(store, counted(1, 100))
        assert tokens(store) == 100


class TestReport:
    def test_engines_stand_beside_requests_and_in_no_number_of_theirs(self) -> None:
        engines = (_sums("a:8000"), _sums("b:8000", num_drafts=None, accepted=()))
        plain = build_report(traffic(50), [])
        report = replace(plain, engines=engines)
        assert to_dict(report)["all"] == to_dict(plain)["all"]
        assert to_csv(report) == to_csv(plain)
        text = to_text(report)
        assert text.replace("\n", " ").count("Engines by their own counters") == 1
        assert text.count("a:8000") == text.count("b:8000") == 2
        assert max(len(line) for line in text.splitlines()) <= 120
        assert "How the intervals" in text or "No interval" in text
        html = to_html(report)
        assert html.count("b:8000") == 2
        first, second = to_dict(report)["engines"]
        assert (first["mean_acceptance_length"], first["accepted"]) == (3.0, [90, 90, 0])
        assert (second["mean_acceptance_length"], second["num_drafts"]) == (None, None)

    def test_engines_alone_are_a_report(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 't.db'}"
        with Store(url) as store:
            write(store, counted(1, 900), counted(70, 1000))
        runner = CliRunner()
        shown = runner.invoke(group, ["report", "--store", url, "--html", str(tmp_path / "r.html")])
        assert shown.exit_code == 0, shown.output
        assert "a:8000" in shown.stdout
        assert "No requests" not in shown.stdout
        assert "No interval" not in shown.stdout
        page = (tmp_path / "r.html").read_text(encoding="utf-8")
        assert "a:8000" in page
        assert "No speed-up" not in page
        part = runner.invoke(group, ["report", "--store", url, "--since", "2026-03-01T13", "--json"])
        assert '"output_tokens": 100,' in part.stdout
        run = runner.invoke(group, ["report", "--store", url, "--since", "2026-03-02", "--json"])
        assert '"engines": []' in run.stdout


def _sums(engine: str, **changes: object) -> EngineSums:
    found = EngineSums(
        engine, "org/model", "vllm", "ngram", BEGAN, NOON, 9, 450, 900, 900, 36.0, 225, 90, 270, 180, (90, 90, 0)
    )
    return replace(found, **changes)  # type: ignore[arg-type]
