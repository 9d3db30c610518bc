"""What policies learn lives in the store: saved, resumed after a restart, merged across processes."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import insert, select, text, update

import autospec
from autospec.controller import Controller
from autospec.errors import ConfigurationError
from autospec.observations import policy_version
from autospec.policies import UCB, Exp3, Fixed, Goodput, Guard, Thompson
from autospec.policies.acceptance import AcceptanceModel
from autospec.policies.confidence import Confidence
from autospec.policies.merging import merge
from autospec.policies.states import check, newest_segments
from autospec.resuming import MOST_SEGMENTS, MOST_STATES, Learned
from autospec.telemetry.codec import to_entry
from autospec.telemetry.recorder import Recorder
from autospec.telemetry.schema import PolicyStateRow
from autospec.telemetry.states import family, heads, pack, unpack
from autospec.telemetry.store import Store
from autospec.telemetry.transfer import export, read_export
from autospec.telemetry.upkeep import check as check_database
from autospec.types import Deployment, PolicyState
from tests import tiny
from tests.postgres_server import fresh_database
from tests.test_goodput import Costs, context, live
from tests.test_telemetry_spool import Locked

HERE = Deployment("host", "cpu: two threads", "target", "float32", ("ngram",), {"torch": "2.9"}, 500_000_000)
NOW = datetime.now(UTC)
MEASURED = Costs(draft_per_token=0.004)


@pytest.fixture(params=["file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield f"sqlite:///{tmp_path / 't.db'}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 't.db'}"


def guarded(**settings: Any) -> Guard:
    return Guard(Goodput(MEASURED), MEASURED, name="auto", **settings)


def plain(state: Any) -> str:
    return json.dumps(state)


class Process:
    """A process as far as learning goes: a policy with its controller and recorder."""

    def __init__(self, url: str, policy: Any = None, place: Deployment = HERE, *, resume: bool = True) -> None:
        self.policy = guarded() if policy is None else policy
        self.recorder = Recorder(url, flush_seconds=0.01)
        version = policy_version(self.policy, made_by="a test")
        self.learned = Learned(Controller(self.policy), self.policy, version, self.recorder, place)
        if resume:
            self.learned.resume()

    def work(self, rate: float, blocks: int = 120, segment: str = "s", seed: int = 0) -> list[str]:
        outcomes = live(self.policy, rate, blocks, costs=MEASURED, seed=seed, where=context(segment))
        self.learned.after_request(HERE)
        return [outcome.action.label for outcome in outcomes]

    def save_now(self) -> None:
        self.learned._not_before = 0.0
        self.learned.after_request(HERE)
        assert self.recorder.flush()

    def end(self) -> None:
        self.learned.close()
        self.recorder.close()

    def die(self) -> None:
        """Without saving."""
        self.learned._has_news = False
        self.end()


def rows(url: str) -> list[Any]:
    with Store(url, readonly=True) as store, store.reading() as connection:
        return list(connection.execute(select(PolicyStateRow.__table__)))


def entry(state: Any, process: str = "a", age: timedelta = timedelta(), **values: Any) -> dict[str, Any]:
    return to_entry(PolicyState(HERE, "auto", "v", process, NOW - age, state, **values))


class TestOneProcess:
    @pytest.mark.parametrize("make", [guarded, lambda: Goodput(MEASURED)], ids=["guard", "goodput"])
    def test_goes_on_identically(self, url: str, make: Any) -> None:
        first = Process(url, make())
        first.work(0.8)
        first.work(0.3, segment="other")
        first.end()
        kept = plain(first.policy.state())
        second = Process(url, make())
        assert plain(second.policy.state()) == kept
        assert second.work(0.5, seed=3) == first.work(0.5, seed=3)
        second.end()

    def test_any_number_of_restarts_leaves_one_state(self, url: str) -> None:
        kept = plain(guarded().state())
        for number in range(4):
            process = Process(url)
            if number:
                assert plain(process.policy.state()) == kept
            process.work(0.2 * number, seed=number)
            process.end()
            kept = plain(process.policy.state())
        assert len(rows(url)) == 1

    def test_what_nobody_used_is_not_written_again(self, file_url: str) -> None:
        for blocks in (60, 0, 0):
            process = Process(file_url)
            if blocks:
                process.work(0.7, blocks)
            process.end()
        assert len(rows(file_url)) == 1

    def test_dying_between_saves_loses_what_came_after_the_last(self, url: str) -> None:
        process = Process(url)
        process.work(0.8)
        process.save_now()
        kept = plain(process.policy.state())
        process.work(0.1)  # within the interval: not saved
        assert process.recorder.waiting == 0
        process.die()
        again = Process(url)
        assert plain(again.policy.state()) == kept
        again.end()

    def test_saving_comes_at_most_every_minute(self, file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [1000.0]
        monkeypatch.setattr("autospec.resuming.time.monotonic", lambda: clock[0])
        process = Process(file_url)
        counts = []
        for _ in range(7):
            process.work(0.5, 3)
            process.recorder.flush()
            counts.append(process.recorder.recorded)
            clock[0] += 25.0
        assert counts == [0, 0, 0, 1, 1, 1, 2]
        process.die()

    def test_nothing_is_shared_with_those_of_another_kind(self, url: str) -> None:
        process = Process(url)
        process.work(0.8)
        process.end()
        fresh = plain(guarded().state())
        for place in (
            replace(HERE, dtype="bfloat16"),
            replace(HERE, device="cuda: some"),
            replace(HERE, target="other"),
            replace(HERE, drafts=("ngram", "suffix")),
            replace(HERE, model_bytes=1),
        ):
            other = Process(url, place=place)
            assert plain(other.policy.state()) == fresh
            other.die()
        other = Process(url, guarded(pause_blocks=3))
        assert not other.policy.state()["segments"]
        other.die()
        moved = Process(url, place=replace(HERE, host="elsewhere", versions={"torch": "3.0"}))
        assert moved.policy.state()["segments"]
        moved.die()

    def test_states_too_old_or_too_many_stay_behind(self, url: str) -> None:
        version = policy_version(guarded(), "a test").version
        state = guarded().state()
        with Store(url) as store:
            for number in range(MOST_STATES + 5):
                age = timedelta(days=31) if number < 3 else timedelta(minutes=number)
                item = PolicyState(HERE, "auto", version, f"{number:02}", NOW - age, state)
                store.write([to_entry(item)])
            found, _ = store.policy_states(HERE, version, NOW - timedelta(days=30))
        assert [each.process for each in found] == [f"{number:02}" for number in range(3, 3 + MOST_STATES)]

    def test_in_memory_nothing_is_kept(self) -> None:
        process = Process("sqlite://")
        process.work(0.8)
        process.save_now()
        assert process.recorder.recorded == 0
        process.end()

    def test_a_child_saves_under_a_name_of_its_own(self, file_url: str) -> None:
        process = Process(file_url)
        process.work(0.8)
        process.save_now()
        process.learned._pid = -1  # as after a fork
        process.work(0.8)
        process.save_now()
        process.end()
        assert len(rows(file_url)) == 2

    def test_while_the_database_is_away_one_state_waits(
        self, tmp_path: Path, file_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("autospec.telemetry.sqlite.BUSY_SECONDS", 0.02)
        monkeypatch.setattr("autospec.telemetry.store.RETRY_SECONDS", 0.05)
        process = Process(file_url)
        with Locked(tmp_path / "t.db"):
            for _ in range(5):
                process.learned._not_before = 0.0
                process.work(0.5, 3)
        assert process.recorder.recorded == 1
        assert process.recorder.flush()
        process.end()
        assert rows(file_url)[0].updated_at > NOW


class TestSeveralProcesses:
    def test_estimates_lie_between(self, url: str) -> None:
        processes = [Process(url), Process(url)]
        for process, rate in zip(processes, (0.35, 0.9), strict=True):
            process.work(rate, 200)
        for process in processes:
            process.end()
        third = Process(url)

        def estimate(process: Process) -> float:
            return float(process.policy.policy._acceptance.survival("s", "assistant", 1)[0])

        low, high = sorted(map(estimate, processes))
        assert low + 0.05 < estimate(third) < high - 0.05
        counts = third.policy.state()["policy"]["acceptance"]["by_segment"]["s"]["assistant"]
        assert counts["asked"] <= 100.0 + 1e-6  # the horizon of a discount of 0.99
        third.work(0.6)
        third.end()
        assert len(rows(url)) == 1  # it has taken over both

    def test_a_state_that_went_on_is_merged_again(self, url: str) -> None:
        first = Process(url)
        first.work(0.8)
        first.save_now()
        second = Process(url)
        second.work(0.8)
        first.work(0.3)  # after the second has taken it over
        first.end()
        second.end()
        assert len(rows(url)) == 2
        third = Process(url)
        assert len(third.learned._inherited) == 2
        third.die()

    def test_one_that_was_taken_over_says_nothing_more(self) -> None:
        old = PolicyState(HERE, "p", "v", "old", NOW - timedelta(hours=2), {})
        new = PolicyState(HERE, "p", "v", "new", NOW, {}, {"old": old.updated_at})
        assert heads([new, old]) == [new]
        later = replace(old, updated_at=NOW)
        assert heads([new, later]) == [new, later]

    def test_copies_of_a_state_merge_to_it(self) -> None:
        policy = guarded()
        live(policy, 0.7, 300, costs=MEASURED)
        state = json.loads(plain(policy.state()))
        merged, count = merge(guarded(), [state] * 5, seed=0)
        assert count == 5
        model, copy = (each["policy"]["acceptance"] for each in (state, merged))
        for one, other in zip(
            (model["by_segment"]["s"]["assistant"], model["by_source"]["assistant"]),
            (copy["by_segment"]["s"]["assistant"], copy["by_source"]["assistant"]),
            strict=True,
        ):
            assert other["asked"] <= 100.0 + 1e-9
            ratios = np.array(one["accepted"]) / one["at_risk"], np.array(other["accepted"]) / other["at_risk"]
            assert ratios[1] == pytest.approx(ratios[0])
            assert other["late"] == pytest.approx(one["late"])
        segment = merged["policy"]["segments"]["s"]
        for name in ("tokens", "seconds", "budget", "blocks"):
            assert segment[name] == pytest.approx(state["policy"]["segments"]["s"][name])
        assert merged["segments"]["s"] == state["segments"]["s"]
        guarded().restore(merged)

    def test_without_discount_too_evidence_is_bounded(self) -> None:
        def make() -> Goodput:
            return Goodput(MEASURED, acceptance=AcceptanceModel(discount=1.0))

        policy = make()
        live(policy, 0.7, 100)
        state = policy.state()
        merged, _ = merge(make(), [state] * 8, seed=0)
        asked = [each["acceptance"]["by_source"]["assistant"]["asked"] for each in (state, merged)]
        assert asked[1] == pytest.approx(asked[0])

    def test_means_of_features_are_weighted_by_what_they_rest_on(self) -> None:
        def counts(seen: float, feature: float) -> dict[str, Any]:
            return {
                "at_risk": [seen], "accepted": [0.0], "asked": seen, "proposed": seen,
                "features": [feature] * 4, "score": feature, "seen": seen, "late": [0.0, 0.0],
            }  # fmt: skip

        def state(seen: float, feature: float) -> dict[str, Any]:
            model = {"by_segment": {}, "by_source": {"ngram": counts(seen, feature)}, "confidence": {}}
            return {"acceptance": model, "segments": {}, "offering": ["ngram"]}

        states = [state(30.0, 1.0), state(10.0, 5.0), state(0.0, 9.0)]
        for each in states:
            check(Goodput(MEASURED), each)
        merged, _ = merge(Goodput(MEASURED), states, seed=0)
        found = merged["acceptance"]["by_source"]["ngram"]
        assert found["features"] == pytest.approx([2.0] * 4)
        assert found["score"] == pytest.approx(2.0)
        assert (found["seen"], found["asked"]) == (pytest.approx(40.0), pytest.approx(40.0))
        nothing, _ = merge(Goodput(MEASURED), [state(0.0, 0.0)] * 2, seed=0)
        assert nothing["acceptance"]["by_source"]["ngram"]["score"] == 0.0

    def test_weights_lie_between_and_are_no_surer_than_the_surest(self) -> None:
        def confidence(sign: float, offers: int) -> dict[str, Any]:
            made, random = Confidence(), np.random.default_rng(0)
            for _ in range(offers):
                values = random.normal(size=4).tolist()
                accepted = int(random.random() < 1.0 / (1.0 + np.exp(-sign * values[0])))
                made.learn([0.0], [values], None, accepted)
            return made.state()

        def merged(*found: dict[str, Any]) -> dict[str, Any]:
            states = [
                {
                    "acceptance": {"by_segment": {}, "by_source": {}, "confidence": {"ngram": each}},
                    "segments": {},
                    "offering": [],
                }
                for each in found
            ]
            state, _ = merge(Goodput(MEASURED), states, seed=0)
            Goodput(MEASURED).restore(state)
            made: dict[str, Any] = state["acceptance"]["confidence"]["ngram"]
            return made

        one, other = confidence(1.5, 300), confidence(-0.5, 200)
        joined = merged(one, other)
        assert other["weights"][0] < joined["weights"][0] < one["weights"][0]
        traces = [np.trace(np.array(each["precision"])) for each in (one, other, joined)]
        assert traces[2] <= max(traces[:2]) + 1e-9
        for number in (2, 8):
            copies = merged(*[one] * number)
            assert copies["weights"] == pytest.approx(one["weights"])
            assert np.array(copies["precision"]) == pytest.approx(np.array(one["precision"]))
        assert merged(Confidence().state(), Confidence().state()) == Confidence().state()

    def test_a_pause_goes_on_for_what_was_left_of_it(self) -> None:
        def state(**values: Any) -> dict[str, Any]:
            guard = guarded()
            live(guard, 0.5, 1)
            found = guard.state()
            found["segments"]["s"].update(values)
            return found

        running = state(blocks=900, paused_until=400, pause=100, trips=1, is_on=True)
        running["segments"]["s"]["brake"]["mean"] = 0.25
        paused = state(blocks=300, paused_until=350, pause=200, trips=2)
        merged, _ = merge(guarded(), [paused, running], seed=0)
        segment = merged["segments"]["s"]
        assert (segment["blocks"], segment["paused_until"], segment["pause"], segment["trips"]) == (900, 950, 200, 2)
        assert segment["brake"]["mean"] == 0.25
        assert not segment["is_on"]
        guard = guarded()
        guard.restore(merged)
        assert "50 plain blocks to go" in str(guard.choose(context()).reason)
        both, _ = merge(guarded(), [running, state(blocks=10, paused_until=0, pause=0)], seed=0)
        assert both["segments"]["s"]["paused_until"] <= both["segments"]["s"]["blocks"]
        assert both["segments"]["s"]["is_on"]

    def test_plain_ratios_are_joined_and_the_newest_kept(self) -> None:
        states = [{**guarded().state(), "plain": [value] * 40} for value in (1.5, 1.0, 9.0)]
        merged, _ = merge(guarded(), states, seed=0)
        assert merged["plain"] == [1.0] * 25 + [1.5] * 40
        assert merged["plain_ratio"] == 1.5

    def test_random_numbers_are_nobodys(self) -> None:
        state = guarded().state()
        seeds = [merge(guarded(), [state, state], seed)[0]["random"] for seed in (1, 2)]
        assert state["random"] not in seeds
        assert seeds[0] != seeds[1]

    @pytest.mark.parametrize("kind", [UCB, Thompson, Exp3])
    def test_other_policies_go_on_from_the_newest(self, kind: Any) -> None:
        states = []
        for rate in (0.9, 0.2):
            policy = kind(MEASURED)
            live(policy, rate, 50, costs=MEASURED)
            states.append(policy.state())
        merged, count = merge(kind(MEASURED), states, seed=0)
        assert count == 1
        assert {**merged, "random": 0} == {**states[0], "random": 0}
        assert merged.get("random") != states[0].get("random") or "random" not in merged
        kind(MEASURED).restore(merged)


class TestSize:
    def test_ten_thousand_segments_are_bounded(self, url: str) -> None:
        process = Process(url)
        for number in range(10_000):
            live(process.policy, 0.9, 1, where=context(f"segment {number}"))
        process.work(0.9, 3)
        process.end()
        with Store(url, readonly=True) as store:
            found, _ = store.policy_states(HERE, policy_version(process.policy, "a test").version, NOW)
        state = found[0].state
        for kept in (state["segments"], state["policy"]["segments"], state["policy"]["acceptance"]["by_segment"]):
            assert len(kept) == MOST_SEGMENTS
            assert list(kept)[-2:] == ["segment 9999", "s"]
        assert len(rows(url)[0].state) < 5_000_000

    def test_states_with_lists_of_segments(self) -> None:
        policy = Exp3(MEASURED)
        for number in range(30):
            live(policy, 0.9, 2, costs=MEASURED, where=context(f"{number}"))
        bounded = newest_segments(policy.state(), 10)
        assert [name for name, _ in bounded["weights"]] == [str(number) for number in range(20, 30)]
        assert len(bounded["evidence"]["segments"]) == 10
        Exp3(MEASURED).restore(bounded)
        parts = newest_segments({"parts": [["default", None], ["segments.a", policy.state()]]}, 10)["parts"]
        assert len(parts[1][1]["weights"]) == 10
        own = {"weights": [0.5] * 99, "parts": [1, 2, 3], "segments": 3}
        assert newest_segments(own, 10) == own


class TestTheTable:
    def test_an_older_entry_never_overwrites_a_newer_one(self, url: str) -> None:
        new, old = entry({"n": 2}), entry({"n": 1}, age=timedelta(minutes=1))
        with Store(url) as store:
            for batch in ([new, old], [old], [old, new], [new]):
                store.write(batch)
                store.write(batch)
                found, damaged = store.policy_states(HERE, "v", NOW - timedelta(days=1))
                assert [each.state for each in found] == [{"n": 2}]
                assert not damaged
            store.write([entry({"n": 3}, age=-timedelta(seconds=1))])
            assert store.policy_states(HERE, "v", NOW - timedelta(days=1))[0][0].state == {"n": 3}

    def test_what_was_taken_over_is_deleted(self, url: str) -> None:
        hour = timedelta(hours=1)
        with Store(url) as store:
            store.write([entry({}, "a", 2 * hour), entry({}, "b", hour), entry({}, "c", hour)])
            store.write([entry({}, "d", inherited={"a": NOW - hour, "b": NOW - 2 * hour})])
            found, _ = store.policy_states(HERE, "v", NOW - timedelta(days=1))
            assert [each.process for each in found] == ["d", "b", "c"]  # b went on since
            assert found[0].inherited == {"a": NOW - hour, "b": NOW - 2 * hour}

    def test_bytes_and_back(self) -> None:
        state = {"b": [1, 2.5, None, True], "a": {"ü": 1 << 100}}
        assert unpack(pack(state)) == state
        assert list(unpack(pack(state))) == ["b", "a"]
        for bad in ({"a": float("nan")}, {"a": object()}):
            with pytest.raises(ConfigurationError, match="plain JSON"):
                pack(bad)
        with pytest.raises(ConfigurationError, match="not a mapping"):
            entry([1])
        for data in (b"", b"nonsense", pack(state)[:-3], zlib.compress(b"[1]")):
            with pytest.raises(ValueError, match=r".*"):
                unpack(data)

    def test_a_family_is_no_host(self) -> None:
        assert family(HERE) == family(replace(HERE, host="x", versions={}))
        assert family(replace(HERE, drafts=("a", "b"))) == family(replace(HERE, drafts=("b", "a")))
        assert family(HERE) != family(replace(HERE, dtype="float16"))

    def test_a_backend_has_one_of_its_own(self) -> None:
        families = {family(replace(HERE, versions={**HERE.versions, **b})) for b in ({}, {"backend": "cuda_graph"})}
        assert len(families) == 2
        assert family(replace(HERE, versions={"torch": "2"})) == family(HERE)  # older states name none


class TestDamage:
    @pytest.mark.parametrize("damage", ["bytes", "no state", "numbers", "huge", "inside"])
    def test_it_is_skipped_with_one_warning(self, url: str, damage: str) -> None:
        process = Process(url)
        process.work(0.8)
        process.end()
        state = json.loads(plain(process.policy.state()))
        if damage == "numbers":
            state["segments"]["s"]["blocks"] = "many"
        elif damage == "huge":
            state["segments"]["s"]["brake"]["seen"] = 10**400
        elif damage == "inside":
            state["policy"]["acceptance"]["by_source"]["assistant"]["accepted"] = [9e9]
        data = {"bytes": b"\x00\x01", "no state": pack({"arms": []})}.get(damage, pack(state))
        with Store(url) as store, store.writing() as connection:
            connection.execute(update(PolicyStateRow).values(state=data))
        with pytest.warns(UserWarning, match="1 of the states that policies had learned were skipped") as caught:
            again = Process(url)
        assert len(caught) == 1
        assert plain(again.policy.state()) == plain(guarded().state())
        again.work(0.5)
        again.end()

    def test_the_others_are_used(self, url: str) -> None:
        for rate in (0.8, 0.3):
            process = Process(url, resume=False)
            process.work(rate)
            process.end()
        kept = plain(process.policy.state())
        with Store(url) as store, store.writing() as connection:
            oldest = select(PolicyStateRow.process).order_by(PolicyStateRow.updated_at).limit(1).scalar_subquery()
            connection.execute(update(PolicyStateRow).where(PolicyStateRow.process == oldest).values(state=b"x"))
        with pytest.warns(UserWarning, match="1 of the states"):
            again = Process(url)
        assert plain(again.policy.state()) == kept
        again.end()

    def test_another_policys_state_gives_way_to_an_older_one(self, file_url: str) -> None:
        process = Process(file_url, UCB(MEASURED))
        process.work(0.8)
        process.end()
        row = rows(file_url)[0]._mapping
        values = {**row, "process": "f" * 32, "updated_at": datetime.now(UTC), "state": pack({"arms": 3})}
        with Store(file_url) as store, store.writing() as connection:
            connection.execute(insert(PolicyStateRow), values)
        with pytest.warns(UserWarning, match="ucb"):
            again = Process(file_url, UCB(MEASURED))
        assert plain(again.policy.state()) == plain(process.policy.state())
        again.die()

    def test_a_database_that_cannot_be_read(self, file_url: str) -> None:
        process = Process(file_url, resume=False)
        with Store(file_url) as store, store.writing() as connection:
            connection.exec_driver_sql("DROP TABLE policy_states")
        with pytest.warns(UserWarning, match="could not be read"):
            process.learned.resume()
        process.die()

    @pytest.mark.parametrize("damage", ["{bad", "[" * 100_000])
    def test_what_one_went_on_from_hides_no_other(
        self, file_url: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Store(file_url) as store:
            store.write([entry({"n": 1}, "a" * 32), entry({"n": 2}, "b" * 32), entry({"n": 3}, "c" * 32)])
            with store.writing() as connection:
                statement = text("UPDATE policy_states SET inherited = :damage WHERE process = :process")
                connection.execute(statement, {"damage": damage, "process": "b" * 32})
            found, num_damaged = store.policy_states(HERE, "v", NOW - timedelta(days=1))
            assert [each.state for each in found] == [{"n": 1}, {"n": 3}]
            assert num_damaged == 1
            (problem,) = check_database(store)
            assert problem.what == "1 of 3 learned states of policies cannot be read"
            assert export(store, tmp_path / "out", "csv") == {"policy_states.csv": 2}
        assert "b" * 32 in caplog.text
        with Store(f"sqlite:///{tmp_path / 'other.db'}") as other:
            for batch in read_export(tmp_path / "out"):
                other.write(batch)
            found, num_damaged = other.policy_states(HERE, "v", NOW - timedelta(days=1))
        assert [each.state["n"] for each in found] == [1, 3]
        assert not num_damaged

    def test_a_check_that_fails_in_its_own_way(self, file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        process = Process(file_url)
        process.work(0.8)
        process.end()

        def fail(policy: Any, state: Any) -> None:
            raise OverflowError("int too large to convert to float")

        monkeypatch.setattr("autospec.resuming.check", fail)
        with pytest.warns(UserWarning, match="1 of the states that policies had learned were skipped: int too large"):
            again = Process(file_url)
        again.die()

    @pytest.mark.parametrize("answer", ["raises", "nan"])
    def test_a_state_that_cannot_be_made_is_noted_once(
        self, file_url: str, answer: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Odd(Fixed):
            def state(self) -> Any:
                if answer == "raises":
                    raise RuntimeError("no")
                return {"x": float("nan")}

            def restore(self, state: Any) -> None: ...

        process = Process(file_url, Odd())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                process.learned.after_request(HERE)
                process.save_now() if answer == "raises" else None
            process.end()
        assert len(caught) + len(caplog.records) == 1
        assert rows(file_url) == []


COSTS = Costs(block_lengths=(1, 2, 4))
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def wrapped(url: str | None, model: Any = None, **options: Any) -> autospec.Speculator:
    policy = options.pop("policy", None) or Guard(Goodput(COSTS), COSTS, name="auto", control_share=0.0)
    return autospec.wrap(model if model is not None else tiny.llama(), store=url, policy=policy, **options)


class TestWrapped:
    def test_it_begins_where_the_last_one_ended(self, url: str) -> None:
        with wrapped(url) as first:
            answer = first.model.generate(tiny.prompt(20), **GREEDY)
        kept = first.policy.state()
        assert kept["segments"]
        with wrapped(url) as second:
            assert plain(second.policy.state()) == plain(kept)
            assert torch.equal(second.model.generate(tiny.prompt(20), **GREEDY), answer)
        with wrapped(url, resume=False) as third:
            assert not third.policy.state()["segments"]
            third.model.generate(tiny.prompt(20), **GREEDY)
        with Store(url) as store:
            assert store.count() == 3
        assert len(rows(url)) == 2

    def test_another_dtype_begins_anew(self, file_url: str) -> None:
        with wrapped(file_url) as first:
            first.model.generate(tiny.prompt(20), **GREEDY)
        with wrapped(file_url, tiny.llama(dtype=torch.float32)) as second:
            assert not second.policy.state()["segments"]

    def test_a_policy_that_learns_nothing_saves_nothing(self, file_url: str) -> None:
        with wrapped(file_url, policy="fixed:ngram:3") as speculator:
            speculator.model.generate(tiny.prompt(20), **GREEDY)
        assert rows(file_url) == []

    def test_neither_true_nor_false(self) -> None:
        with pytest.raises(ConfigurationError, match="resume='yes'"):
            wrapped(None, resume="yes")

    @pytest.mark.parametrize("end", ["exit", "kill"])
    def test_programs_that_do_not_close(self, file_url: str, end: str) -> None:
        code = f"""
import os, signal
from tests.test_policy_state import GREEDY, tiny, wrapped
speculator = wrapped({file_url!r})
speculator.model.generate(tiny.prompt(20), **GREEDY)
if {end!r} == "kill":
    speculator._learned._not_before = 0.0
    speculator.model.generate(tiny.prompt(20), **GREEDY)
    speculator.flush()
    speculator.model.generate(tiny.prompt(20), **GREEDY)
    os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True)
        assert done.returncode == (-9 if end == "kill" else 0), done.stderr.decode()
        with wrapped(file_url) as speculator:
            blocks = speculator.policy.state()["segments"]["default"]["blocks"]
        assert blocks > 0
