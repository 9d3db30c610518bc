"""What the dashboard's pages are made of: the report's own numbers, read in slices."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from autospec.cli.report import load_report as command_report
from autospec.errors import ConfigurationError
from autospec.telemetry.dashboard import reports
from autospec.telemetry.dashboard.buckets import load_actions, load_traffic, span_of
from autospec.telemetry.dashboard.decisions import load_decisions
from autospec.telemetry.dashboard.filters import Filters, parse
from autospec.telemetry.dashboard.overview import Line, load_options, load_overview, ordered
from autospec.telemetry.dashboard.remembered import Remembered
from autospec.telemetry.dashboard.reports import load_report, newest, newest_requests, stamp
from autospec.telemetry.dashboard.request import cells, load_request
from autospec.telemetry.dashboard.segment import interpolate, load_segment, survive
from autospec.telemetry.dashboard.slices import Slice
from autospec.telemetry.pages.formats import count, duration, iso, percent
from autospec.telemetry.pages.marks import LEAST_GAP, WIDTH, Axis, gaps
from autospec.telemetry.report import to_dict
from autospec.telemetry.store import Store
from tests.dashboard_stores import HERE, NOON, THERE, blocks, file_url, fill, pairs, record
from tests.postgres_server import fresh_database

EVERYTHING = Filters()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield file_url(tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store(url) as writing:
        fill(writing)
    with Store(url, readonly=True) as opened:
        yield opened


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """SQL that was run since."""
    found: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield found
    event.remove(Engine, "before_cursor_execute", note)


class TestFilters:
    def test_an_address_and_back(self) -> None:
        pairs_ = [("since", "2026-10-24T12Z"), ("until", "2026-10-26"), ("target", "a&b"), ("decoding", "sampled")]
        filters, others = parse([*pairs_, ("sort", "-saved"), ("policy", "")], NOON, ("sort",))
        assert (filters.since, filters.until) == (NOON, datetime(2026, 10, 26, tzinfo=UTC))
        assert (filters.target, filters.policy, filters.do_sample, others) == ("a&b", None, True, {"sort": "-saved"})
        assert filters.query() == "since=2026-10-24T12Z&until=2026-10-26T00Z&target=a%26b&decoding=sampled"
        assert parse([], NOON) == (Filters(), {})

    def test_a_period_begins_at_a_full_hour(self) -> None:
        filters, _ = parse([("period", "24h")], datetime(2026, 10, 25, 12, 34, tzinfo=UTC))
        assert filters.since == NOON
        assert filters.query(segment="x") == "period=24h&segment=x"

    @pytest.mark.parametrize(
        ("pairs_", "words"),
        [
            ([("sicne", "2026-01-01")], "known are period"),
            ([("since", "2026-01-01"), ("since", "2026-01-02")], "twice"),
            ([("since", "yesterday")], "full hour in UTC"),
            ([("since", "2026-02-30")], "full hour in UTC"),
            ([("since", "2026-01-01T12:30")], "full hour in UTC"),
            ([("since", "2026-01-02"), ("until", "2026-01-01")], "not after"),
            ([("period", "24h"), ("since", "2026-01-02")], "one of the two"),
            ([("period", "1 OR 1=1")], "known are 24h"),
            ([("decoding", "beam")], "greedy, sampled"),
            ([("basis", "rows")], "auto, requests, hours"),
            ([("basis", "hours"), ("version", "v1")], "no policy versions"),
        ],
    )
    def test_what_cannot_be_meant_is_said(self, pairs_: list[tuple[str, str]], words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            parse(pairs_, NOON)


class TestReports:
    @pytest.mark.parametrize("basis", ["requests", "hours"])
    def test_numbers_are_those_of_the_command(self, store: Store, url: str, basis: str) -> None:
        ours = load_report(store, Filters(basis=basis))
        theirs = command_report(url, None, ("segment",), basis=basis)
        assert to_dict(ours) == to_dict(theirs)
        assert {row.group["segment"]: row.verdict for row in ours.segments} == (
            {"fast": "faster", "slow": "slower", "even": "unclear", "kept": None}
            if basis == "requests"
            else dict.fromkeys(["even", "fast", "kept", "slow"])
        )

    @pytest.mark.parametrize("basis", ["requests", "hours"])
    def test_a_time_range_is_that_of_the_command(self, store: Store, url: str, basis: str) -> None:
        since, until = NOON + timedelta(hours=2), NOON + timedelta(hours=14)
        ours = load_report(store, Filters(since=since, until=until, basis=basis))
        theirs = command_report(url, None, ("segment",), (since, until), basis=basis)
        assert ours.all.requests > 0
        assert {**to_dict(ours), "unmatched_comparisons": 0} == {**to_dict(theirs), "unmatched_comparisons": 0}

    @pytest.mark.parametrize("basis", ["requests", "hours"])
    def test_filters(self, store: Store, basis: str) -> None:
        def requests(**values: str) -> tuple[int, int]:
            row = load_report(store, Filters(basis=basis, **values)).all  # type: ignore[arg-type]
            return row.requests, row.control_requests

        assert requests(target=THERE.target) == requests(device=THERE.device) == requests(decoding="sampled") == (1, 0)
        assert requests(target=HERE.target, device=THERE.device) == (0, 0)
        assert requests(decoding="greedy") == (37, 36)
        assert requests(policy="auto") == (38, 36)
        assert requests(policy="fixed") == (0, 36), "a control belongs to every policy"

    def test_a_policy_version_is_known_of_requests_alone(self, store: Store) -> None:
        assert load_report(store, Filters(version="v1")).all.requests == 38
        assert load_report(store, Filters(version="v2")).all.requests == 0

    def test_many_requests_are_not_read_one_by_one(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "MOST_REQUESTS", 10)
        monkeypatch.setattr(reports, "MOST_ASKED", 20)
        assert load_report(store, EVERYTHING).basis == "hours"
        assert load_report(store, EVERYTHING, segment="kept").basis == "requests"
        for filters in (Filters(basis="requests"), Filters(version="v1")):
            with pytest.raises(ConfigurationError, match="74 requests cannot be read one by one"):
                load_report(store, filters)

    def test_pruned_requests_still_count(self, url: str) -> None:
        from autospec.telemetry.upkeep import prune

        with Store(url) as store:
            fill(store)
            prune(store, NOON + timedelta(hours=3))
            report = load_report(store, EVERYTHING)
            assert (report.basis, report.all.requests) == ("hours", 38)

    def test_the_overview_of_many_requests_reads_sums_alone(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, statements: list[str]
    ) -> None:
        monkeypatch.setattr(reports, "MOST_REQUESTS", 10)
        load_overview(store, EVERYTHING)
        load_options(store)
        tables = {name for text in statements for name in re.findall(r"(?:FROM|JOIN) \(?(\w+)", text)}
        assert "hourly_requests" in tables
        assert "requests" not in tables
        assert "comparisons" not in tables
        assert len(statements) < 30

    def test_requests_of_a_segment_are_found_by_an_index(self, tmp_path: Path) -> None:
        plans: list[str] = []

        def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
            if "FROM requests" in statement and "started_at" in statement:
                found = connection.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
                plans.append(" / ".join(str(row[-1]) for row in found))

        with Store(file_url(tmp_path)) as store:
            fill(store)
            event.listen(Engine, "before_cursor_execute", explain)
            try:
                load_segment(store, Filters(since=NOON), "fast")
                newest_requests(store, EVERYTHING, "fast")
                reports.read_requests(store, EVERYTHING)
            finally:
                event.remove(Engine, "before_cursor_execute", explain)
        assert len(plans) == 4
        assert all("ix_requests_segment_started_at" in plan and "SCAN requests" not in plan for plan in plans), plans

    def test_newest_requests(self, store: Store) -> None:
        with store.reading() as connection:
            found = [row.request_id for row in connection.execute(newest(store, EVERYTHING))]
            there = connection.execute(newest(store, Filters(device=THERE.device))).all()
        assert found[:2] == [f"{9_003:032x}", f"{9_001:032x}"]
        assert len(there) == 1
        assert {each.segment for each in newest_requests(store, EVERYTHING, "slow")} == {"slow"}
        assert newest_requests(store, Filters(device=THERE.device), "slow") == []

    def test_the_stamp_changes_with_what_is_written(self, url: str) -> None:
        with Store(url) as store:
            before = stamp(store)
            fill(store)
            after = stamp(store)
            assert before != after == stamp(store)
            store.add([record(9_999, "fast")])
            assert stamp(store) != after

    def test_the_stamp_is_of_this_database_alone(self, tmp_path: Path) -> None:
        found = []
        for number in (1, 3):
            with Store(f"sqlite:///{tmp_path / f'{number}.db'}") as store:
                store.add([record(number, "some")])
                found.append(stamp(store))
        assert found[0] != found[1]


class TestBuckets:
    def test_sums_are_the_same_in_every_cut(self, store: Store) -> None:
        report = load_report(store, EVERYTHING)
        for filters in (EVERYTHING, Filters(since=NOON), Filters(until=NOON + timedelta(days=100))):
            traffic = load_traffic(store, filters)
            assert traffic.requests == report.all.requests
            for row in report.segments:
                sums = traffic.by_segment[row.group["segment"]].sums.values()
                assert sum(each.output_tokens for each in sums) == row.output_tokens
                assert sum(each.seconds for each in sums) == pytest.approx(row.seconds.total)

    @pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata", "Europe/Berlin"])
    def test_stretches_are_whole_hours_of_utc(self, url: str, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over the night in which two hours of UTC share 02:00 in Berlin, in any zone that this machine may be in."""
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        try:
            with Store(url) as store:
                night = datetime(2026, 10, 24, 23, tzinfo=UTC)
                store.add([record(n, "night", started_at=night + timedelta(minutes=30 * n)) for n in range(8)])
                times = load_traffic(store, EVERYTHING).by_segment["night"]
                filters, _ = parse([("since", "2026-10-25"), ("until", "2026-10-25T02Z")], NOON)
                assert load_report(store, filters).all.requests == 4
        finally:
            monkeypatch.undo()
            time.tzset()
        assert times.span.step == timedelta(hours=1)
        assert [times.sums[n].requests for n in times.numbers] == [2, 2, 2, 2]
        hours = ["2026-10-24T23", "2026-10-25T00", "2026-10-25T01", "2026-10-25T02"]
        assert [iso(start) for start in times.span.starts] == [f"{hour}:00:00Z" for hour in hours]

    def test_hours_without_requests_are_gaps_and_no_zeros(self, url: str) -> None:
        with Store(url) as store:
            assert span_of(Slice(store, EVERYTHING)) is None
            records, _ = pairs("a", 1, 1.2)
            store.add(records)
            store.add([record(n, "a", is_control=n % 2 == 0, started_at=NOON + timedelta(hours=9)) for n in (900, 901)])
            times = load_traffic(store, EVERYTHING).by_segment["a"]
            assert times.span.count == 10
            assert [value is None for value in times.speed_ups] == [False, *[True] * 8, False]
            assert [len(run) for run in gaps(times.speed_ups)] == [1, 1]

    @pytest.mark.parametrize("days", [1, 3, 20, 90, 800, 9_000])
    def test_never_too_many_stretches(self, url: str, days: int) -> None:
        if url.startswith("postgres"):
            return
        with Store(url) as store:
            store.add([record(0, "a"), record(1, "a", started_at=NOON + timedelta(days=days))])
            span = span_of(Slice(store, EVERYTHING))
            assert span is not None
            assert 1 < span.count <= 60
            assert span.first <= NOON
            assert span.starts[-1] <= NOON + timedelta(days=days) < span.starts[-1] + span.step
            traffic = load_traffic(store, EVERYTHING)
            assert set(traffic.by_segment["a"].sums) == {0, span.count - 1}

    def test_segments_without_a_fresh_control(self, url: str) -> None:
        with Store(url) as store:
            old, _ = pairs("old", 2, 1.0)
            late = [record(n, "old", started_at=NOON + timedelta(days=9)) for n in (501, 503)]
            store.add([*old, *late, record(600, "fresh", is_control=True, started_at=NOON + timedelta(days=9))])
            store.add([record(n, "fresh", started_at=NOON + timedelta(days=9)) for n in (601, 603, 605, 607)])
            traffic = load_traffic(store, EVERYTHING)
            assert (traffic.stale_requests, traffic.requests) == (4, 8)
            (together,) = load_traffic(store, EVERYTHING, together=True).by_segment.values()
            assert sum(each.requests for each in together.sums.values()) == 8
            assert sum(each.control_requests for each in together.sums.values()) == 3
            assert traffic.stale_share == 0.5

    def test_actions(self, store: Store) -> None:
        found = load_actions(store, EVERYTHING)
        report = load_report(store, Filters(basis="hours"))
        assert {label: sum(counts.values()) for label, counts in found.blocks.items()} == dict(report.all.actions)
        assert list(found.plain_seconds.values()) == pytest.approx([0.04] * len(found.plain_seconds))
        assert load_actions(store, Filters(policy="auto")).blocks == {}


