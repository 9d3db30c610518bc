"""How much does a forward over a block move the gap of the two likeliest tokens, against one token at a time?

    python experiments/03_rounding_noise/run.py [--out DIR]

The tolerances of autospec/decoding/ties.py rest on this. Counts, no timing.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from autospec import models
from autospec.caches import append, new_cache
from autospec.data import encode, load_prompts
from autospec.decoding.ties import tolerance
from autospec.deployment import device_name

DTYPES = ("float32", "bfloat16")
BLOCK_TOKENS = 8
NEW_TOKENS = 48
CONTEXT_TOKENS = 300  # at most: the last ones of each prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "target": "smollm2-135m",
        "block_tokens": BLOCK_TOKENS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtypes": {},
    }
    for dtype in DTYPES:
        model, tokenizer = models.load("smollm2-135m", dtype=dtype)
        results["device"] = device_name(model.device)
        results["dtypes"][dtype] = summary(gap_changes(model, tokenizer, dtype))
    for dtype, numbers in results["dtypes"].items():
        print(dtype, json.dumps(numbers))
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def gap_changes(model: Any, tokenizer: Any, dtype: str) -> list[tuple[float, float]]:
    """(units of the last place, share of the tolerance) of the gap's change, for each position of each answer."""
    changes = []
    for prompt in tqdm(load_prompts()[::3], desc=dtype):
        ids = encode(tokenizer, prompt, model)["input_ids"][:, -CONTEXT_TOKENS:]
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[:, ids.shape[1] :]
        _, single_cache = append(model, ids, new_cache(model))
        _, wide_cache = append(model, ids, new_cache(model))
        for block in answer.split(BLOCK_TOKENS, dim=1):
            width = block.shape[1]
            wide, wide_cache = append(model, block, wide_cache, logits_kept=width)
            for i in range(width):
                single, single_cache = append(model, block[:, i : i + 1], single_cache)
                first, second = single[0].float().topk(2).indices.tolist()
                change = abs(float(_gap(single[0], first, second) - _gap(wide[i], first, second)))
                allowed = tolerance(float(single[0, first]), single.dtype)
                changes.append((change / tolerance_unit(allowed, single.dtype), change / allowed))
    return changes


def tolerance_unit(allowed: float, dtype: torch.dtype) -> float:
    """One unit of the last place, from a tolerance made of so many of them."""
    return allowed / (tolerance(1.0, dtype) / torch.finfo(dtype).eps)


def _gap(logits: torch.Tensor, first: int, second: int) -> torch.Tensor:
    return logits[first].double() - logits[second].double()


def summary(changes: list[tuple[float, float]]) -> dict[str, float]:
    units = np.array([change for change, _ in changes])
    return {
        "positions": len(units),
        "median_units": float(np.median(units)),
        "p99_units": float(np.quantile(units, 0.99)),
        "largest_units": float(units.max()),
        "largest_share_of_tolerance": float(max(share for _, share in changes)),
    }


if __name__ == "__main__":
    main()
