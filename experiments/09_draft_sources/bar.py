"""Does `ngram` accept at least as many tokens per block as transformers' prompt lookup, in every segment?

    python experiments/09_draft_sources/bar.py --prompts spec_bench.jsonl [--dtype float32] [--out DIR]

The same comparison as in run.py on more prompts, 20 of each segment: answers of 64 tokens come from transformers' own
batched `generate`; both sources are replayed along them. Counts alone: nothing is timed. Exits 1 where `ngram` accepts
less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from common import DECODINGS, add_prompts, need_prompts
from run import FOLDER, TARGET, TheirPromptLookup, below, first_turns
from tqdm import tqdm
from transformers import LogitsProcessorList

from autospec import models
from autospec.data import DemoPrompt, encode
from autospec.deployment import device_name
from autospec.draft_bench import bench
from autospec.drafts import NGram
from autospec.drafts.base import DraftRequest
from autospec.randomness import TorchRandomness
from autospec.replay import Recording

BLOCK_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
ROWS = 30
RUNS = {"T = 0.8": 1, "greedy": 1}  # answers to each prompt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for bar.json")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each segment")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    prompts = first_turns(options.prompts, options.limit)
    model, tokenizer = models.load(TARGET, dtype=options.dtype)
    rows: list[dict[str, Any]] = []
    for decoding, count in RUNS.items():
        recordings = list(answers(model, tokenizer, prompts, decoding, count, options.new_tokens))
        settings = bench(model, tokenizer, recordings, [NGram, TheirPromptLookup], block_lengths=BLOCK_LENGTHS)
        for found in tqdm(settings, total=2 * len(BLOCK_LENGTHS), desc=f"drafts, {decoding}"):
            for row in found:
                tally = row.tally()
                rows.append(
                    {
                        "decoding": decoding,
                        "source": row.source,
                        "segment": row.segment,
                        "block_length": row.block_length,
                        "blocks": tally.blocks,
                        "accepted": tally.accepted,
                    }
                )
    missed = below(rows)
    results = {
        "target": TARGET,
        "dtype": options.dtype,
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "answers": {decoding: count * len(prompts) for decoding, count in RUNS.items()},
        "device": device_name(model.device),
        "rows": rows,
        "ngram_below_prompt_lookup": missed,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results).replace('{"decoding"', '\n{"decoding"')
    (options.out / "bar.json").write_text(text + "\n", encoding="utf-8")
    print_table(rows)
    for fault in missed:
        print("BELOW", fault)
    return 1 if missed else 0


def answers(
    model: Any, tokenizer: Any, prompts: list[DemoPrompt], decoding: str, count: int, new_tokens: int
) -> Iterator[Recording]:
    """Answers to all prompts, those of about the same length together."""
    ids = {prompt.prompt_id: encode(tokenizer, prompt, model)["input_ids"][0].tolist() for prompt in prompts}
    ordered = sorted(prompts, key=lambda prompt: len(ids[prompt.prompt_id]))
    ends = set(torch.tensor([model.generation_config.eos_token_id]).flatten().tolist())
    request = DraftRequest(
        device=model.device,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        do_sample=False,
        processors=LogitsProcessorList(),
        randomness=TorchRandomness(model.device),
        scores_dtype=torch.float32,
        is_paired=True,
    )
    batches = [ordered[start : start + ROWS] for start in range(0, len(ordered), ROWS)]
    for seed in range(count):
        torch.manual_seed(seed)
        for batch in tqdm(batches, desc=f"answers, {decoding}, {seed + 1} of {count}"):
            length = max(len(ids[prompt.prompt_id]) for prompt in batch)
            padded = [[0] * (length - len(ids[p.prompt_id])) + ids[p.prompt_id] for p in batch]
            mask = [[0] * (length - len(ids[p.prompt_id])) + [1] * len(ids[p.prompt_id]) for p in batch]
            output = model.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                max_new_tokens=new_tokens,
                **DECODINGS[decoding],
            )
            for prompt, row in zip(batch, output[:, length:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                if end > 1:
                    yield Recording(
                        prompt_id=prompt.prompt_id,
                        segment=prompt.segment,
                        prompt=tuple(ids[prompt.prompt_id]),
                        answer=tuple(row[:end]),
                        max_new_tokens=new_tokens,
                        request=request,
                        noise=(),
                    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """Accepted tokens per block of both, by segment and length."""
    segments = list(dict.fromkeys(row["segment"] for row in rows))
    found = {
        (r["decoding"], r["source"], r["block_length"], r["segment"]): sum(r["accepted"]) / r["blocks"] for r in rows
    }
    for decoding in RUNS:
        print(f"\n{decoding}\n\n| length | {' | '.join(segments)} |\n|---|" + "---|" * len(segments))
        for length in BLOCK_LENGTHS:
            cells = [
                f"{found[decoding, 'ngram', length, s]:.3f} / {found[decoding, TheirPromptLookup.name, length, s]:.3f}"
                for s in segments
            ]
            print(f"| {length} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
