"""`autospec record`: the target's own answers to prompts, as traffic."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

import click

from autospec.cli.loading import HalfOrFull, dtype_option, prompts_option
from autospec.cli.traffic import max_bytes_option, model_option, sampling_options, seed_option


@click.command(name="record")
@model_option
@prompts_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    show_envvar=True,
    help="Folder for the traffic; made if missing, added to otherwise.",
)
@click.option("--limit", type=click.IntRange(min=1), default=None, show_envvar=True, help="Only the first prompts.")
@click.option(
    "--new-tokens",
    type=click.IntRange(min=1),
    default=None,
    show_envvar=True,
    help="Tokens of each answer; the prompt's own number if left out.",
)
@sampling_options
@seed_option
@dtype_option("bfloat16")
@max_bytes_option
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def command(
    model: str,
    prompts: Path | None,
    out: Path,
    limit: int | None,
    new_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int,
    dtype: HalfOrFull,
    max_bytes: int,
    json: bool,
) -> None:
    """Answer prompts with the plain target and record them in a folder.

    A wrapped model records the traffic that it serves: autospec.wrap(model, tokenizer=tokenizer, record="traffic/").
    """
    from tqdm import tqdm

    from autospec import models
    from autospec.answering import record_prompts
    from autospec.data import load_prompts
    from autospec.traffic import Traffic

    chosen = load_prompts(prompts)[:limit]
    traffic = Traffic(out, max_bytes=max_bytes)
    click.echo(f"loading {model} ...", err=True)
    target, tokenizer = models.load(model, dtype=dtype)
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    answers = record_prompts(target, tokenizer, chosen, traffic, options, max_new_tokens=new_tokens, seed=seed)
    count = sum(1 for _ in tqdm(answers, total=len(chosen), desc="record", unit="request"))
    if json:
        click.echo(dumps({"out": str(out), "requests": count}))
    else:
        click.echo(f"{out}: {count} requests recorded; autospec traffic show {out}")
