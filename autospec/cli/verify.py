"""`autospec verify`: is greedy decoding of your own model on your own prompts the same with and without speculation?"""

from __future__ import annotations

import sys
from collections import Counter
from json import dumps
from pathlib import Path

import click

from autospec.cli.loading import (
    HalfOrFull,
    block_lengths_option,
    dtype_option,
    load_models,
    parse_lengths,
    prompts_option,
)


@click.command(name="verify")
@click.option("--target", required=True, show_envvar=True, help="Model folder, hub id, or smollm2-135m.")
@click.option("--assistant", default=None, show_envvar=True, help="A smaller model with the same tokenizer, to draft.")
@prompts_option
@dtype_option("float32")
@block_lengths_option
@click.option(
    "--new-tokens",
    type=click.IntRange(min=1),
    default=None,
    show_envvar=True,
    help="Tokens of each answer; the prompt's own number if left out.",
)
@click.option("--limit", type=click.IntRange(min=1), default=None, show_envvar=True, help="Only the first prompts.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def command(
    target: str,
    assistant: str | None,
    prompts: Path | None,
    dtype: HalfOrFull,
    block_lengths: str,
    new_tokens: int | None,
    limit: int | None,
    json: bool,
) -> None:
    """Compare greedy answers with and without speculation, and print where they part and by how much.

    A difference is a tie where the target's own one-token forwards put both tokens within the tolerance of its number
    format. Exits with 1 if an answer differs otherwise.
    """
    from tqdm import tqdm

    from autospec.data import load_prompts
    from autospec.verify import verify_greedy

    lengths = parse_lengths(block_lengths)
    chosen = load_prompts(prompts)[:limit]
    model, tokenizer, drafts = load_models(target, assistant, dtype)
    found = verify_greedy(model, tokenizer, chosen, drafts=drafts, block_lengths=lengths, max_new_tokens=new_tokens)
    total = len(chosen) * len(drafts) * len(lengths)
    verdicts = list(tqdm(found, total=total, desc="verify", unit="answer"))
    counts = Counter(v.kind for v in verdicts)
    parted = [v for v in verdicts if v.difference is not None]
    rows = [
        {
            "prompt": v.prompt_id,
            "source": v.source,
            "block_length": v.block_length,
            "kind": v.kind,
            "position": v.difference.position,
            "expected": v.difference.expected,
            "found": v.difference.found,
            "logit_gap": v.difference.logit_gap,
            "tolerance": v.difference.tolerance,
        }
        for v in parted
        if v.difference is not None
    ]
    if json:
        click.echo(dumps({"answers": len(verdicts), "dtype": dtype, **counts, "differences": rows}))
    else:
        for row in rows:
            click.echo(
                f"{row['kind']}: {row['prompt']}, {row['source']}:{row['block_length']}, token {row['position']}: "
                f"{row['expected']} / {row['found']}, logit gap {row['logit_gap']:.4g} "
                f"(tolerance {row['tolerance']:.4g})"
            )
        click.echo(
            f"{len(verdicts)} answers in {dtype}: {counts['identical']} identical, {counts['tie']} ties, "
            f"{counts['different']} different"
        )
    sys.exit(1 if counts["different"] else 0)
