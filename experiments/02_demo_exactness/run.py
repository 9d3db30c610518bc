"""Greedy answers to every demonstration prompt, for each source and block length, against the model's own `generate`.

    python experiments/02_demo_exactness/run.py [--out DIR] [--new-tokens 24] [--limit N]

Exits 1 if any answer differs by more than a numerical tie (docs/exactness.md).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from autospec import models
from autospec.data import DemoPrompt, load_prompts
from autospec.deployment import device_name
from autospec.drafts import Assistant
from autospec.drafts.early_exit import first_layers_of
from autospec.verify import BLOCK_LENGTHS, verify_greedy

DTYPES = ("float32", "bfloat16")
DRAFT_LAYERS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--limit", type=int, default=None, help="only the first prompts")
    options = parser.parse_args()
    prompts = load_prompts()[: options.limit]
    results: dict[str, Any] = {
        "target": "smollm2-135m",
        "draft": f"the target's first {DRAFT_LAYERS} layers",
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "counts": [],
        "differences": [],
    }
    for dtype in DTYPES:
        model, tokenizer = models.load("smollm2-135m", dtype=dtype)
        results["device"] = device_name(model.device)
        run_dtype(model, tokenizer, prompts, dtype, options.new_tokens, results)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_table(results["counts"])
    faults = [d for d in results["differences"] if not d["is_tie"]]
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


def run_dtype(
    model: Any, tokenizer: Any, prompts: list[DemoPrompt], dtype: str, new_tokens: int, results: dict[str, Any]
) -> None:
    """Add counts and differences of one dtype to the results."""
    drafts = ["ngram", Assistant(first_layers_of(model, DRAFT_LAYERS), tokenizer=tokenizer)]
    counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    verdicts = verify_greedy(model, tokenizer, prompts, drafts=drafts, max_new_tokens=new_tokens)
    for verdict in tqdm(verdicts, desc=dtype, total=len(prompts) * len(drafts) * len(BLOCK_LENGTHS)):
        counts[verdict.source, verdict.block_length].update(
            {verdict.kind: 1, "accepted": verdict.num_accepted_tokens, "judged": verdict.num_judged_tokens}
        )
        if verdict.difference is not None:
            results["differences"].append(
                {
                    "dtype": dtype,
                    "prompt": verdict.prompt_id,
                    "source": verdict.source,
                    "block_length": verdict.block_length,
                    "position": verdict.difference.position,
                    "logit_gap": verdict.difference.logit_gap,
                    "tolerance": verdict.difference.tolerance,
                    "is_tie": verdict.difference.is_tie,
                }
            )
    for (source, block_length), count in counts.items():
        numbers = {key: count[key] for key in ("identical", "tie", "different", "accepted", "judged")}
        results["counts"].append({"dtype": dtype, "source": source, "block_length": block_length, **numbers})


def print_table(counts: list[dict[str, Any]]) -> None:
    header = (
        f"{'dtype':10}{'source':11}{'length':>6}{'identical':>11}{'tie':>6}{'different':>11}{'accepted/judged':>18}"
    )
    print(header)
    for row in counts:
        judged = f"{row['accepted']}/{row['judged']}"
        print(
            f"{row['dtype']:10}{row['source']:11}{row['block_length']:>6}{row['identical']:>11}{row['tie']:>6}"
            f"{row['different']:>11}{judged:>18}"
        )


if __name__ == "__main__":
    sys.exit(main())
