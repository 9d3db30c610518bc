"""How well the cost model foretells the seconds of drafting and verifying, beside how well a repeat foretells a repeat.

    python experiments/12_cost_model/run.py [--dtype bfloat16] [--rounds 6] [--quick] [--out DIR]

Calibrations and rounds of held-out measurements take turns. Each round times every point once: contexts from 64 to
4,096 tokens, 1 to 17 tokens verified, 1 to 16 drafted, most of them not in the calibration's grid. Then requests are
decoded with a draft source and block length drawn anew for each block, and the seconds of their blocks are foretold.
Run it on an idle machine. Exits 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import autospec
from autospec import models
from autospec.costs import CostModel, CostTable
from autospec.costs.calibration import calibrate
from autospec.costs.probes import DraftProbe, VerifyProbe
from autospec.data import encode, interleaved, load_prompts
from autospec.deployment import device_name
from autospec.drafts import Assistant, NGram, Suffix
from autospec.types import OFF, Action, BlockContext, BlockOutcome

TARGET = "smollm2-135m"
ASSISTANT = "smollm2-135m-assistant"
VERIFY = "verify"
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 3072, 4096)
WIDTHS = tuple(range(1, 18))
BLOCK_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
LONG_CONTEXTS = (1000, 2000, 3000, 4000)
NEW_TOKENS = 48
MEDIAN_BAR, P90_BAR, TOTAL_BAR, TOTAL_SHARE_BAR = 0.05, 0.10, 0.05, 0.90
FOLDER = Path(__file__).parent

Point = tuple[str, int, int]  # kind (verify or a source), context, tokens


@dataclass(frozen=True)
class Prediction:
    """A held-out measurement and what was foretold of it."""

    point: Point
    foretold: float
    measured: float
    is_in_grid: bool

    @property
    def error(self) -> float:
        return abs(self.foretold / self.measured - 1.0)


class Wandering:
    """Draws a source and a block length for each block, and notes what both models foretold of it."""

    name = "wandering"

    def __init__(self, table: CostTable) -> None:
        self._random = random.Random()
        self._models = {"calibrated": CostModel(table), "refined": CostModel(table)}
        self.measured = 0.0
        self.foretold = dict.fromkeys(self._models, 0.0)

    def begin(self, number: int) -> None:
        """Args: number: of the request; the same one draws the same actions."""
        self._random.seed(number)
        self.measured, self.foretold = 0.0, dict.fromkeys(self._models, 0.0)

    def choose(self, context: BlockContext) -> Action:
        length = self._random.choice((0, *BLOCK_LENGTHS))
        return Action(self._random.choice(context.sources), length) if length and context.sources else OFF

    def observe(self, outcome: BlockOutcome) -> None:
        action, width = outcome.action, outcome.num_draft_tokens + 1 + outcome.num_padding_tokens
        self.measured += outcome.draft_seconds + outcome.verify_seconds
        for name, model in self._models.items():
            self.foretold[name] += model.verify_seconds(width, outcome.context_tokens)
            if action.block_length:
                self.foretold[name] += model.draft_seconds(action.source, action.block_length, outcome.context_tokens)
        self._models["refined"].observe(outcome)


def main() -> int:
    options = parse_options()
    logging.getLogger("autospec").setLevel(logging.ERROR)
    model, tokenizer = models.load(TARGET, dtype=options.dtype)
    sources = {"ngram": NGram(), "suffix": Suffix(learns=False)}
    sources["assistant"] = Assistant(models.load_model(ASSISTANT, dtype=options.dtype))
    for source in sources.values():
        source.attach(model, tokenizer)
    contexts = CONTEXTS[::3] if options.quick else CONTEXTS
    points = held_out(model, sources, contexts, WIDTHS[::4] if options.quick else WIDTHS)
    order = random.Random(0)
    tables: list[CostTable] = []
    rounds: list[dict[Point, float]] = []
    for _ in tqdm(range(1 if options.quick else options.rounds), desc="calibration and held-out round"):
        tables.append(calibrate(model, sources))
        rounds.append(timed(points, order))
    rounds.append(timed(points, order))  # for the floor
    foretold = [p for table, found in zip(tables, rounds, strict=False) for p in predictions(table, found)]
    floor = [
        Prediction(point, before[point], after[point], is_in_grid=is_in_grid(tables[0], point))
        for before, after in pairwise(rounds)
        for point in before
    ]
    usual = medians(rounds)
    typical = [p for table in tables for p in predictions(table, usual)]
    halves = [
        Prediction(point, seconds, medians(rounds[1::2])[point], is_in_grid=is_in_grid(tables[0], point))
        for point, seconds in medians(rounds[::2]).items()
    ]
    totals = requests(model, tokenizer, list(sources.values()), calibrate(model, sources), 4 if options.quick else 36)
    results = {
        "target": TARGET,
        "assistant": ASSISTANT,
        "dtype": options.dtype,
        "is_quick": options.quick,
        "rounds": len(tables),
        "device": device_name(model.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "calibration_seconds": [round(table.calibration_seconds, 2) for table in tables],
        "errors": errors(foretold),
        "floor": errors(floor),
        "errors_of_medians": errors(typical),
        "floor_of_medians": errors(halves),
        "requests": totals,
        "table": tables[0].to_json(),
        "held_out_ms": {
            f"{kind} {context} {tokens}": round(1000 * seconds, 4) for (kind, context, tokens), seconds in usual.items()
        },
    }
    results["missed"] = missed(results)
    options.out.mkdir(parents=True, exist_ok=True)
    name = "results.json" if options.dtype == "bfloat16" else f"results_{options.dtype}.json"
    (options.out / name).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report(results)
    return 1 if results["missed"] else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--rounds", type=int, default=6, help="calibrations, each with a round of held-out measurements"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: one round, few points, four requests")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    return parser.parse_args()


def held_out(
    model: Any, sources: dict[str, Any], contexts: Iterable[int], widths: Iterable[int]
) -> dict[Point, Callable[[int], float]]:
    """What times each point, warmed up."""
    points: dict[Point, Callable[[int], float]] = {}
    with torch.no_grad():
        for context in contexts:
            verify = VerifyProbe(model, context, max(WIDTHS))
            points.update({(VERIFY, context, width): verify.seconds for width in widths})
            for name, source in sources.items():
                draft = DraftProbe(model, source, context)
                points.update({(name, context, length): draft.seconds for length in BLOCK_LENGTHS})
        for point, seconds in points.items():
            seconds(point[2])
    return points


def timed(points: dict[Point, Callable[[int], float]], order: random.Random) -> dict[Point, float]:
    """Seconds of each point, once: contexts in a random order, and so the points of each, as a request has one."""
    contexts = order.sample(sorted({context for _, context, _ in points}), len({context for _, context, _ in points}))
    shuffled = sorted(points, key=lambda point: (contexts.index(point[1]), order.random()))
    with torch.no_grad():
        found = {point: points[point](point[2]) for point in shuffled}
    return {point: found[point] for point in points}


def medians(rounds: list[dict[Point, float]]) -> dict[Point, float]:
    """Of each point, over the rounds."""
    return {point: statistics.median(found[point] for found in rounds) for point in rounds[0]}


def predictions(table: CostTable, found: dict[Point, float]) -> Iterator[Prediction]:
    for point, seconds in found.items():
        kind, context, tokens = point
        foretold = (
            table.verify_seconds(tokens, context) if kind == VERIFY else table.draft_seconds(kind, tokens, context)
        )
        yield Prediction(point, foretold, seconds, is_in_grid(table, point))


def is_in_grid(table: CostTable, point: Point) -> bool:
    kind, context, tokens = point
    curve = table.verify if kind == VERIFY else table.drafts[kind]
    return context in curve.contexts and tokens in curve.tokens and (context, tokens) not in curve.composed


def errors(found: list[Prediction]) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of the absolute relative error, by kind and by where the point lies."""
    kinds = dict.fromkeys(p.point[0] for p in found)
    groups = {kind: [p for p in found if p.point[0] == kind] for kind in kinds}
    groups["verify, measured points"] = [p for p in groups[VERIFY] if p.is_in_grid]
    groups["verify, other points"] = [p for p in groups[VERIFY] if not p.is_in_grid]
    for context in dict.fromkeys(p.point[1] for p in groups[VERIFY]):
        groups[f"verify after {context}"] = [p for p in groups[VERIFY] if p.point[1] == context]
    return {
        name: {
            "count": len(each),
            **quantiles([p.error for p in each]),
            "median_us": round(1e6 * statistics.median(abs(p.foretold - p.measured) for p in each), 1),
        }
        for name, each in groups.items()
        if each
    }


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"median": 0.5, "p90": 0.9}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in at.items()}