class TestOverview:
    def lines(self, store: Store) -> list[Line]:
        return load_overview(store, EVERYTHING).lines

    def test_the_worst_comes_first_and_what_has_no_value_last(self, store: Store) -> None:
        names = [line.name for line in ordered(self.lines(store), "speed-up")]
        assert names == ["slow", "even", "fast", "kept"]
        assert [line.name for line in ordered(self.lines(store), "-speed-up")] == ["fast", "even", "slow", "kept"]

    def test_other_orders_and_search(self, store: Store) -> None:
        lines = self.lines(store)
        assert [line.name for line in ordered(lines, "segment")] == ["even", "fast", "kept", "slow"]
        assert ordered(lines, "requests")[-1].name == "kept"
        assert ordered(lines, "lost")[0].name == "slow"
        assert ordered(lines, "saved")[0].name == "fast"
        assert [line.name for line in ordered(lines, "segment", "LO")] == ["slow"]
        with pytest.raises(ConfigurationError, match="known are segment"):
            ordered(lines, "name; DROP TABLE requests")

    def test_trends_are_of_the_last_fourteen_days(self, url: str) -> None:
        with Store(url) as store:
            days = [0, 1, 10, 15, 20]
            for place, day in enumerate(days):
                at = NOON + timedelta(days=day)
                kinds = [record(2 * place + n, "a", is_control=n == 0, started_at=at) for n in (0, 1)]
                store.add(kinds)
            found = load_overview(store, EVERYTHING)
            assert found.report.all.requests == 5
            assert (found.traffic.requests, found.traffic.stale_share) == (3, 0.0)
            times = found.lines[0].times
            assert times is not None
            assert times.span.first <= NOON + timedelta(days=10)
            assert sum(value is not None for value in times.speed_ups) == 3
            assert load_overview(store, Filters(until=NOON + timedelta(days=2))).traffic.requests == 2

    def test_options(self, store: Store) -> None:
        options = load_options(store)
        assert options.targets == ("target-a", "target-b")
        assert options.devices == (HERE.device, THERE.device)
        assert (options.policies, options.versions) == (("auto",), (("v1", "auto"),))


