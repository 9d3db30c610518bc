"""What choosing takes, with 10,000 segments and 60 actions.

    python experiments/16_choosing/run.py [--segments 10000] [--choices 20000] [--out DIR]

Every policy learns from made-up blocks in as many segments. Then requests of segments drawn at random are answered one
after the other, a dozen blocks each, and each choice and each lesson is timed by itself. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from autospec.policies import UCB, EpsilonGreedy, Exp3, Goodput, Guard, Hedge, LinUCB, Policy, Thompson
from autospec.types import Action, BlockContext, BlockOutcome, Offer, OfferOutcome, RequestContext

FOLDER = Path(__file__).parent
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
RETRIEVAL = ("ngram", "suffix")
DRAFTS = ("assistant", "blend", "cross_tokenizer", "early_exit")
SOURCES = (*RETRIEVAL, *DRAFTS)
BLOCKS = 12
"""Of a request."""
MICROSECOND = 1e-6
BAR = 50.0


@dataclass(frozen=True)
class Costs:
    """SmolLM2-135M on two cores in bfloat16, drafts from a tenth to two fifths of a step."""

    block_lengths: tuple[int, ...] = LENGTHS
    version: int = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return float(np.interp(num_tokens, [1, 2, 4, 8, 16], [38.5e-3, 38.6e-3, 39.6e-3, 42.8e-3, 52.5e-3]))

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        if source in RETRIEVAL:
            return 1e-4
        return 0.004 * (1 + DRAFTS.index(source)) * block_length if source in DRAFTS else math.inf

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


def policies() -> dict[str, Callable[[], Policy]]:
    costs = Costs()
    return {
        "auto": lambda: Guard(Goodput(costs), costs, name="auto"),
        "goodput": lambda: Goodput(costs),
        "hedge": lambda: Hedge(costs),
        "linucb": lambda: LinUCB(costs),
        "epsilon_greedy": lambda: EpsilonGreedy(costs),
        "ucb": lambda: UCB(costs),
        "thompson": lambda: Thompson(costs),
        "exp3": lambda: Exp3(costs),
    }


class Traffic:
    """Blocks of many segments. What a source proposes is right by a rate of its own in each segment."""

    def __init__(self, segments: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._rates = self._rng.uniform(0.2, 0.9, (segments, len(SOURCES)))
        self._requests = [
            RequestContext(f"segment {number}", 200, 400, do_sample=True, sources=SOURCES, temperature=0.8)
            for number in range(segments)
        ]

    def block(self, number: int, output: int) -> tuple[BlockContext, np.ndarray]:
        """What is known before a block of this segment, and how many tokens of each source would be right."""
        right = np.minimum(self._rng.geometric(1.0 - self._rates[number]) - 1, max(LENGTHS))
        offers = {}
        for name in RETRIEVAL:
            length = int(self._rng.integers(0, max(LENGTHS) + 1))
            scores = tuple(np.cumprod(self._rng.uniform(0.6, 1.0, length)).tolist())
            offers[name] = Offer(length, int(self._rng.integers(1, 12)), scores, float(self._rng.random()))
        context = BlockContext(
            self._requests[number],
            200 + output,
            output,
            SOURCES,
            offers,
            dict.fromkeys(DRAFTS, output // 3),
            frozenset({"assistant", "early_exit"}),
        )
        return context, right

    def outcome(self, context: BlockContext, action: Action, right: np.ndarray) -> BlockOutcome:
        """What became of the action, and of what retrieval had offered."""
        judged = []
        for name, offer in context.offers.items():
            accepted = min(int(right[SOURCES.index(name)]), offer.num_tokens)
            judged.append(
                OfferOutcome(name, offer, context.output_tokens, min(accepted + 1, offer.num_tokens), accepted)
            )
        drafted, confidences = 0, []
        if action.block_length:
            offered = context.offers.get(action.source)
            drafted = action.block_length if offered is None else min(action.block_length, offered.num_tokens)
            while action.stop is not None and len(confidences) < drafted:
                confidences.append((float(self._rng.random()), float(self._rng.uniform(0.0, 4.0))))
                if action.stop.ends(*confidences[-1]):
                    drafted = len(confidences) - 1
                elif not action.stop.wants_more():
                    drafted = len(confidences)
        accepted = min(int(right[SOURCES.index(action.source)]), drafted) if drafted else 0
        costs = Costs()
        return BlockOutcome(
            context.segment,
            action,
            context.context_tokens,
            drafted,
            min(drafted, accepted + 1),
            accepted,
            accepted + 1,
            draft_seconds=costs.draft_seconds(action.source, action.block_length, 0) if action.block_length else 0.0,
            verify_seconds=costs.verify_seconds(drafted + 1, 0),
            request=context.request,
            offers=tuple(judged),
            confidences=tuple(confidences),
        )


def measure(make: Callable[[], Policy], segments: int, choices: int, name: str) -> dict[str, Any]:
    """Microseconds of choosing and of learning."""
    policy, traffic = make(), Traffic(segments, seed=0)
    rng = np.random.default_rng(1)
    requests = [*range(segments), *rng.integers(0, segments, choices // BLOCKS).tolist()]
    order = [(number, 1 + 3 * block) for number in requests for block in range(BLOCKS)]
    choosing, learning, adding = [], [], []
    for index, (number, output) in enumerate(tqdm(order, desc=name)):
        context, right = traffic.block(number, output)
        started = time.perf_counter()
        action = policy.choose(context)
        chosen = time.perf_counter()
        outcome = traffic.outcome(context, action, right)
        judged = time.perf_counter()
        policy.observe(outcome)
        if index >= segments * BLOCKS:
            choosing.append((chosen - started) / MICROSECOND)
            learning.append((time.perf_counter() - judged) / MICROSECOND)
            started = time.perf_counter()
            three_hundred_additions()
            adding.append((time.perf_counter() - started) / MICROSECOND)
    return {"choose": quantiles(choosing), "observe": quantiles(learning), "additions": quantiles(adding)}


def three_hundred_additions() -> float:
    """What the interpreter takes for it says how fast the machine is now."""
    total = 0.0
    for number in range(300):
        total += number * 0.5
    return total


def quantiles(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "mean": round(statistics.mean(values), 1),
        "p99": round(float(np.quantile(values, 0.99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--choices", type=int, default=20_000, help="that are timed")
    parser.add_argument("--only", default="", help="policies, separated by commas")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    makes = {name: make for name, make in policies().items() if not options.only or name in options.only.split(",")}
    found = {name: measure(make, options.segments, options.choices, name) for name, make in makes.items()}
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "segments": options.segments,
        "choices": options.choices,
        "actions": len(SOURCES) * len(LENGTHS),
        "bar_microseconds": BAR,
        "microseconds": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("| policy | choosing, median | mean | p99 | learning, median | mean | p99 | additions, median |")
    print("|---|---|---|---|---|---|---|---|")
    for name, each in found.items():
        cells = [each[what][kind] for what in ("choose", "observe") for kind in ("median", "mean", "p99")]
        cells.append(each["additions"]["median"])
        print(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
