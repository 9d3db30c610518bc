"""`auto` against every fixed action on real answers, replayed with known costs: what choosing is worth without noise.

    python experiments/14_acceptance_model/run.py --prompts spec_bench.jsonl --work answers.jsonl --out DIR
    python experiments/17_replayed_policies/run.py --answers answers.jsonl [--seeds 4] [--out DIR]

The answers are scored with `ngram`, `suffix` and the small assistant, and policies are walked along them
(autospec/scores). Seconds are those of two cost curves, so that nothing depends on how busy the machine is. `auto` is
walked twice: from nothing learned, and once more with what it has learned. Then its estimates of the costs are made
wrong on purpose, by a factor of its own for each width.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from common import DECODINGS
from tqdm import tqdm

from autospec import models
from autospec.drafts import Assistant, NGram, Suffix
from autospec.policies import Goodput, Guard, Hedge, LinUCB, Policy
from autospec.scores import ScoredRequest
from autospec.scores.fixed import walk_fixed
from autospec.scores.luck import Luck
from autospec.scores.scorer import Scorer
from autospec.scores.walk import Totals, by_segment, totals, walk
from autospec.traffic import TrafficRequest
from autospec.types import Action

FOLDER = Path(__file__).parent
LENGTHS = (1, 2, 4, 8, 16)
TOKENS = (1, 2, 4, 8, 16)
CURVES = {
    "bfloat16": (44.0, 46.5, 47.5, 50.0, 56.0),
    "float32": (56.0, 92.0, 86.0, 78.0, 95.0),
}
"""Milliseconds of verifying so many tokens, SmolLM2-135M on two cores."""
NOISE = (0.0, 0.03, 0.1, 0.2)


@dataclass(frozen=True)
class Costs:
    """A curve, rising a little with context; the assistant takes 4.8 ms a token, and a millisecond to read 16."""

    milliseconds: tuple[float, ...]
    factors: tuple[float, ...] = (1.0,) * 80  # by tokens verified or drafted
    block_lengths: tuple[int, ...] = LENGTHS
    version: int = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        known = float(np.interp(num_tokens, TOKENS, self.milliseconds)) / 1000 * (1 + context_tokens / 12_000)
        return known * self.factors[min(num_tokens, 79)]

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 0.0048 * block_length * self.factors[-min(block_length, 79)] if source == "assistant" else 1e-4

    def catch_up_seconds(self, source: str, num_tokens: int) -> float | None:
        return 0.010 + 0.00006 * num_tokens if source == "assistant" else None

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False

    def wrong(self, size: float, seed: int) -> Costs:
        """Each width off by a factor of its own; size: standard deviation of its logarithm."""
        factors = np.exp(np.random.default_rng(seed).normal(0.0, size, 80))
        return Costs(self.milliseconds, tuple(factors.tolist()))


def scored(path: Path, dtype: str) -> list[ScoredRequest]:
    """The answers, in the order in which they were made."""
    model, tokenizer = models.load("smollm2-135m", dtype=dtype)
    # its likeliest token, also where the target samples
    assistant = Assistant(models.load_model("smollm2-135m-assistant", dtype=dtype), greedy=True)
    sources = {"ngram": NGram(), "suffix": Suffix(), "assistant": assistant}
    for source in sources.values():
        source.attach(model, tokenizer)
    scorer = Scorer(model, sources)
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    found = []
    for number, line in enumerate(tqdm(path.read_text(encoding="utf-8").splitlines(), desc="scoring")):
        row = json.loads(line)
        found.append(
            scorer.score(
                TrafficRequest(
                    request_id=f"{number:05}",
                    started_at=begin + timedelta(seconds=number),
                    segment=row["segment"],
                    prompt=tuple(row["prompt"]),
                    output=tuple(row["answer"]),
                    options={**DECODINGS[row["kind"]], "max_new_tokens": len(row["answer"])},
                )
            )
        )
    return found


def learning(costs: Costs) -> dict[str, Callable[[], Policy]]:
    return {
        "auto": lambda: Guard(Goodput(costs), costs, control_share=0.0, name="auto"),
        "hedge": lambda: Hedge(costs),
        "linucb": lambda: LinUCB(costs),
    }


def twice(policy: Policy, requests: Sequence[ScoredRequest], costs: Costs) -> tuple[list[Any], list[Any]]:
    """From nothing learned, and once more."""
    first = list(walk(policy, requests, costs, luck=Luck()))
    return first, list(walk(policy, requests, costs, luck=Luck()))


def compare(requests: Sequence[ScoredRequest], costs: Costs, seeds: int) -> dict[str, Any]:
    fixed: dict[str, list[Any]] = {
        f"{source}:{length}": list(walk_fixed(Action(source, length), requests, costs, luck=Luck()))
        for source in ("ngram", "suffix", "assistant")
        for length in LENGTHS
    }
    segments = {name: by_segment(walked) for name, walked in fixed.items()}
    names = list(next(iter(segments.values())))
    off = sum(each.off_seconds for each in next(iter(segments.values())).values())

    def best_of(segment: str) -> tuple[float, str]:
        return min((found[segment].seconds, name) for name, found in segments.items())

    hindsight = sum(min(best_of(segment)[0], segments["ngram:1"][segment].off_seconds) for segment in names)
    result: dict[str, Any] = {
        "fixed": {name: _speed_up(totals(walked)) for name, walked in fixed.items()},
        "hindsight_by_segment": round(off / hindsight, 4),
        "policies": {},
        "segments": {},
    }
    for name, make in learning(costs).items():
        cold, warm = twice(make(), requests, costs)
        result["policies"][name] = {"cold": _speed_up(totals(cold)), "warm": _speed_up(totals(warm))}
        if name == "auto":
            result["segments"] = {
                segment: {
                    "auto, warm": _speed_up(found),
                    "best fixed": round(found.off_seconds / best_of(segment)[0], 4),
                    "which": best_of(segment)[1],
                }
                for segment, found in by_segment(warm).items()
            }
    result["wrong_costs"] = {}
    for size in NOISE:
        ratios = []
        for seed in range(seeds if size else 1):
            wrong = costs.wrong(size, seed)
            cold, warm = twice(learning(wrong)["auto"](), requests, costs)
            ratios.append((_speed_up(totals(cold)), _speed_up(totals(warm))))
        result["wrong_costs"][f"{size:g}"] = [round(float(value), 4) for value in np.mean(ratios, axis=0)]
    return result


def _speed_up(found: Totals) -> float:
    assert found.speed_up is not None
    return round(found.speed_up, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="work file of experiments/14_acceptance_model")
    parser.add_argument("--dtype", default="bfloat16", help="of the models that score")
    parser.add_argument("--seeds", type=int, default=4, help="of wrong costs")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    requests = scored(options.answers, options.dtype)
    parts = {
        "greedy": [each for each in requests if not each.do_sample],
        "T = 0.8": [each for each in requests if each.do_sample],
        "mixed": requests,
    }
    results = {
        f"{curve}, {name}": compare(part, Costs(milliseconds), options.seeds)
        for curve, milliseconds in CURVES.items()
        for name, part in tqdm(parts.items(), desc=curve)
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"answers": len(requests), "results": results}, indent=1) + "\n"
    (options.out / "results.json").write_text(text, encoding="utf-8")
    for name, found in results.items():
        best = max(found["fixed"], key=found["fixed"].__getitem__)
        auto = found["policies"]["auto"]
        print(
            f"{name:18} auto {auto['cold']:.3f} cold, {auto['warm']:.3f} warm; best fixed {best} "
            f"{found['fixed'][best]:.3f}; by segment in hindsight {found['hindsight_by_segment']:.3f}; "
            f"hedge {found['policies']['hedge']['warm']:.3f}, linucb {found['policies']['linucb']['warm']:.3f}; "
            f"wrong costs {found['wrong_costs']}"
        )


if __name__ == "__main__":
    main()