class TestSegment:
    def test_what_there_is(self, store: Store) -> None:
        found = load_segment(store, EVERYTHING, "fast")
        mine = [each for each in store.requests(segment="fast") if not each.is_control]
        assert found.report.all.requests == len(mine) == 12
        positions = found.survival["ngram"]
        assert [each.position for each in positions] == [1, 2]
        assert positions[0].at_risk == sum(each.at_risk[0] for each in mine)
        assert positions[1].survival == pytest.approx(positions[1].accepted / positions[0].at_risk)
        assert sum(found.acceptance_lengths.values()) == sum(each.blocks for each in mine)
        assert found.acceptance_lengths[3] == sum(each.acceptance_lengths[3] for each in mine)
        slowest = found.slowest
        assert len(slowest) == 10
        assert slowest[0].request_id == max(mine, key=lambda each: each.total_seconds / each.output_tokens).request_id
        assert [(change.policy, change.version) for change in found.changes] == [("auto", None), ("auto", "v1")]

    def test_goodput_predicted_and_measured(self, store: Store) -> None:
        found = load_segment(store, EVERYTHING, "fast")
        measured = {each.label: each.goodput for each in found.actions}
        assert set(measured) == {"none", "ngram:2"}
        assert measured["none"] == pytest.approx(1 / 0.04)
        host = sum(each.host_seconds for each in found.actions) / sum(each.blocks for each in found.actions)
        one, two = found.survival["ngram"]
        assert one.survival is not None
        assert two.survival is not None
        curve = {(each.source, each.block_length): each.goodput for each in found.predicted}
        assert curve["none", 0] == pytest.approx(1 / (0.042 + host))
        assert curve["ngram", 1] == pytest.approx((1 + one.survival) / (0.001 + 0.044 + host))
        assert curve["ngram", 2] == pytest.approx((1 + one.survival + two.survival) / (0.001 + 0.046 + host))

    def test_without_calibration_nothing_is_predicted(self, url: str) -> None:
        with Store(url) as store:
            store.add(*pairs("a", 3, 1.2))
            found = load_segment(store, EVERYTHING, "a")
            assert found.predicted == ()
            assert found.actions

    def test_a_segment_that_is_not_there(self, store: Store) -> None:
        assert load_segment(store, EVERYTHING, "'; DROP TABLE requests; --").is_empty
        assert load_report(store, EVERYTHING).all.requests == 38

    def test_survival(self) -> None:
        assert survive([(10, 5), (4, 4), (0, 0), (3, 3)]) == [0.5, 0.5, None, None]
        assert survive([]) == []

    def test_between_measured_numbers_of_tokens(self) -> None:
        points = {1: 1.0, 4: 4.0}
        assert [interpolate(points, tokens) for tokens in (0, 1, 2, 4, 5)] == [None, 1.0, pytest.approx(2.0), 4.0, None]
        assert interpolate({}, 1) is None


