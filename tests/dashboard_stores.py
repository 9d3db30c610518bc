"""For the dashboard's tests: databases with requests, controls, traces, tokens and states, and a process on one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import numpy as np
import optuna
from sqlalchemy import insert

from autospec.telemetry import codec, traces
from autospec.telemetry.schema import HourlyActions, HourlyPositions, HourlyRequests
from autospec.telemetry.store import Store
from autospec.types import (
    Action,
    ActionTally,
    BlockOutcome,
    CalibrationSample,
    Comparison,
    Deployment,
    EngineCounters,
    PhaseSeconds,
    PolicyState,
    PolicyVersion,
    RecordedTokens,
    RequestRecord,
)

SECONDS = 60
NOON = datetime(2026, 10, 24, 12, tzinfo=UTC)
HERE = Deployment("host", "cpu: two threads", "target-a", "float32", ("ngram",), {"torch": "2.9"}, 500_000_000)
THERE = Deployment("host", "cuda: some", "target-b", "bfloat16", ("ngram",), {"torch": "2.9"}, 500_000_000)

POLICY = """
format = "autospec-policy"
version = 1
default = {source = "none", block_length = 0}
[segments]
fast = {source = "ngram", block_length = 2}
"<img src=x>" = {policy = "goodput", settings = {discount = 0.9}}
[made]
by = "autospec tune"
[made.speed_up]
fast = [1.4, 1.2, 1.6]
"""

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<!--<script>&\"'\u2028\u2029",
    "y" * 10_000,
    "\u202egnp.exe\u2066\u200f\u05d0",
    "half \ud800",
    "'; DROP TABLE requests; --",
    "{{ 7 * 7 }}",
    " ",
)


def record(
    number: int, segment: str, *, is_control: bool = False, factor: float = 1.0, **changes: object
) -> RequestRecord:
    """One request; `factor` is how much faster than its control it is."""
    random = np.random.default_rng(number // 2)
    blocks = int(random.integers(20, 40))
    accepted = (blocks * 3 // 4, blocks // 2)
    tokens = 1 + blocks + (0 if is_control else sum(accepted))
    plain = 0.05 * tokens
    tally = ActionTally(
        blocks, 2 * blocks, blocks + accepted[0], sum(accepted), blocks + sum(accepted), 0.002 * blocks, 0.05 * blocks,
        0.001 * blocks, 0.001 * blocks, (blocks, accepted[0]), accepted,
    )  # fmt: skip
    drafted = {1: blocks - accepted[0], 2: accepted[0] - accepted[1], 3: accepted[1]}
    alone = ActionTally(blocks, num_committed_tokens=blocks, verify_seconds=0.04 * blocks)
    values: dict[str, object] = {
        "policy": "off" if is_control else "auto",
        "blocks": blocks,
        "num_draft_tokens": 0 if is_control else 2 * blocks,
        "num_judged_tokens": 0 if is_control else blocks + accepted[0],
        "num_accepted_tokens": 0 if is_control else sum(accepted),
        "acceptance_lengths": {1: blocks} if is_control else drafted,
        "at_risk": () if is_control else (blocks, accepted[0]),
        "accepted": () if is_control else accepted,
        "actions": {"none" if is_control else "ngram:2": blocks},
        "by_action": {"none": alone} if is_control else {"ngram:2": tally},
        "decisions": {} if is_control else {"ngram:2 best": blocks - 2, "ngram:2 explore": 2},
        "policy_version": None if is_control else "v1",
        "predicted_control_seconds": None if is_control else plain * 1.02,
        "deployment": HERE,
        "do_sample": False,
        "started_at": NOON + timedelta(minutes=7 * number),
        **changes,
    }
    seconds = plain / (1.0 if is_control else factor * float(random.uniform(0.95, 1.05)))
    return RequestRecord(
        request_id=f"{number:032x}",
        segment=segment,
        is_control=is_control,
        decoding="greedy",
        prompt_tokens=100,
        output_tokens=tokens,
        seconds=PhaseSeconds(*(share * seconds for share in (0.1, 0.05, 0.7, 0.05, 0.05, 0.05))),
        **values,  # type: ignore[arg-type]
    )  # fmt: skip


def pairs(segment: str, count: int, factor: float, first: int = 0) -> tuple[list[RequestRecord], list[Comparison]]:
    """Requests, each beside its own control."""
    found, comparisons = [], []
    for number in range(first, first + 2 * count, 2):
        found += [record(number, segment, is_control=True), record(number + 1, segment, factor=factor)]
        comparisons.append(Comparison(f"{number:032x}", f"{number + 1:032x}", True))
    return found, comparisons


def blocks(segment: str) -> list[BlockOutcome]:
    """Each kind of block once: a rejection, all accepted, cut off by the end, a plain step."""
    action = Action("ngram", 3, "best: <b>1.30x</b>")
    return [
        BlockOutcome(segment, action, 100, 3, 2, 1, 2, 0.001, 0.05),
        BlockOutcome(segment, action, 102, 3, 3, 3, 4, 0.001, 0.05),
        BlockOutcome(segment, Action(reason="off: nothing pays"), 106, 0, 0, 0, 1, 0.0, 0.04),
        BlockOutcome(segment, action, 107, 3, 2, 2, 2, 0.001, 0.05),
    ]


def fill(store: Store, segments: Sequence[tuple[str, float]] = (("fast", 1.5), ("slow", 0.7), ("even", 1.0))) -> None:
    """Twelve pairs in each segment; everything else that a page may show, too."""
    for place, (name, factor) in enumerate(segments):
        found, comparisons = pairs(name, 12, factor, first=100 * place)
        store.add(found, comparisons)
    store.add(
        [
            record(
                9_001, "kept", trace=traces.pack(blocks("kept")), tokens=RecordedTokens((1, 2, 3), (77_001, 77_002), {})
            ),
            record(9_003, "kept", deployment=THERE, do_sample=True, fallback_reason="beams: num_beams=4"),
        ]
    )
    samples = [("target", tokens, 0.04 + 0.002 * tokens) for tokens in (1, 2, 4, 8)]
    samples += [("ngram", tokens, 0.001) for tokens in (1, 2, 4)]
    state = {"segments": {"slow": {"trips": 2, "blocks": 500, "paused_until": 620, "brake": {"log_wealth": 1.25}}}}
    extra = [
        PolicyVersion("auto", "v1", {"control_share": 0.02}, "wrap", NOON),
        *(CalibrationSample(HERE, NOON, source, tokens, 100, seconds) for source, tokens, seconds in samples),
        PolicyState(HERE, "auto", "v1", "0" * 32, NOON, state),
    ]
    store.write([codec.to_entry(item) for item in extra])


def engine(name: str, **changes: object) -> EngineCounters:
    """An engine that is known by its counters."""
    found = EngineCounters(
        name, "target-a", "vllm", "ngram", NOON, NOON - timedelta(hours=3),
        12, 3_000, 1_200, 1_200, 48.0, 300, 240, 720, 480, (200, 160, 120),
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]


def fill_hostile(store: Store) -> None:
    """Names, texts and reasons that try to act on a page."""
    for place, name in enumerate(HOSTILE):
        store.add(*pairs(name, 4, 1.1 + place / 20, first=20_000 + 100 * place))
        store.add([record(30_000 + place, name, policy=name, policy_version=name, error=name)])
        place_of_it = Deployment(name, name, name, name, (name,), {name: name})
        more = record(31_000 + place, name, fallback_reason=name, actions={f"{name}:2": 3}, notes=name, run=name)
        store.add([replace(more, deployment=place_of_it)])
        store.write([codec.to_entry(engine(name, target=name, device=name, source=name))])


def fill_large(store: Store, requests: int = 5_000_000, segments: int = 40, days: int = 14) -> None:
    """As many requests as that, of which only their sums by the hour are left; and a few more."""
    fill(store)
    start = NOON - timedelta(days=days)
    hours = [start + timedelta(hours=hour) for hour in range(24 * days)]
    each = requests // (segments * len(hours) * 20)  # twenty parts, one of them control
    rows, actions, positions = [], [], []
    for place, hour in product(range(segments), hours):
        segment = f"segment {place:02}"
        for is_control in (False, True):
            count = each if is_control else 19 * each
            seconds = 4.0 * count / (1.0 if is_control else 0.6 + 0.03 * place)
            rows.append(summed(hour, segment, is_control, count, seconds))
        key = {"hour": hour, "segment": segment, "source": "ngram", "block_length": 4}
        counts = dict.fromkeys(("num_draft_tokens", "num_judged_tokens", "num_accepted_tokens"), 40 * each)
        phases = dict.fromkeys((f"{phase}_seconds" for phase in ("draft", "verify", "correction", "emission")), 1.0)
        actions.append({**key, "blocks": 20 * each, "num_committed_tokens": 60 * each, **counts, **phases})
        positions += [{**key, "position": j, "at_risk": 20 * each, "accepted": 10 * each} for j in (1, 2, 3, 4)]
    with store.writing() as connection:
        for table, found in ((HourlyRequests, rows), (HourlyActions, actions), (HourlyPositions, positions)):
            connection.execute(insert(table), found)


def summed(hour: datetime, segment: str, is_control: bool, count: int, seconds: float) -> dict[str, object]:
    """A row of sums over requests that are all alike."""
    tokens = 100 * count
    values: dict[str, object] = {column.name: 0 for column in HourlyRequests.__table__.columns}
    return values | {
        "hour": hour,
        "segment": segment,
        "policy": "off" if is_control else "auto",
        "deployment_id": 1,
        "is_control": is_control,
        "do_sample": False,
        "requests": count,
        "output_tokens": tokens,
        "blocks": tokens // 3,
        "block_tokens": tokens,
        "verify_seconds": seconds,
        "total_seconds": seconds,
        "squared_seconds": 1.1 * seconds**2 / count,
        "squared_tokens": 1.1 * tokens**2 / count,
        "seconds_times_tokens": seconds * tokens / count,
        "predicted": 0 if is_control else count,
        "predicted_control_seconds": 0.0 if is_control else 4.0 * count,
        "predicted_seconds": 0.0 if is_control else seconds,
        "saved_seconds": max(0.0, 4.0 * count - seconds),
        "lost_seconds": max(0.0, seconds - 4.0 * count),
    }


def make_study(folder: Path) -> str:
    """One candidate walked twice, one that is slower, one given up, one that failed; the URL."""
    url = f"sqlite:///{folder / 'study #1.db'}"
    made = optuna.create_study(storage=url, study_name="<b>mine</b>")
    for part, on in (({"source": "ngram", "block_length": 2}, 8.0), ({"source": "none", "block_length": 0}, 12.0)) * 2:
        trial = made.ask()
        trial.set_user_attr("part", part)
        trial.set_user_attr("seconds", {"fast": [on, 12.0], "slow": [on / 4, 2.0]})
        made.tell(trial, on / 12)
    made.tell(made.ask(), state=optuna.trial.TrialState.PRUNED)
    made.tell(made.ask(), state=optuna.trial.TrialState.FAIL)
    return url


def file_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'dashboard.db'}"


@contextmanager
def served(url: str, *arguments: str) -> Iterator[str]:
    """A process that serves the dashboard; its address."""
    code = "from autospec.cli import main; main()"
    command = [sys.executable, "-c", code, "dashboard", "--store", url, "--port", "0", *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as it:
        assert it.stderr is not None
        try:
            lines = iter(it.stderr.readline, "")
            found = next(found for line in lines if (found := re.search(r"http://\S+", line)))
            yield found.group(0)
        finally:
            it.send_signal(signal.SIGINT)
            assert it.wait(SECONDS) == 0
            assert it.stderr.read() == ""
