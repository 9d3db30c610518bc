"""Every policy on traffic whose truth is known: what it loses against an oracle, and the bars of `auto`."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from plot import lines
from simulator import (
    BFLOAT16,
    FLOAT32,
    LENGTHS,
    Block,
    Device,
    Oracle,
    Segment,
    Source,
    Step,
    Traffic,
    best_fixed,
    blocks,
    goodput,
    goodputs,
    run,
)
from tqdm import tqdm

from autospec.costs import CostModel, CostTable, Curve
from autospec.policies import Goodput, Guard, Policy, make_policy
from autospec.types import Action

T = TypeVar("T", Step, Block)
DEVICES = {"bfloat16": BFLOAT16, "float32": FLOAT32}
POLICIES = (
    "off",
    "transformers_constant:assistant:5",
    "transformers_heuristic:assistant",
    "epsilon_greedy",
    "ucb",
    "thompson",
    "exp3",
    "linucb",
    "hedge",
    "goodput",
    "auto",
)
ALWAYS = ("off", "goodput", "auto")
MIXED: dict[str, Segment] = {
    "copy": {
        "ngram": Source(0.85, 1.0, 0.9, is_retrieval=True),
        "suffix": Source(0.8, 1.0, 0.7, is_retrieval=True),
        "assistant": Source(0.5, 0.5),
    },
    "structured": {
        "ngram": Source(0.7, 1.5, 0.8, is_retrieval=True),
        "suffix": Source(0.85, 1.5, 0.7, is_retrieval=True),
        "assistant": Source(0.6, 0.5),
    },
    "translation": {
        "ngram": Source(0.5, 1.2, 0.5, is_retrieval=True),
        "suffix": Source(0.55, 1.2, 0.5, is_retrieval=True),
        "assistant": Source(0.6, 0.5),
    },
    "mathematics": {
        "ngram": Source(0.4, 1.2, 0.6, is_retrieval=True),
        "suffix": Source(0.5, 1.2, 0.6, is_retrieval=True),
        "assistant": Source(0.65, 0.5),
    },
    "dialogue": {
        "ngram": Source(0.15, 1.0, 0.4, is_retrieval=True),
        "suffix": Source(0.2, 1.0, 0.4, is_retrieval=True),
        "assistant": Source(0.75, 0.5),
    },
    "creative": {
        "ngram": Source(0.08, 0.8, 0.4, is_retrieval=True),
        "suffix": Source(0.1, 0.8, 0.4, is_retrieval=True),
        "assistant": Source(0.3, 0.5),
    },
}
SWAP = {"copy": "dialogue", "dialogue": "copy", "creative": "structured", "structured": "creative"}
FOUR = {name: MIXED[name] for name in SWAP}
NEVER: dict[str, Segment] = {
    name: {
        "ngram": Source(0.02, 0.5, 0.5, is_retrieval=True),
        "suffix": Source(0.02, 0.5, 0.5, is_retrieval=True),
        "assistant": Source(rate, 0.3),
    }
    for name, rate in (("poor", 0.08), ("poorer", 0.03), ("useless", 0.005))
}


def _switching(done: float) -> Mapping[str, Segment]:
    """In the middle, what copied begins to converse and what conversed begins to copy."""
    return FOUR if done < 0.5 else {name: MIXED[other] for name, other in SWAP.items()}


def _drifting(done: float) -> Mapping[str, Segment]:
    """Acceptance goes slowly from that of one segment to that of another."""
    other = {"copy": "creative", "creative": "copy", "dialogue": "translation", "translation": "dialogue"}
    share = round(done * 20) / 20

    def between(a: Source, b: Source) -> Source:
        return replace(a, rate=(1 - share) * a.rate + share * b.rate, hit=(1 - share) * a.hit + share * b.hit)

    return {
        name: {source: between(truth, MIXED[other.get(name, name)][source]) for source, truth in segment.items()}
        for name, segment in MIXED.items()
    }


def _many() -> tuple[dict[str, Segment], list[float]]:
    """120 segments of the six kinds, their traffic falling off as one over rank."""
    rng = np.random.default_rng(7)
    kinds = list(MIXED)
    segments: dict[str, Segment] = {}
    for rank in range(120):
        kind = MIXED[kinds[int(rng.integers(len(kinds)))]]
        segments[f"tenant {rank}"] = {
            source: replace(truth, rate=float(np.clip(truth.rate * rng.uniform(0.8, 1.2), 0.01, 0.95)))
            for source, truth in kind.items()
        }
    return segments, [1.0 / (rank + 1) for rank in range(120)]


@dataclass(frozen=True)
class Scenario:
    """Traffic, and which of its blocks count."""

    traffic: Traffic
    what: str
    after: int = 0  # blocks of each segment that are left out at its beginning


def scenarios(blocks: int) -> dict[str, Scenario]:
    """Args: blocks: of each trace; three times as many where the first 500 of each segment are left out."""
    many, weights = _many()
    return {
        "stationary": Scenario(Traffic(MIXED, 3 * blocks), "six segments; after 500 blocks of each", after=500),
        "cold start": Scenario(Traffic(MIXED, blocks // 5), "the same, from the first block, a tenth of it"),
        "switching": Scenario(Traffic(FOUR, 2 * blocks, changed=_switching), "four segments change places"),
        "drifting": Scenario(Traffic(MIXED, blocks, changed=_drifting), "four segments slowly become another"),
        "many segments": Scenario(Traffic(many, blocks, weights), "120 segments, traffic as one over rank"),
        "never pays": Scenario(Traffic(NEVER, blocks), "no source is worth it"),
        "device slows": Scenario(
            Traffic(MIXED, blocks, slowed=lambda done: 1.0 if done < 0.5 else 1.8), "everything takes 1.8 times as long"
        ),
    }


def estimates(device: Device, seed: int) -> CostModel:
    """As calibration would find them: medians that are off by a percent or two."""
    rng = np.random.default_rng(1000 + seed)
    widths = (1, *(length + 1 for length in LENGTHS))

    def off() -> float:
        return float(np.exp(0.015 * rng.normal()))

    verify = tuple(device.verify_seconds(width, 0) * off() for width in widths)
    drafts = {
        source: tuple(device.draft_seconds(source, length, 0) * off() for length in LENGTHS)
        for source in ("ngram", "suffix", "assistant")
    }
    return CostModel(
        CostTable(
            LENGTHS,
            Curve((64, 8192), widths, (verify, verify)),
            {source: Curve((64, 8192), LENGTHS, (row, row)) for source, row in drafts.items()},
        )
    )


def _policy(name: str, costs: CostModel, seed: int) -> Policy:
    if name == "auto":  # with controls that are the same in each run
        return Guard(Goodput(costs), costs, name="auto", seed=seed)
    return make_policy(name, ["ngram", "suffix", "assistant"], lambda: costs)


def _per_segment(steps: Sequence[T], after: int) -> Iterator[T]:
    seen: dict[str, int] = {}
    for step in steps:
        seen[step.segment] = seen.get(step.segment, 0) + 1
        if seen[step.segment] > after:
            yield step


_ACTIONS: dict[object, Action] = {}


def _best(segment: Segment, device: Device) -> Action:
    key = (json.dumps({name: vars_of(truth) for name, truth in segment.items()}, sort_keys=True), id(device))
    if key not in _ACTIONS:
        _ACTIONS[key] = best_fixed(segment, device, 2_000)
    return _ACTIONS[key]


def vars_of(truth: Source) -> list[float]:
    return [truth.rate, truth.spread, truth.hit, float(truth.is_retrieval)]


def one(job: tuple[str, str, int, int, bool]) -> dict[str, object]:
    """All policies, or `auto` and what is in it alone, on one scenario, device and seed."""
    scenario_name, device_name, seed, num_blocks, is_whole = job
    policies = POLICIES if is_whole else ALWAYS
    scenario, device = scenarios(num_blocks)[scenario_name], DEVICES[device_name]
    traffic = scenario.traffic

    def oracle_action(segment: str, block: int) -> Action:
        done = block / traffic.blocks
        return _best((traffic.changed(done) if traffic.changed else traffic.segments)[segment], device)

    met = list(blocks(traffic, device, seed))
    made: dict[str, list[Step]] = {"oracle": run(Oracle(oracle_action), met, device)}
    seconds: dict[str, float] = {}
    for name in policies:
        costs = estimates(device, seed)
        started = time.perf_counter()
        made[name] = run(_policy(name, costs, seed), met, device, costs)
        seconds[name] = (time.perf_counter() - started) / len(met)
    kept = {name: list(_per_segment(steps, scenario.after)) for name, steps in made.items()}
    result: dict[str, object] = {
        "scenario": scenario_name,
        "device": device_name,
        "seed": seed,
        "share": {name: goodput(steps) / goodput(kept["oracle"]) for name, steps in kept.items()},
        "against_off": {name: goodput(steps) / goodput(kept["off"]) for name, steps in kept.items()},
        "regret": {name: _regret(steps, made["oracle"]) for name, steps in made.items()},
        "microseconds": {name: round(1e6 * each) for name, each in seconds.items()},
    }
    if scenario_name == "stationary":
        result["worst_segment"] = {
            name: min(
                goodput([s for s in kept[name] if s.segment == segment])
                / goodput([s for s in kept["oracle"] if s.segment == segment])
                for segment in traffic.segments
            )
            for name in policies
        }
        late = list(_per_segment(met, scenario.after))
        fixed = goodputs(late, device)
        best = max(fixed, key=lambda action: fixed[action])
        result["best_fixed"] = [best.label, fixed[best] / goodput(kept["oracle"])]
    if scenario_name == "switching":
        result["after_switch"] = {name: _after_switch(made[name], made["oracle"]) for name in policies}
    return result


def _regret(steps: Sequence[Step], oracle: Sequence[Step], points: int = 40) -> list[float]:
    """Plain steps lost against the oracle by then, at so many points of the traffic."""
    lost = np.cumsum([_value(theirs) - _value(mine) for mine, theirs in zip(steps, oracle, strict=True)])
    return [round(float(lost[int(len(lost) * (i + 1) / points) - 1]), 1) for i in range(points)]


def _value(step: Step) -> float:
    """Plain steps that the block saved."""
    return step.tokens - step.seconds / step.plain_seconds


def _after_switch(steps: Sequence[Step], oracle: Sequence[Step]) -> dict[str, float]:
    """Share of the oracle's goodput by 50s of blocks of each segment after the switch."""
    middle = len(steps) // 2
    shares = {}
    for first in range(0, 400, 50):
        mine, theirs = [], []
        for segment in SWAP:
            own = [i for i in range(middle, len(steps)) if steps[i].segment == segment][first : first + 50]
            mine += [steps[i] for i in own]
            theirs += [oracle[i] for i in own]
        shares[str(first)] = goodput(mine) / goodput(theirs)
    return shares