class TestRequest:
    def test_blocks_and_tokens(self, store: Store) -> None:
        found = load_request(store, f"{9_001:032x}")
        assert [block.cells for block in found.blocks] == [
            ("accepted", "rejected", "not judged", "recovered"),
            ("accepted", "accepted", "accepted", "bonus"),
            ("bonus",),
            ("accepted", "accepted", "not judged"),
        ]
        assert (found.prompt, found.output) == ((1, 2, 3), (77_001, 77_002))
        assert found.control is None

    def test_cells_are_as_many_as_the_tokens(self) -> None:
        for outcome in blocks("a"):
            found = cells(outcome)
            kept = sum(cell in ("accepted", "recovered", "bonus") for cell in found)
            assert kept == outcome.num_committed_tokens
            assert sum(cell in ("accepted", "rejected", "not judged") for cell in found) == outcome.num_draft_tokens

    def test_its_control(self, store: Store) -> None:
        found = load_request(store, f"{1:032x}")
        assert found.control is not None
        assert found.control.request_id == f"{0:032x}"
        assert (found.prompt, found.output, found.blocks) == (None, None, ())

    def test_unknown(self, store: Store) -> None:
        with pytest.raises(ConfigurationError, match="no request begins"):
            load_request(store, "f" * 32)


class TestDecisions:
    def test_what_there_is(self, store: Store) -> None:
        found = load_decisions(store, EVERYTHING)
        assert found.control_share == pytest.approx(36 / 74)
        drafted = [each for each in store.requests() if not each.is_control]
        assert found.exploration_share == pytest.approx(2 * len(drafted) / sum(each.blocks for each in drafted))
        assert dict(found.fallbacks) == {"beams: num_beams=4": 1}
        (trip,) = found.trips
        assert (trip.segment, trip.trips, trip.plain_blocks_to_go, trip.log_wealth) == ("slow", 2, 120, 1.25)

    def test_empty(self, url: str) -> None:
        with Store(url) as store:
            found = load_decisions(store, EVERYTHING)
            assert (found.control_share, found.exploration_share, found.trips) == (None, None, ())


