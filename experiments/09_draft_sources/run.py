"""What every draft source costs and brings on six segments of Spec-Bench, greedy and sampled at temperature 0.8.

    python experiments/09_draft_sources/run.py --prompts spec_bench.jsonl [--limit 10] [--dtype bfloat16] [--out DIR]

The target answers every prompt once; each source is then replayed along the answers for each block length, and so are
transformers' own prompt lookup and, along the greedy answers, its assisted generation. Run it on an idle machine:
drafting is timed. Exits 1 if `ngram` accepts fewer tokens per block than transformers' prompt lookup in any segment at
any block length.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from common import DECODINGS, add_prompts, need_prompts
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from autospec import models
from autospec.costs.calibration import calibrate
from autospec.data import DemoPrompt, interleaved
from autospec.deployment import device_name
from autospec.draft_bench import ALL, Row, bench
from autospec.drafts import Assistant, Blend, EarlyExit, NGram, Suffix
from autospec.drafts.base import DraftRequest, Proposal
from autospec.drafts.early_exit import first_layers_of
from autospec.replay import Recording, record

TARGET = "smollm2-135m"
ASSISTANT = "smollm2-135m-assistant"
BLOCK_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
EXIT_LAYERS = (2, 4, 8, 15, 22)
EXIT_PROMPTS = 6  # they are slow, and few are enough to see that
EXIT_LENGTHS = (1, 4)
CONTEXTS = (1_000, 8_000, 32_000)
CONTEXT_BLOCKS = 200
FOLDER = Path(__file__).parent


class TheirPromptLookup:
    """transformers' prompt lookup with its own settings (matches of 2 tokens, then of 1), as a draft source."""

    name = "transformers_prompt_lookup"

    def attach(self, target: Any, tokenizer: Any) -> None:
        self._eos = torch.tensor([target.generation_config.eos_token_id]).flatten()

    def start(self, request: DraftRequest) -> TheirPromptLookup:
        return self

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        generator = PromptLookupCandidateGenerator(
            self._eos, num_output_tokens=block_length, max_length=len(committed) + block_length + 1
        )
        found, _ = generator.get_candidates(torch.tensor([committed]))
        return Proposal(found[0, len(committed) :].tolist())


