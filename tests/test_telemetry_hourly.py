"""Sums by the hour, and the report that is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry import traces
from autospec.telemetry.bootstrap import normal_interval, unpaired_interval
from autospec.telemetry.dashboard_queries import recent_hours
from autospec.telemetry.hourly import build_hourly_report, num_requests
from autospec.telemetry.report import build_report, to_dict
from autospec.telemetry.store import Store
from autospec.types import (
    OFF,
    Action,
    ActionTally,
    BlockOutcome,
    CalibrationSample,
    Deployment,
    PhaseSeconds,
    PolicyVersion,
    RequestRecord,
    split_label,
)
from tests.postgres_server import fresh_database

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HERE = Deployment("host", "cpu: two threads", "target", "float32", ("ngram",), {"torch": "2.9"}, 500_000_000)
THERE = replace(HERE, device="cuda: some", model_bytes=None)


@pytest.fixture(params=["memory", "file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield "sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path / 't.db'}"


def traffic(count: int, seed: int = 0) -> list[RequestRecord]:
    random = np.random.default_rng(seed)
    records = []
    for number in range(count):
        is_control = bool(random.random() < 0.4)
        blocks, length = int(random.integers(1, 20)), int(random.integers(1, 4))
        accepted = sorted((int(n) for n in random.integers(0, blocks + 1, length)), reverse=True)
        at_risk = [blocks, *accepted[:-1]]
        action = Action("ngram", length)
        tally = ActionTally(
            blocks, blocks * length, sum(at_risk), sum(accepted), blocks + sum(accepted), 0.01, 0.2, 0.01, 0.0,
            tuple(at_risk), tuple(accepted),
        )  # fmt: skip
        seconds = float(random.uniform(0.5, 1.5))
        predicted = float(random.uniform(0.5, 2.0)) if not is_control and random.random() < 0.8 else None
        records.append(
            RequestRecord(
                request_id=f"{seed}-{number}",
                started_at=NOON + timedelta(minutes=float(random.uniform(0, 5_000))),
                segment=str(random.choice(["code", "prose"])),
                policy="off" if is_control else str(random.choice(["auto", "fixed:ngram:2"])),
                is_control=is_control,
                do_sample=bool(random.random() < 0.5),
                decoding="greedy",
                prompt_tokens=int(random.integers(1, 500)),
                output_tokens=1 + blocks + sum(accepted),
                seconds=PhaseSeconds(0.1, 0.01, seconds, 0.01, 0.0, 0.02),
                blocks=blocks,
                num_draft_tokens=blocks * length,
                num_judged_tokens=sum(at_risk),
                num_accepted_tokens=sum(accepted),
                acceptance_lengths={1: blocks},
                at_risk=tuple(at_risk),
                accepted=tuple(accepted),
                actions={action.label: blocks},
                error="RuntimeError: x" if random.random() < 0.05 else None,
                fallback_reason="beams" if random.random() < 0.05 else None,
                deployment=(HERE, THERE, None)[int(random.integers(3))],
                by_action={action.label: tally},
                decisions={f"{action.label} best": blocks},
                policy_version="v1",
                predicted_control_seconds=predicted,
                peak_memory_bytes=int(random.integers(1, 1_000)),
            )
        )
    return records


COUNTED_ALIKE = (
    "group", "requests", "control_requests", "failed_requests", "fallback_requests", "output_tokens",
    "control_output_tokens", "blocks", "num_draft_tokens", "num_judged_tokens", "num_accepted_tokens",
    "peak_memory_bytes", "model_bytes",
)  # fmt: skip
NEARLY_ALIKE = ("tokens_per_second", "control_tokens_per_second", "mean_acceptance_length")


@pytest.mark.parametrize(
    "group_by",
    [(), ("segment",), ("segment", "day"), ("policy", "decoding"), ("device",), ("segment", "policy", "device")],
)
def test_sums_say_what_the_requests_say(url: str, group_by: tuple[str, ...]) -> None:
    records = traffic(400)
    with Store(url) as store:
        for start in range(0, 400, 90):
            store.add(records[start : start + 90])
        store.add(records[:200])  # again: nothing is counted twice
        assert num_requests(store) == 400
        summed = to_dict(build_hourly_report(store, group_by=group_by))
        single = to_dict(build_report(store.requests(), [], group_by=group_by))
    assert summed["basis"] == "hours"
    for ours, theirs in zip([*summed["segments"], summed["all"]], [*single["segments"], single["all"]], strict=True):
        assert [ours[name] for name in COUNTED_ALIKE] == [theirs[name] for name in COUNTED_ALIKE]
        assert [ours[name] for name in NEARLY_ALIKE] == pytest.approx([theirs[name] for name in NEARLY_ALIKE])
        assert ours["seconds"] == pytest.approx(theirs["seconds"])
        assert ours["control_seconds"] == pytest.approx(theirs["control_seconds"])
        assert ours["prediction"] == pytest.approx(theirs["prediction"])
        if ours["speed_up"] is not None:
            assert ours["speed_up"] == pytest.approx(theirs["speed_up"])
            assert ours["speed_up_low"] == pytest.approx(theirs["speed_up_low"], abs=0.08)
            assert ours["speed_up_high"] == pytest.approx(theirs["speed_up_high"], abs=0.08)


def test_positions_and_actions(url: str) -> None:
    """Those of control requests are none; here each has some, and all blocks are summed."""
    records = traffic(60)
    with Store(url) as store:
        store.add(records)
        report = build_hourly_report(store)
    for row in (*report.segments, report.all):
        mine = [record for record in records if not row.group or record.segment == row.group["segment"]]
        assert sum(row.actions.values()) == sum(record.blocks for record in mine)
        assert row.at_risk[0] == sum(record.at_risk[0] for record in mine)
        assert row.accepted[0] == sum(record.accepted[0] for record in mine)


def test_groups_that_blocks_are_not_summed_by_say_nothing_of_them(url: str) -> None:
    with Store(url) as store:
        store.add(traffic(60))
        report = build_hourly_report(store, group_by=("policy",))
    assert [row.at_risk for row in report.segments] == [()] * len(report.segments)
    assert report.all.at_risk != ()


def test_a_period(url: str) -> None:
    records = traffic(300)
    since, until = NOON + timedelta(hours=10), NOON + timedelta(hours=40)
    with Store(url) as store:
        store.add(records)
        report = build_hourly_report(store, since=since, until=until)
        hours = recent_hours(store, since=since)
        of_code = recent_hours(store, since=since, segment="code")
    expected = [r for r in records if since <= r.started_at < until]
    assert report.all.requests == sum(not r.is_control for r in expected)
    later = [r for r in records if r.started_at >= since]
    assert sum(hour.requests + hour.control_requests for hour in hours) == len(later)
    assert [
        (h.hour, h.requests, h.control_requests, h.output_tokens, h.blocks) for h in hours if h.segment == "code"
    ] == [(h.hour, h.requests, h.control_requests, h.output_tokens, h.blocks) for h in of_code]
    assert hours == sorted(hours, key=lambda hour: (hour.hour, hour.segment))
    assert all(hour.speed_up is None or hour.speed_up > 0 for hour in hours)


def test_too_little_data_and_nothing_at_all(url: str) -> None:
    with Store(url) as store:
        assert build_hourly_report(store).is_empty
        store.add(traffic(20))
        report = build_hourly_report(store)
    assert {row.note for row in report.segments} == {"too little data"}
    assert report.all.speed_up is None


@pytest.mark.parametrize(
    "options",
    [
        {"group_by": ("source",)},
        {"group_by": ("day", "day")},
        {"since": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"until": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"since": datetime(2026, 1, 1, 12, 30, tzinfo=UTC)},
    ],
)
def test_wrong_questions(options: dict[str, object]) -> None:
    with Store("sqlite://") as store, pytest.raises(ConfigurationError):
        build_hourly_report(store, **options)  # type: ignore[arg-type]


def test_the_normal_interval_is_the_bootstraps_for_many() -> None:
    random = np.random.default_rng(1)
    sides = []
    for scale in (1.0, 0.7):
        tokens = random.integers(20, 200, 3_000).astype(float)
        sides.append(np.column_stack([tokens * scale * random.uniform(0.8, 1.2, 3_000), tokens]))
    moments = [(len(side), side.mean(axis=0), np.cov(side.T)) for side in sides]
    expected = unpaired_interval(sides[0], sides[1], resamples=4_000, seed=0)
    found = normal_interval(*moments, resamples=4_000, seed=0)
    assert expected is not None
    assert found == pytest.approx(expected, abs=0.003)
    assert normal_interval((50, np.zeros(2), np.zeros((2, 2))), moments[1], resamples=100, seed=0) is None


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("none", ("none", 0)),
        ("ngram:4", ("ngram", 4)),
        ("a:b:12", ("a:b", 12)),
        ("odd", ("none", 0)),
        (":3", ("none", 0)),
    ],
)
def test_labels(label: str, expected: tuple[str, int]) -> None:
    assert split_label(label) == expected


def test_what_is_known_besides_requests(url: str) -> None:
    version = PolicyVersion("auto", "abc", {"minimum_gain": 0.02}, "wrap", NOON)
    samples = [CalibrationSample(HERE, NOON, "target", n, 64, n / 100) for n in (1, 2, 4)]
    with Store(url) as store:
        from autospec.telemetry.codec import to_entry

        for _ in range(2):
            store.write([to_entry(version), *map(to_entry, samples)])
        with store.reading() as connection:
            assert connection.exec_driver_sql("SELECT name, made_by FROM policy_versions").all() == [("auto", "wrap")]
            found = connection.exec_driver_sql("SELECT tokens, seconds FROM calibration_samples ORDER BY tokens").all()
    assert found == [(1, 0.01), (2, 0.02), (4, 0.04)]


outcomes = st.lists(
    st.builds(
        BlockOutcome,
        segment=st.just("code"),
        action=st.sampled_from([OFF, Action("ngram", 4, "best: of all"), Action("a:b", 2)]),
        context_tokens=st.integers(0, 10**6),
        num_draft_tokens=st.integers(0, 64),
        num_judged_tokens=st.integers(0, 64),
        num_accepted_tokens=st.integers(0, 64),
        num_committed_tokens=st.integers(1, 64),
        draft_seconds=st.floats(0, 100),
        verify_seconds=st.floats(0, 100),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(outcomes)
def test_traces(blocks: list[BlockOutcome]) -> None:
    found = traces.unpack(traces.pack(blocks), "code")
    assert len(found) == len(blocks)
    for ours, theirs in zip(found, blocks, strict=True):
        assert ours.action.label == theirs.action.label
        assert ours.action.reason_kind == theirs.action.reason_kind
        assert ours.num_committed_tokens == theirs.num_committed_tokens
        assert ours.seconds == pytest.approx(theirs.seconds, abs=3e-6)


@pytest.mark.parametrize("data", [b"", b"no", traces.pack([])[:-4]])
def test_what_is_no_trace(data: bytes) -> None:
    with pytest.raises(ConfigurationError):
        traces.unpack(data, "code")


def test_traces_are_stored_once(url: str) -> None:
    block = BlockOutcome("code", OFF, 5, 0, 0, 0, 1)
    record = replace(traffic(1)[0], trace=traces.pack([block]))
    with Store(url) as store:
        store.add([record])
        store.add([replace(record, trace=traces.pack([block, block]))])
        with store.reading() as connection:
            (data,) = connection.exec_driver_sql("SELECT blocks FROM block_traces").scalars()
    assert len(traces.unpack(bytes(data), "code")) == 1


def test_an_older_database_is_migrated_and_a_copy_kept(tmp_path: Path) -> None:
    from alembic import command

    from autospec.telemetry.migrate import alembic_config

    path = tmp_path / "t.db"
    records = traffic(120)
    with Store(f"sqlite:///{path}") as store:
        store.add(records)
        expected = to_dict(build_hourly_report(store))
        with store.writing() as connection:
            command.downgrade(alembic_config(connection), "0001")
    (tmp_path / "t.db.schema-0001").write_text("an earlier copy")
    path.chmod(0o600)
    with pytest.raises(StoreError, match="older schema"):
        Store(f"sqlite:///{path}", readonly=True)
    with Store(f"sqlite:///{path}") as store:
        assert store.count() == 120
        found = to_dict(build_hourly_report(store))
    known = ("requests", "control_requests", "output_tokens", "blocks", "mean_acceptance_length", "speed_up", "seconds")
    for ours, theirs in zip(found["segments"], expected["segments"], strict=True):
        assert {name: ours[name] for name in known} == {
            name: pytest.approx(theirs[name]) if theirs[name] is not None else None for name in known
        }
    assert (tmp_path / "t.db.schema-0001").read_text() == "an earlier copy"
    assert (tmp_path / "t.db.schema-0001.1").stat().st_mode == path.stat().st_mode
    import sqlite3

    copy = sqlite3.connect(tmp_path / "t.db.schema-0001.1")
    assert copy.execute("SELECT COUNT(*) FROM requests").fetchone() == (120,)
    assert copy.execute("SELECT version_num FROM autospec_version").fetchone() == ("0001",)
    copy.close()


def test_an_older_server_is_migrated() -> None:
    from alembic import command

    from autospec.telemetry.migrate import alembic_config

    with fresh_database() as url:
        with Store(url) as store:
            store.add(traffic(50))
            expected = num_requests(store)
            with store.writing() as connection:
                command.downgrade(alembic_config(connection), "0001")
        with Store(url) as store:
            assert (store.count(), num_requests(store)) == (50, expected)
            assert sum(row.block_tokens for row in build_hourly_report(store).segments) > 0