class TestRemembered:
    def test_what_several_ask_for_at_once_is_made_once(self) -> None:
        found, made = Remembered(), iter(range(100))
        is_making, may_end = threading.Event(), threading.Event()

        def make() -> int:
            is_making.set()
            assert may_end.wait(10)
            return next(made)

        with ThreadPoolExecutor(3) as threads:
            first = threads.submit(found.get, "a", "1", make)
            assert is_making.wait(10)
            others = [threads.submit(found.get, "a", "1", make) for _ in range(2)]
            assert found.get("b", "1", lambda: "at once") == ("at once", "1")
            may_end.set()
            assert [each.result(10) for each in (first, *others)] == [(0, "1")] * 3

    def test_who_waits_for_what_fails_tries_again(self) -> None:
        found = Remembered()
        with pytest.raises(ZeroDivisionError):
            found.get("a", "1", lambda: 1 // 0)
        assert found.get("a", "1", lambda: 7) == (7, "1")

    def test_results_are_kept_while_the_database_is_as_it_was(self) -> None:
        found = Remembered(most=2, slow_seconds=10.0)
        made = iter(range(100))
        asked = [("a", "1"), ("a", "1"), ("a", "2"), ("b", "2"), ("a", "2"), ("c", "2"), ("b", "2"), ("c", "2")]
        values = [found.get(key, stamp, lambda: next(made)) for key, stamp in asked]
        assert values == [(0, "1"), (0, "1"), (1, "2"), (2, "2"), (1, "2"), (3, "2"), (4, "2"), (3, "2")]

    def test_what_took_long_is_given_out_a_little_longer(self) -> None:
        now = 0.0

        def make() -> float:
            nonlocal now
            now += 2.0
            return now

        found = Remembered(slow_seconds=0.5, share=10.0, clock=lambda: now)
        assert found.get("a", "1", make) == (2.0, "1")
        now = 21.9
        assert found.get("a", "2", make) == (2.0, "1")
        now = 22.0
        assert found.get("a", "2", make) == (24.0, "2")

    def test_what_goes_into_something_else_is_never_older(self) -> None:
        found = Remembered(slow_seconds=-1.0, share=1e12)
        assert found.get("a", "1", lambda: "first") == ("first", "1")
        assert found.get("a", "2", lambda: "second") == ("first", "1")
        assert found.get("a", "2", lambda: "second", exact=True) == ("second", "2")
        assert found.get("a", "2", lambda: "third", exact=True) == ("second", "2")


@pytest.mark.parametrize(("low", "high"), [(0.7, 1.4), (0.03, 64.0), (0.7, 3.5), (0.73, 64.0)])
def test_ticks_have_room_and_one_is_among_them(low: float, high: float) -> None:
    axis = Axis(low, high)
    places = [axis.x(tick) for tick in axis.ticks]
    assert 1.0 in axis.ticks
    assert len(places) >= 3
    assert min(after - before for before, after in pairwise(places)) >= LEAST_GAP
    assert 0 <= min(places) <= max(places) <= WIDTH


def test_numbers_have_units() -> None:
    assert [count(value) for value in (None, 0, 9_999, 12_345, 4_560_000)] == [
        "-",
        "0",
        "9,999",
        "12.3\u00a0k",
        "4.56\u00a0M",
    ]
    times = [duration(value) for value in (None, 0.0, 5e-6, 0.0123, 12.34, 150.0, 9_000.0, 200_000.0)]
    assert [each.replace("\u00a0", " ") for each in times] == [
        "-", "0 s", "5.00 \u00b5s", "12.3 ms", "12.3 s", "2.50 min", "2.50 h", "2.31 d",
    ]  # fmt: skip
    assert [percent(value) for value in (None, 0.0, 0.023, 0.5)] == ["-", "0\u00a0%", "2.3\u00a0%", "50\u00a0%"]