def requests(model: Any, tokenizer: Any, sources: list[Any], table: CostTable, count: int) -> dict[str, Any]:
    """Seconds of the blocks of each request, foretold and measured; every sixth prompt is made long.

    Each is decoded twice with the same actions: how well the first foretells the second is the floor.
    """
    policy = Wandering(table)
    prompts = list(interleaved(load_prompts()))
    rows = []
    with autospec.wrap(model, tokenizer=tokenizer, drafts=sources, policy=policy, backend="eager"):
        for number in tqdm(range(count), desc="requests"):
            inputs = encode(tokenizer, prompts[number % len(prompts)], model)
            if number % 6 == 5:
                length = LONG_CONTEXTS[number // 6 % len(LONG_CONTEXTS)]
                ids = inputs["input_ids"].repeat(1, length // inputs["input_ids"].shape[1] + 1)[:, :length]
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for _ in range(2):
                policy.begin(number)
                model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
                rows.append({"context": inputs["input_ids"].shape[1], "measured": policy.measured, **policy.foretold})
    found: dict[str, Any] = {
        "table": table.to_json(),
        "rows": [{name: round(value, 5) for name, value in row.items()} for row in rows],
    }
    for name in policy.foretold:
        found[name] = shares([abs(row[name] / row["measured"] - 1.0) for row in rows if row["measured"]])
    pairs = [(a["measured"], b["measured"]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    found["floor"] = shares([abs(first / second - 1.0) for first, second in pairs if second])
    return found


def shares(errors: list[float]) -> dict[str, float]:
    within = sum(error <= TOTAL_BAR for error in errors) / len(errors)
    return {"within_bar": round(within, 3), **quantiles(errors)}


def missed(results: dict[str, Any]) -> list[str]:
    """Where the bar is missed."""
    found = []
    for kind in (VERIFY, "assistant", "suffix", "ngram"):
        error = results["errors"][kind]
        for name, bar in (("median", MEDIAN_BAR), ("p90", P90_BAR)):
            if error[name] > bar:
                found.append(f"{kind}: {name} {error[name]:.3f}, floor {results['floor'][kind][name]:.3f}")
    share = results["requests"]["refined"]["within_bar"]
    if share < TOTAL_SHARE_BAR:
        floor = results["requests"]["floor"]["within_bar"]
        found.append(f"requests: {share:.2f} within {TOTAL_BAR:.0%}, floor {floor:.2f}")
    if max(results["calibration_seconds"]) > 5.0:
        found.append(f"calibration took {max(results['calibration_seconds']):.1f} s")
    return found


def report(results: dict[str, Any]) -> None:
    print("| | points | median | p90 | floor, median | floor, p90 | median, microseconds | floor, microseconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name, error in results["errors"].items():
        floor = results["floor"][name]
        cells = (error["median"], error["p90"], floor["median"], floor["p90"])
        shares = " | ".join(f"{100 * cell:.1f} %" for cell in cells)
        print(f"| {name} | {error['count']} | {shares} | {error['median_us']:.0f} | {floor['median_us']:.0f} |")
    print("| against the median of the rounds | median | p90 | floor, median | floor, p90 |")
    print("|---|---|---|---|---|")
    for name in (VERIFY, "assistant", "suffix", "ngram"):
        error, floor = results["errors_of_medians"][name], results["floor_of_medians"][name]
        cells = (error["median"], error["p90"], floor["median"], floor["p90"])
        print(f"| {name} | {' | '.join(f'{100 * cell:.1f} %' for cell in cells)} |")
    for name in ("calibrated", "refined", "floor"):
        found = results["requests"][name]
        spread = f"median {100 * found['median']:.1f} %, p90 {100 * found['p90']:.1f} %"
        print(f"requests, {name}: {found['within_bar']:.0%} within {TOTAL_BAR:.0%}; {spread}")
    print("calibrations took", results["calibration_seconds"], "seconds")
    for fault in results["missed"]:
        print("MISSED", fault)


if __name__ == "__main__":
    sys.exit(main())
