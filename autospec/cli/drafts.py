"""`autospec drafts`: what the draft sources cost and bring."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Any

import click

from autospec.cli.loading import (
    HalfOrFull,
    assistant_for,
    block_lengths_option,
    dtype_option,
    load_assistant,
    parse_lengths,
    prompts_option,
    target_option,
)

SHOWN_POSITIONS = 4


@click.group(name="drafts")
def command() -> None:
    """See what draft sources cost and bring."""


@command.command(name="bench")
@target_option
@click.option(
    "--drafts",
    default="ngram,suffix",
    show_default=True,
    show_envvar=True,
    help="Names of draft sources, comma-separated; plug-ins go by their names.",
)
@click.option(
    "--assistant",
    default=None,
    show_envvar=True,
    help="A smaller model to draft; `none` for none. The demonstration model has its own.",
)
@click.option(
    "--early-exit", default=None, show_envvar=True, help="Draft with the target's first layers: numbers, as in 4,8."
)
@prompts_option
@click.option("--limit", type=click.IntRange(min=1), default=None, show_envvar=True, help="Only so many prompts.")
@block_lengths_option
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    show_envvar=True,
    help="Of the answers; 0 is greedy.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(min=3),
    default=None,
    show_envvar=True,
    help="Tokens of each answer; the prompt's own number if left out.",
)
@dtype_option("bfloat16")
@click.option("--seed", type=int, default=0, show_default=True, show_envvar=True, help="Of sampled answers.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object instead of the table.")
def bench_command(
    target: str,
    drafts: str,
    assistant: str | None,
    early_exit: str | None,
    prompts: Path | None,
    limit: int | None,
    block_lengths: str,
    temperature: float,
    new_tokens: int | None,
    dtype: HalfOrFull,
    seed: int,
    json: bool,
) -> None:
    """Measure each draft source on your prompts, by segment and block length.

    The target answers each prompt once; then every source is asked for drafts along that answer, which gives the blocks
    that decoding would have had (sampled answers: paired sampling). Drafting is timed here and now, verification is
    measured by itself; the speed-up expected from both leaves out what is the same with and without drafts.
    """
    import pandas as pd
    from tqdm import tqdm

    from autospec import models
    from autospec.costs.calibration import calibrate
    from autospec.data import interleaved, load_prompts
    from autospec.draft_bench import bench
    from autospec.drafts import make_sources
    from autospec.drafts.base import hidden_layers_of
    from autospec.replay import record

    lengths = parse_lengths(block_lengths)
    chosen = list(interleaved(load_prompts(prompts)))[:limit]
    makers = _makers(drafts, early_exit)
    click.echo(f"loading {target} ...", err=True)
    model, tokenizer = models.load(target, dtype=dtype)
    if (assistant := assistant_for(target, assistant)) is not None:
        loaded = load_assistant(assistant, dtype)
        makers.append(lambda: loaded)
    if not makers:
        raise click.UsageError("no draft source: name some with --drafts, --assistant or --early-exit")
    for make in makers:  # what cannot be used is better known before minutes of work than after them
        source = make()
        source.attach(model, tokenizer)
        if hidden_layers_of(source):
            raise click.UsageError(
                f"{source.name} looks at the target's hidden states: a replay along answers has none"
            )
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature}
    answers = record(model, tokenizer, chosen, options, max_new_tokens=new_tokens, seed=seed)
    recordings = list(tqdm(answers, total=len(chosen), desc="answers", unit="answer"))
    if not recordings:
        raise click.ClickException("no answer is long enough for a draft: three tokens are needed")
    click.echo("measuring what verifying costs on this device ...", err=True)
    costs = calibrate(model, make_sources([]), block_lengths=sorted(set(lengths)))
    results = bench(model, tokenizer, recordings, makers, block_lengths=lengths)
    found = tqdm(results, total=len(makers) * len(lengths), desc="drafts", unit="setting")
    rows = [_cells(row, costs) for rows in found for row in rows]
    if json:
        click.echo(dumps({"target": target, "temperature": temperature, "dtype": dtype, "rows": rows}))
        return
    table = pd.DataFrame(rows).drop(columns=["judged", "accepted", "failures"])
    table["acceptance_by_position"] = [
        " ".join(f"{share:.2f}" for share in row["acceptance_by_position"][:SHOWN_POSITIONS]) for row in rows
    ]
    click.echo(_as_text(table))
    for failure in sorted({failure for row in rows for failure in row["failures"]}):
        click.echo(f"gave up in some requests: {failure}")


def _makers(drafts: str, early_exit: str | None) -> list[Callable[[], Any]]:
    """One maker for each source; each call gives a new one, with nothing learnt."""
    from autospec.drafts import EarlyExit, make_sources

    makers: list[Callable[[], Any]] = []
    for name in [name.strip() for name in drafts.split(",") if name.strip() not in ("", "none")]:
        make_sources([name])
        makers.append(lambda name=name: make_sources([name])[name])  # type: ignore[misc]
    for number in [part for part in (early_exit or "").split(",") if part.strip()]:
        if not number.strip().isdecimal():
            raise click.BadParameter(f"{early_exit!r}: numbers of layers, as in 4,8", param_hint="--early-exit")

        def first_layers(layers: int = int(number)) -> EarlyExit:
            source = EarlyExit(layers)
            source.name = f"early_exit_{layers}"
            return source

        makers.append(first_layers)
    return makers


def _cells(row: Any, costs: Any) -> dict[str, Any]:
    tally = row.tally()
    return {
        "source": row.source,
        "segment": row.segment,
        "block_length": row.block_length,
        "blocks": tally.blocks,
        "drafted_per_block": round(row.mean_draft_tokens, 3),
        "accepted_per_block": round(row.mean_accepted_tokens, 3),
        "acceptance_length": round(row.mean_acceptance_length, 3),
        "acceptance_by_position": [round(share, 3) for share in row.acceptance_by_position],
        "draft_ms": round(row.draft_ms, 3),
        "memory_bytes": row.memory_bytes,
        "expected_speed_up": round(row.expected_speed_up(costs), 3),
        "judged": tally.at_risk,
        "accepted": tally.accepted,
        "failures": row.failures,
    }


def _as_text(table: Any) -> str:
    table = table.rename(
        columns={
            "block_length": "length",
            "drafted_per_block": "drafted",
            "accepted_per_block": "accepted",
            "acceptance_length": "committed",
            "acceptance_by_position": "accepted at 1 2 3 4",
            "draft_ms": "draft ms",
            "memory_bytes": "memory MB",
            "expected_speed_up": "speed-up",
        }
    )
    table["memory MB"] = (table["memory MB"] / 1e6).round(2)
    text: str = table.to_string(index=False, float_format=lambda value: f"{value:.2f}")
    return text + (
        "\n\ndrafted, accepted, committed: tokens per block, the last with +1 included; accepted at j: of the drafts "
        "judged there, the share accepted;\ndraft ms: median of a block; speed-up: expected from measured drafting "
        "(its first look at the prompt included) and verification; below 1 is a slow-down."
    )
