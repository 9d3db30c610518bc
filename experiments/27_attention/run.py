"""What attention over a cache takes, and its growth: the model's own forwards beside autospec's, by context and width.

    python experiments/27_attention/run.py [--dtypes bfloat16,float32] [--contexts 64,256,1000,4000] [--out DIR]

Forwards of SmolLM2-135M over 1, 5 and 9 tokens after a context that is in the cache, taken back each time: as the model
runs them; with room in the cache; with packed linear layers besides; and with heads taken together as well, which is
backend "packed". All take turns, in an order that turns. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import line, rule, turned
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache

from autospec import models
from autospec.backends import packed
from autospec.backends.packed import PackedLinears
from autospec.cache_room import Room
from autospec.caches import append, drop_last
from autospec.costs.probes import filled_cache, some_tokens
from autospec.deployment import device_name

FOLDER = Path(__file__).parent
WIDTHS = (1, 5, 9)
OWN, ROOM, LAYERS, ALL = "the model's own", "with room", "with room, packed layers", "with room, packed, heads together"
ARMS = (OWN, ROOM, LAYERS, ALL)


class Subject:
    """A model, and two caches that hold the same."""

    def __init__(self, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(models.resolve("smollm2-135m"), dtype=getattr(torch, dtype))
        self.model.eval()
        self.layers = PackedLinears.of(self.model)

    def way(self, arm: str) -> AbstractContextManager[Any]:
        if arm in (OWN, ROOM):
            return nullcontext()
        return self.layers.lease(self.model) if arm == ALL else self._without_attention()

    @contextmanager
    def _without_attention(self) -> Iterator[None]:
        kept, packed.grouped_attention = packed.grouped_attention, nullcontext
        try:
            with self.layers.lease(self.model):
                yield
        finally:
            packed.grouped_attention = kept


@torch.no_grad()
def seconds(subject: Subject, arm: str, tokens: torch.Tensor, cache: DynamicCache, width: int) -> float:
    """One forward over the first of these tokens."""
    with subject.way(arm) as why:
        assert why is None
        started = time.perf_counter()
        append(subject.model, tokens[:, :width], cache, logits_kept=width)
        taken = time.perf_counter() - started
    drop_last(cache, width)
    return taken


@torch.no_grad()
def measure(subject: Subject, dtype: str, context: int, rounds: int) -> Iterator[dict[str, Any]]:
    tokens = some_tokens(subject.model, context + WIDTHS[-1])
    caches = {name: filled_cache(subject.model, tokens[:, :context]) for name in (OWN, ROOM)}
    Room(caches[ROOM])
    for width in WIDTHS:
        taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(rounds + 1):
            for arm in turned(ARMS, number):
                cache = caches[OWN if arm == OWN else ROOM]
                took = seconds(subject, arm, tokens[:, context:], cache, width)
                if number:  # not the first ones, which allocate
                    taken[arm].append(took)
        ms = {arm: round(1e3 * statistics.median(found), 3) for arm, found in taken.items()}
        ratios = sorted(own / ours for own, ours in zip(taken[OWN], taken[ALL], strict=True))
        ends = [round(ratios[int(share * (len(ratios) - 1))], 3) for share in (0.25, 0.75)]
        yield {
            "dtype": dtype,
            "context_tokens": context,
            "tokens": width,
            "milliseconds": ms,
            "speed_up": round(ms[OWN] / ms[ALL], 3),
            "quartiles": ends,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="bfloat16,float32", help="separated by commas")
    parser.add_argument("--contexts", default="64,256,1000,4000", help="tokens, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cells = [(dtype, int(context)) for dtype in options.dtypes.split(",") for context in options.contexts.split(",")]
    subjects: dict[str, Subject] = {}
    for dtype, context in tqdm(cells):
        if dtype not in subjects:
            subjects = {dtype: Subject(dtype)}
        rows += measure(subjects[dtype], dtype, context, options.rounds)
    print(line("dtype", "context", "tokens", *(f"{arm}, ms" for arm in ARMS), "own over the last"))
    print(rule(4 + len(ARMS)))
    for row in rows:
        ms = (f"{row['milliseconds'][arm]:.1f}" for arm in ARMS)
        last = f"{row['speed_up']:.2f}"
        print(line(row["dtype"], str(row["context_tokens"]), str(row["tokens"]), *ms, last))
    written = {
        "is_smoke_run": options.smoke,
        "device": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": options.rounds,
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
