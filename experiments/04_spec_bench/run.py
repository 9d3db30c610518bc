"""Greedy answers to the Spec-Bench prompts, with source and block length switched at random, against `generate`.

    python experiments/04_spec_bench/run.py --prompts spec_bench.jsonl [--dtype float32] [--out DIR] [--work FILE]

Each judged answer is one line of the work file, and what is there is not done again: an interrupted run goes on, and
two runs (one for each dtype) may share the file. Exits 1 if any answer differs by more than a numerical tie
(docs/exactness.md), or was not decoded by blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from common import add_prompts, need_prompts
from tqdm import tqdm

from autospec import models
from autospec.data import DemoPrompt, interleaved
from autospec.deployment import device_name
from autospec.drafts import Assistant
from autospec.drafts.early_exit import first_layers_of
from autospec.errors import ConfigurationError
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome
from autospec.verify import PlainAnswer, kind_of

TARGET = "smollm2-135m"
DTYPES = ("float32", "bfloat16")
KINDS = ("identical", "tie", "different")
COUNTED = ("output_tokens", "blocks", "judged", "accepted")
MAX_BLOCK_LENGTH = 8
FOLDER = Path(__file__).parent

# arm -> what each block may be drafted by
ARMS = {
    "ngram": ("ngram",),
    "assistant": ("assistant",),
    "mixed": ("ngram", "assistant", NONE),
}


class RandomActions:
    """Another source and another block length for each block, by chance.

    Args:
        sources: chosen between; `none` is a plain step.
        seed: the same seed makes the same choices.
    """

    name = "random"

    def __init__(self, sources: Sequence[str], seed: str) -> None:
        self._sources = sources
        self._random = random.Random(seed)

    def choose(self, context: BlockContext) -> Action:
        source = self._random.choice(self._sources)
        block_length = self._random.randint(1, MAX_BLOCK_LENGTH)
        return Action(source, block_length, "random") if source in context.sources else OFF

    def observe(self, outcome: BlockOutcome) -> None:
        """Nothing to learn."""


def main() -> int:
    options = parse_options()
    try:
        prompts = wanted_prompts(options)
        settings = settings_of(options)
        rows = read_rows(options.work, settings)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    for dtype in DTYPES if options.dtype == "both" else (options.dtype,):
        run_dtype(dtype, prompts, options.arms, settings, rows, options.work)
    rows = read_rows(options.work, settings)  # another run may have added its own
    results = {**summary(rows), "settings": settings}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_table(results["counts"])
    faults = [row for row in rows if row["kind"] == "different" or row["notes"]]
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    parser.add_argument("--work", type=Path, default=None, help="judged answers; work.jsonl in --out if left out")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], default="both")
    parser.add_argument("--device", default="cpu", help="as in cuda")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--draft-layers", type=int, default=25, help="layers of the target that make the assistant")
    parser.add_argument("--seed", type=int, default=0, help="of the random actions")
    parser.add_argument("--limit", type=int, default=None, help="only so many prompts, of all segments in turn")
    parser.add_argument("--segments", type=lambda text: text.split(","), default=None, help="only these, a,b,c")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=[*ARMS], help=f"of {','.join(ARMS)}")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    if unknown := sorted(set(options.arms) - set(ARMS)):
        parser.error(f"--arms: {unknown[0]!r} is not one of {', '.join(ARMS)}")
    options.work = options.work or options.out / "work.jsonl"
    return options


def wanted_prompts(options: argparse.Namespace) -> list[DemoPrompt]:
    """All segments in turn, so that a run cut short has seen them all.

    Raises:
        ConfigurationError: no file of questions, or no such segment in it.
    """
    prompts = read_spec_bench(options.prompts)
    segments = list(dict.fromkeys(prompt.segment for prompt in prompts))
    if unknown := sorted(set(options.segments or ()) - set(segments)):
        raise ConfigurationError(f"--segments: {unknown[0]!r} is not one of {', '.join(segments)}")
    chosen = [prompt for prompt in prompts if prompt.segment in (options.segments or segments)]
    return list(interleaved(chosen))[: options.limit]


def read_spec_bench(path: Path) -> list[DemoPrompt]:
    """The first turns.

    Raises:
        ConfigurationError: the file is missing or is another one.
    """
    try:
        questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            DemoPrompt(str(q["question_id"]), q["segment"], ({"role": "user", "content": q["turns"][0]},), 1)
            for q in questions
        ]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigurationError(f"{path}: {reason}; pass the Spec-Bench questions, --prompts FILE") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"{path}: not Spec-Bench questions (question_id, segment, turns): {error}") from error


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What makes two answers of the same dtype, prompt and arm the same."""
    return {
        "target": TARGET,
        "place": options.device,
        "draft": f"the target's first {options.draft_layers} layers",
        "draft_layers": options.draft_layers,
        "new_tokens": options.new_tokens,
        "block_lengths": [1, MAX_BLOCK_LENGTH],
        "seed": options.seed,
        "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read_rows(work: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Judged answers of an earlier run; a line cut short by its end does not count.

    Raises:
        ConfigurationError: they were made with other settings.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in work.read_text(encoding="utf-8").splitlines() if work.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.pop("settings") != settings:
            raise ConfigurationError(f"{work} holds answers of other settings: delete it or name another --work FILE")
        rows[row["dtype"], row["prompt"], row["arm"]] = row
    return list(rows.values())


def add_row(work: Path, settings: dict[str, Any], row: dict[str, Any]) -> None:
    with work.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({**row, "settings": settings}) + "\n")  # the line before may have been cut short