class TheirAssisted:
    """transformers' assisted generation, a constant number of draft tokens and no confidence threshold. Greedy only."""

    name = "transformers_assisted"

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def attach(self, target: Any, tokenizer: Any) -> None:
        self._draft = first_layers_of(target, self._layers)
        self._draft.generation_config = GenerationConfig(
            num_assistant_tokens=1, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        self._eos = target.generation_config.eos_token_id

    def start(self, request: DraftRequest) -> TheirAssistedSession:
        return TheirAssistedSession(self._draft, self._eos)


class TheirAssistedSession:
    """One request's candidate generator."""

    def __init__(self, draft: Any, eos: Any) -> None:
        self._draft, self._eos = draft, eos
        self._generator: Any = None

    @torch.no_grad()
    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        ids = torch.tensor([committed])
        if self._generator is None:
            config = GenerationConfig(
                eos_token_id=self._eos, pad_token_id=0, do_sample=False, min_length=0, max_length=100_000
            )
            mask = {"attention_mask": torch.ones_like(ids)}
            self._generator = AssistedCandidateGenerator(ids, self._draft, config, mask)
        self._generator.num_assistant_tokens = block_length
        found, _ = self._generator.get_candidates(ids)
        return Proposal(found[0, len(committed) :].tolist())


def main() -> int:
    options = parse_options()
    prompts = first_turns(options.prompts, options.limit)
    model, tokenizer = models.load(TARGET, dtype=options.dtype)
    recordings = {
        name: list(
            tqdm(
                record(model, tokenizer, prompts, how, max_new_tokens=options.new_tokens),
                total=len(prompts),
                desc=f"answers, {name}",
            )
        )
        for name, how in DECODINGS.items()
    }
    costs = calibrate(model, {}, block_lengths=BLOCK_LENGTHS)
    assistant = Assistant(models.load_model(ASSISTANT, dtype=options.dtype))
    sources: list[Callable[[], Any]] = [
        NGram,
        TheirPromptLookup,
        Suffix,
        lambda: assistant,
        lambda: Blend(assistant, [Suffix()]),
    ]
    rows: list[dict[str, Any]] = []
    for name, answers in recordings.items():
        rows += run(name, model, tokenizer, answers, sources, BLOCK_LENGTHS, costs)
        few = answers[:EXIT_PROMPTS]
        exits: list[Callable[[], Any]] = [lambda layers=layers: exit_after(layers) for layers in EXIT_LAYERS]
        rows += run(name, model, tokenizer, few, exits, EXIT_LENGTHS, costs)
        if name == "greedy":
            theirs = [lambda: TheirAssisted(EXIT_LAYERS[-1])]
            rows += run(name, model, tokenizer, few, theirs, EXIT_LENGTHS, costs)
    contexts = context_costs(recordings["greedy"])
    results = {
        "target": TARGET,
        "assistant": ASSISTANT,
        "dtype": options.dtype,
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
        "device": device_name(model.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "verify_ms": {k: round(1000 * costs.verify_seconds(k + 1, 256), 2) for k in (0, *BLOCK_LENGTHS)},
        "microseconds_by_context": contexts,
        "rows": rows,
        "ngram_below_prompt_lookup": below(rows),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=None).replace('{"decoding"', '\n{"decoding"')
    (options.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print_tables(rows)
    for source, found in contexts.items():
        print(source, {context: round(microseconds) for context, microseconds in found.items()}, "microseconds a block")
    for fault in results["ngram_below_prompt_lookup"]:
        print("BELOW", fault)
    return 1 if results["ngram_below_prompt_lookup"] else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    parser.add_argument("--limit", type=int, default=5, help="prompts of each segment")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    return options


def first_turns(path: Path, limit: int) -> list[DemoPrompt]:
    """Of each segment so many, evenly spread over the file, segments in turn."""
    questions: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        questions.setdefault(question["segment"], []).append(question)
    chosen = [
        DemoPrompt(str(q["question_id"]), segment, ({"role": "user", "content": q["turns"][0]},), 1)
        for segment, found in questions.items()
        for q in found[:: max(1, len(found) // limit)][:limit]
    ]
    return list(interleaved(chosen))


def exit_after(layers: int) -> EarlyExit:
    source = EarlyExit(layers)
    source.name = f"early_exit_{layers}"
    return source


def run(
    decoding: str,
    model: Any,
    tokenizer: Any,
    recordings: list[Recording],
    sources: list[Callable[[], Any]],
    lengths: Sequence[int],
    costs: Any,
) -> list[dict[str, Any]]:
    """Rows of all sources, block lengths and segments."""
    settings = bench(model, tokenizer, recordings, sources, block_lengths=lengths)
    bar = tqdm(settings, total=len(sources) * len(lengths), desc=f"drafts, {decoding}")
    return [{"decoding": decoding, **numbers(row, costs)} for rows in bar for row in rows]


def numbers(row: Row, costs: Any) -> dict[str, Any]:
    tally = row.tally()
    return {
        "source": row.source,
        "segment": row.segment,
        "block_length": row.block_length,
        "blocks": tally.blocks,
        "drafted": tally.num_draft_tokens,
        "at_risk": tally.at_risk,
        "accepted": tally.accepted,
        "acceptance_length": round(row.mean_acceptance_length, 3),
        "draft_ms": round(row.draft_ms, 3),
        "memory_bytes": row.memory_bytes,
        "expected_speed_up": round(row.expected_speed_up(costs), 3),
        "failures": sorted(set(row.failures)),
    }


def context_costs(recordings: list[Recording]) -> dict[str, dict[int, float]]:
    """Median microseconds of a retrieval block of 8 after so many tokens of real text; two new tokens before each."""
    text = [token for recording in recordings for token in (*recording.prompt, *recording.answer)]
    text = text * (CONTEXTS[-1] // len(text) + 2)
    costs: dict[str, dict[int, float]] = {}
    for make in (NGram, Suffix):
        sessions = {context: make().start(recordings[0].request) for context in CONTEXTS}
        committed = {context: text[:context] for context in CONTEXTS}
        seconds: dict[int, list[float]] = {context: [] for context in CONTEXTS}
        for block in range(CONTEXT_BLOCKS + 1):  # in turn, so that a slow moment of the machine touches all
            for context in CONTEXTS:
                committed[context] += text[context + 2 * block : context + 2 * block + 2]
                started = time.perf_counter()
                sessions[context].propose(committed[context], 8)
                seconds[context].append(time.perf_counter() - started)
        costs[make.name] = {c: round(1e6 * statistics.median(found[1:]), 1) for c, found in seconds.items()}
    return costs


def below(rows: list[dict[str, Any]]) -> list[str]:
    """Where `ngram` accepts fewer tokens per block than transformers' prompt lookup."""
    per_block = {
        (row["decoding"], row["segment"], row["block_length"], row["source"]): sum(row["accepted"]) / row["blocks"]
        for row in rows
    }
    return [
        f"{decoding}, {segment}, length {length}: {ours:.3f} against {theirs:.3f}"
        for (decoding, segment, length, source), ours in per_block.items()
        if source == "ngram" and (theirs := per_block[decoding, segment, length, TheirPromptLookup.name]) > ours
    ]


def print_tables(rows: list[dict[str, Any]]) -> None:
    """For each way of decoding, tokens per block (+1 included) by segment and length, and what it is worth."""
    segments = [*dict.fromkeys(row["segment"] for row in rows if row["segment"] != ALL), ALL]
    for decoding in dict.fromkeys(row["decoding"] for row in rows):
        print(f"\n{decoding}\n\n| source | length | {' | '.join(segments)} | draft ms | speed-up |")
        print("|---|---|" + "---|" * (len(segments) + 2))
        found = {(r["source"], r["block_length"], r["segment"]): r for r in rows if r["decoding"] == decoding}
        for source, length in dict.fromkeys((source, length) for source, length, _ in found):
            cells = [f"{found[source, length, segment]['acceptance_length']:.2f}" for segment in segments]
            whole = found[source, length, ALL]
            last = f"{whole['draft_ms']:.2f} | {whole['expected_speed_up']:.2f}"
            print(f"| {source} | {length} | {' | '.join(cells)} | {last} |")


if __name__ == "__main__":
    sys.exit(main())
