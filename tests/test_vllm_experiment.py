"""experiments/26_vllm without vLLM: its summary on rows whose answer is known, its plan, engines that take turns."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

EXPERIMENT = "26_vllm"
DECODINGS = ("greedy", "T = 0.8")
SLOW_START_SECONDS = 60.0


@pytest.fixture(scope="module")
def bench(experiment: ModuleType) -> Iterator[ModuleType]:
    """The script; its helpers are imported from its folder, under names that others may have, too."""
    yield experiment
    folders = {str(experiment.FOLDER), str(experiment.FOLDER.parent)}
    sys.path[:] = [place for place in sys.path if place not in folders]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(experiment.FOLDER)) and module is not experiment:
            del sys.modules[name]


def request(segment: str, number: int, seconds: float, tokens: int = 10, accepted: int = 0) -> dict[str, Any]:
    return {
        "prompt": f"{segment}{number}",
        "segment": segment,
        "seconds": seconds,
        "tokens": [1] * tokens,
        "num_draft_tokens": 2 * accepted,
        "num_accepted_tokens": accepted,
        "num_steps": accepted,
    }


def rows(speeds: dict[str, dict[int, float]], share: float = 0.01) -> list[dict[str, Any]]:
    """`speeds`: arm -> concurrency -> tokens a second of all requests together."""
    made = []
    for arm, sizes in speeds.items():
        for size, speed in sizes.items():
            for number, decoding in enumerate(DECODINGS):
                requests = [request(s, number, 10 * size / speed, accepted=2) for s in ("qa", "rag")]
                seconds = 20 / speed
                proposer = {"steps": 9, "step_seconds": seconds, "proposer_seconds": share * seconds}
                made.append(
                    {
                        "arm": arm,
                        "concurrency": size,
                        "decoding": decoding,
                        "chunk": 0,
                        "seconds": seconds,
                        "requests": requests,
                        "proposer": None if arm == "none" else proposer,
                    }
                )
    return made


class TestSummary:
    SPEEDS = {  # noqa: RUF012
        "none": {1: 10.0, 16: 100.0},
        "ngram": {1: 15.0, 16: 80.0},
        "suffix": {1: 12.0, 16: 120.0},
        "autospec, cold": {1: 14.0, 16: 97.0},
        "autospec, warm": {1: 18.0, 16: 99.0},
    }

    def test_rates_and_bars(self, bench: ModuleType) -> None:
        found = bench.summarise(rows(self.SPEEDS))
        assert list(found["groups"]) == ["1", "16"]
        for arm, sizes in self.SPEEDS.items():
            for size, speed in sizes.items():
                for group in found["groups"][str(size)].values():
                    assert group["arms"][arm]["tokens_per_second"] == pytest.approx(speed, rel=1e-3)
                    ratio = speed / self.SPEEDS["none"][size]
                    assert group["over_none"][arm]["all"] == pytest.approx([ratio] * 3, rel=1e-3)
        mix = found["groups"]["1"]["all"]["arms"]["ngram"]
        assert (mix["requests"], mix["output_tokens"], mix["num_draft_tokens"]) == (4, 40, 16)
        assert mix["latency_seconds"] == pytest.approx({"p50": 10 / 15, "p90": 10 / 15, "p99": 10 / 15}, abs=1e-3)
        assert (mix["greedy_answers_as_none"], mix["greedy_answers"]) == (2, 2)
        warm, cold = found["bars"]["autospec, warm"], found["bars"]["autospec, cold"]
        assert warm["best_fixed_alone"] == "ngram"
        assert warm["alone_over_best_fixed"] == pytest.approx(18 / 15, rel=1e-3)
        assert warm["crowded_over_none"] == pytest.approx(0.99, rel=1e-3)
        assert (warm["is_alone_met"], warm["is_crowded_met"], warm["is_share_met"]) == (True, True, True)
        assert (cold["is_alone_met"], cold["is_crowded_met"]) == (False, False)

    def test_no_speculation_can_be_the_best(self, bench: ModuleType) -> None:
        found = bench.summarise(rows({**self.SPEEDS, "none": {1: 20.0, 16: 100.0}}))
        assert found["bars"]["autospec, warm"]["best_fixed_alone"] == "none"
        assert not found["bars"]["autospec, warm"]["is_alone_met"]

    def test_the_proposers_share_is_that_of_the_worst_concurrency(self, bench: ModuleType) -> None:
        made = rows(self.SPEEDS)
        for row in made:
            if row["arm"] == "autospec, warm" and row["concurrency"] == 16:
                row["proposer"]["proposer_seconds"] *= 4
        found = bench.summarise(made)["bars"]
        assert found["autospec, warm"]["proposer_share"] == pytest.approx({"1": 0.01, "16": 0.04})
        assert not found["autospec, warm"]["is_share_met"]
        assert found["autospec, cold"]["is_share_met"]

    def test_answers_that_differ_are_counted(self, bench: ModuleType) -> None:
        made = rows(self.SPEEDS)
        other = next(row for row in made if row["arm"] == "ngram" and row["decoding"] == "greedy")
        other["requests"][0]["tokens"] = [2] * 10
        sampled = next(row for row in made if row["arm"] == "ngram" and row["decoding"] != "greedy")
        sampled["requests"][0]["tokens"] = [3] * 10
        arms = bench.summarise(made)["groups"]["1"]["all"]["arms"]
        assert (arms["ngram"]["greedy_answers_as_none"], arms["ngram"]["greedy_answers"]) == (1, 2)

    def test_tables_end_with_the_bars(self, bench: ModuleType) -> None:
        settings = {"ngram": {"1": "4, n-grams of 2 to 4", "16": "8, n-grams of 2 to 4"}}
        text = bench.tables(
            {**bench.summarise(rows(self.SPEEDS)), "settings_of": settings, "left_out": {"suffix": "no"}}
        )
        assert "left out, suffix: no" in text
        assert "| ngram (8, n-grams of 2 to 4) | 80.0 | 80.0 | 80.0 | 2.00 / 2.00 / 2.00 | 0.50 | 2.00 | 1.00% |" in (
            text
        )
        last = text.strip().splitlines()[-4:]
        assert last[0].startswith("| alone, over the best fixed: at least 1 | 0.933, missed | 1.200, met |")
        assert last[2].startswith("| proposer of a step: under 3% | 1.00% / 1.00%, met |")


class TestPlan:
    @staticmethod
    def segments(count: int) -> dict[str, list[str]]:
        return {name: [f"{name}{i}" for i in range(count)] for name in ("qa", "rag", "write")}

    def test_no_prompt_is_in_two_cells_and_segments_take_turns(self, bench: ModuleType) -> None:
        plan = bench.make_plan(self.segments(30), (1, 4, 16), DECODINGS, (2, 3, 6), (1, 1, 2))
        cells = [*plan.rehearsed, *plan.measured]
        assert [(c.concurrency, c.decoding, len(c.prompts)) for c in plan.measured] == [
            (size, decoding, 3 * count) for size, count in ((1, 2), (4, 3), (16, 6)) for decoding in DECODINGS
        ]
        assert max(Counter(prompt for cell in cells for prompt in cell.prompts).values()) == 1
        assert [prompt.rstrip("0123456789") for prompt in plan.measured[0].prompts] == ["qa", "rag", "write"] * 2
        assert [len(cell.chunks) for cell in plan.measured] == [6, 6, 1, 1, 1, 1]
        assert plan == bench.make_plan(self.segments(30), (1, 4, 16), DECODINGS, (2, 3, 6), (1, 1, 2))

    def test_too_few_prompts_are_said(self, bench: ModuleType) -> None:
        with pytest.raises(ValueError, match="segment qa has 29 prompts, 30 are needed"):
            bench.make_plan(self.segments(29), (1, 4, 16), DECODINGS, (2, 3, 6), (1, 1, 2))


class TestArms:
    @staticmethod
    def bench_of(bench: ModuleType, tmp_path: Path, *, no_sweep: bool = False) -> Any:
        plan = bench.make_plan(TestPlan.segments(30), (1, 4, 16), DECODINGS, (2, 3, 6), (1, 1, 2))
        options = argparse.Namespace(env=tmp_path, no_sweep=no_sweep, tokens=8)
        work = bench.work_of_bench.Work(tmp_path / "work.jsonl", {})
        made = bench.Bench(options, plan, work, tmp_path)
        made.left_out["suffix"] = "not installed"
        return made

    def test_the_best_settings_are_measured(
        self, bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bench.models, "resolve", lambda name: name)
        made = self.bench_of(bench, tmp_path)
        speeds = {"4, n-grams of 2 to 4": {1: 20.0, 16: 30.0}, "8, n-grams of 2 to 4": {1: 10.0, 16: 40.0}}
        for row in rows(speeds):
            setting = row.pop("arm")
            made.work.add("sweep", family="ngram", setting=setting, arm=f"ngram {setting}", **row)
        half = rows({"2, n-grams of 1 to 3": {1: 99.0, 16: 99.0}})[:3]  # it failed before the last cell
        for row in half:
            setting = row.pop("arm")
            made.work.add("sweep", family="ngram", setting=setting, arm=f"ngram {setting}", **row)
        at = {"1": "4, n-grams of 2 to 4", "4": "4, n-grams of 2 to 4", "16": "8, n-grams of 2 to 4"}
        assert made.settings_of() == {"ngram": at}
        assert list(made.arms(16)) == ["none", "ngram", "autospec, cold", "autospec, warm"]
        assert made.arms(16)["ngram"].speculative["num_speculative_tokens"] == 8
        assert made.arms(4)["ngram"].speculative["num_speculative_tokens"] == 4

    def test_a_family_of_which_nothing_works_is_left_out(
        self, bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bench.models, "resolve", lambda name: name)
        made = self.bench_of(bench, tmp_path)
        for setting in ("4, n-grams of 2 to 4", "8, n-grams of 2 to 4"):
            made.work.add("sweep", family="ngram", setting=setting, arm=setting, error="ValueError: no")
        assert made.settings_of() == {}
        assert made.left_out["ngram"] == "no setting works: ValueError: no"

    def test_turns_alternate(self, bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench.models, "resolve", lambda name: name)
        turns = list(self.bench_of(bench, tmp_path, no_sweep=True).turns())
        assert len(turns) == 4 * (6 + 6 + 1 + 1 + 1 + 1)
        order = [turn["name"] for turn in turns]
        assert order[:4] == ["none", "ngram", "autospec, cold", "autospec, warm"]
        assert order[4:8] == ["none", "autospec, warm", "autospec, cold", "ngram"]
        assert len({turn["key"] for turn in turns}) == len(turns)


TALKER = """
import json, subprocess, sys
child = None
for line in sys.stdin:
    if json.loads(line)["do"] == "start":
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    print(json.dumps({"reply": {"child": child and child.pid}}), flush=True)
child.kill()
"""


def until(holds: Callable[[], bool], seconds: float = SLOW_START_SECONDS) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


class TestEngines:
    def test_who_waits_is_stopped_with_all_below_it(self, bench: ModuleType, tmp_path: Path) -> None:
        engine = bench.Engine([sys.executable, "-c", TALKER], {}, tmp_path / "log")
        child = psutil.Process(engine.ask("start")["child"])
        try:
            top = child.parent()
            assert until(lambda: child.status() == top.status() == psutil.STATUS_STOPPED)
            before = child.cpu_times().user
            time.sleep(0.3)
            assert child.cpu_times().user == before
            assert engine.idle_share(0.5) > 0.0
            assert until(lambda: child.status() == psutil.STATUS_STOPPED)
            assert engine.unique_bytes() > 0
            assert engine.ask("more") == {"child": child.pid}
        finally:
            engine.close()
        assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)

    def test_engines_whose_asker_is_gone_end(self, bench: ModuleType, tmp_path: Path) -> None:
        """However that went: nothing may lie stopped in memory."""
        serve = bench.FOLDER / "serve.py"
        asker = (
            f"import os, sys; sys.path[:0] = [{str(bench.FOLDER)!r}, {str(bench.FOLDER.parent)!r}]\n"
            "from pathlib import Path\nfrom engine import Engine\n"
            f"engine = Engine([sys.executable, {str(serve)!r}], dict(os.environ), Path({str(tmp_path / 'log')!r}))\n"
            "print(engine._process.pid, flush=True)\nos._exit(9)\n"
        )
        done = subprocess.run([sys.executable, "-c", asker], capture_output=True, text=True, check=False)
        assert done.returncode == 9, done.stderr
        number = int(done.stdout)
        assert until(lambda: not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE)


def test_the_stopwatch_measures_the_proposer_and_the_steps(bench: ModuleType) -> None:
    made = bench.script(EXPERIMENT, "stopwatch").Stopwatch
    stopwatch = made()
    drafter = SimpleNamespace(propose=lambda sampled, *, wanted: (time.sleep(0.02), [sampled] * wanted)[1])
    stopwatch.model_runner = SimpleNamespace(drafter=drafter)
    stopwatch.watch()
    stopwatch.watch()  # again: it is not measured twice
    for _ in range(4):
        assert drafter.propose([1], wanted=2) == [[1], [1]]
        time.sleep(0.05)
    found = stopwatch.watched()
    assert found["steps"] == 3
    assert 0.06 <= found["proposer_seconds"] < found["step_seconds"]
    assert found["step_seconds"] >= 3 * 0.07
    stopwatch.watch()
    assert stopwatch.watched() == {"steps": 0, "step_seconds": 0.0, "proposer_seconds": 0}
    without = made()
    without.model_runner = SimpleNamespace()
    without.watch()
    assert without.watched() is None