def _summary(results: Sequence[dict[str, object]], of: Callable[[dict[str, object]], float]) -> list[float]:
    """Median over seeds, and the least and the largest."""
    values = [of(result) for result in results]
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--others", type=int, default=20, help="seeds for policies other than auto and goodput")
    parser.add_argument("--blocks", type=int, default=1_800, help="of a trace")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    names = list(scenarios(arguments.blocks))
    jobs = [
        (s, d, seed, arguments.blocks, seed < arguments.others)
        for s in names
        for d in DEVICES
        for seed in range(arguments.seeds)
    ]
    with ProcessPoolExecutor(arguments.workers) as pool:
        results = list(tqdm(pool.map(one, jobs), total=len(jobs), unit="trace"))
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    plots = {}
    for name in names:
        for device in DEVICES:
            some = [r for r in results if (r["scenario"], r["device"]) == (name, device)]
            place = table.setdefault(name, {})[device] = {
                policy: _summary(
                    [r for r in some if policy in r["share"]],  # type: ignore[operator]
                    lambda r, policy=policy: r["share"][policy],  # type: ignore[index, misc]
                )
                for policy in POLICIES
            }
            place["auto against off"] = _summary(some, lambda r: r["against_off"]["auto"])  # type: ignore[index]
            if name == "stationary":
                place["best fixed"] = _summary(some, lambda r: r["best_fixed"][1])  # type: ignore[index]
                place["auto over best fixed"] = _summary(some, lambda r: r["share"]["auto"] / r["best_fixed"][1])  # type: ignore[index]
                place["worst segment of auto"] = _summary(some, lambda r: r["worst_segment"]["auto"])  # type: ignore[index]
            if name == "switching":
                for first in range(0, 400, 50):
                    key = str(first)
                    place[f"auto, blocks {first} to {first + 49} after"] = _summary(
                        some,
                        lambda r, key=key: r["after_switch"]["auto"][key],  # type: ignore[index, misc]
                    )
            plots[f"{name}, {device}"] = {
                policy: np.mean([r["regret"][policy] for r in some if policy in r["regret"]], axis=0).tolist()  # type: ignore[index, operator]
                for policy in POLICIES
                if policy not in ("off",)
            }
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    report = {
        "machine": machine,
        "seeds": arguments.seeds,
        "seeds_of_others": arguments.others,
        "blocks": arguments.blocks,
        "share_of_oracle": table,
    }
    (arguments.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "regret.svg").write_text(lines(plots))
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