def run_dtype(
    dtype: str,
    prompts: Sequence[DemoPrompt],
    wanted_arms: Sequence[str],
    settings: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    work: Path,
) -> None:
    """Judge what is not judged yet."""
    done = {(row["prompt"], row["arm"]) for row in rows if row["dtype"] == dtype}
    model, tokenizer = models.load(TARGET, dtype=dtype, device=settings["place"])
    sources = make_drafts(model, tokenizer, settings["draft_layers"])
    device = device_name(model.device)
    with tqdm(total=len(prompts) * len(wanted_arms), desc=dtype, unit="answer") as bar:
        for prompt in prompts:
            arms = [arm for arm in wanted_arms if (prompt.prompt_id, arm) not in done]
            bar.update(len(wanted_arms) - len(arms))
            plain = PlainAnswer(model, tokenizer, prompt, max_new_tokens=settings["new_tokens"]) if arms else None
            for arm in arms:
                row = judge(plain, sources, prompt, arm, settings["seed"])
                add_row(work, settings, {"dtype": dtype, "device": device, **row})
                bar.update()


def make_drafts(model: Any, tokenizer: Any, draft_layers: int) -> dict[str, Any]:
    return {"ngram": "ngram", "assistant": Assistant(first_layers_of(model, draft_layers), tokenizer=tokenizer)}


def judge(plain: PlainAnswer, sources: dict[str, Any], prompt: DemoPrompt, arm: str, seed: int) -> dict[str, Any]:
    """One answer of one arm, as a row of counts."""
    drafts = [sources[name] for name in ARMS[arm] if name != NONE]
    policy = RandomActions(ARMS[arm], f"{seed}:{prompt.prompt_id}:{arm}")
    record, difference = plain.compare(drafts, policy)
    row = {
        "prompt": prompt.prompt_id,
        "segment": prompt.segment,
        "arm": arm,
        "kind": kind_of(difference),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "blocks": record.blocks,
        "judged": record.num_judged_tokens,
        "accepted": record.num_accepted_tokens,
        "notes": record.fallback_reason or record.notes,
    }
    if difference is not None:
        row |= {
            "position": difference.position,
            "logit_gap": difference.logit_gap,
            "tolerance": difference.tolerance,
        }
    return row


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by dtype, arm and segment, and each difference."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    rows = sorted(rows, key=lambda row: (DTYPES.index(row["dtype"]), [*ARMS].index(row["arm"]), row["segment"]))
    for row in rows:
        for segment in (row["segment"], "all"):
            count = counts[row["dtype"], row["arm"], segment]
            count.update({"answers": 1, row["kind"]: 1, **{name: row[name] for name in COUNTED}})
    return {
        "device": "; ".join(sorted({row["device"] for row in rows})),
        "prompts": len({row["prompt"] for row in rows}),
        "counts": [
            {"dtype": dtype, "arm": arm, "segment": segment, **{k: count[k] for k in ("answers", *KINDS, *COUNTED)}}
            for (dtype, arm, segment), count in sorted(counts.items(), key=lambda item: item[0][2] == "all")
        ],
        "differences": [
            {k: row[k] for k in ("dtype", "prompt", "segment", "arm", "kind", "position", "logit_gap", "tolerance")}
            for row in rows
            if row["kind"] != "identical"
        ],
        "notes": sorted({row["notes"] for row in rows if row["notes"]}),
    }


def print_table(counts: list[dict[str, Any]]) -> None:
    print("| dtype | arm | segment | identical | tie | different | accepted / judged | blocks | tokens |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in counts:
        names = " | ".join(str(row[name]) for name in ("dtype", "arm", "segment", *KINDS))
        print(f"| {names} | {row['accepted']} / {row['judged']} | {row['blocks']} | {row['output_tokens']} |")


if __name__ == "__main__":
    sys.exit(main())
