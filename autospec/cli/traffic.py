"""`autospec traffic`: import, complete and show recorded traffic."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Any

import click

from autospec.cli.loading import Command, HalfOrFull, dtype_option

FORMATS = ("auto", "openai", "sharegpt", "plain", "spec_bench", "vllm")

model_option = click.option(
    "--model",
    "--target",
    "model",
    default="smollm2-135m",
    show_default=True,
    show_envvar=True,
    help="The target: model folder or hub id.",
)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, show_envvar=True, help="Of sampled answers."
)
max_bytes_option = click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    default=1 << 30,
    show_default=True,
    show_envvar=True,
    help="Bound of the folder, about.",
)


def sampling_options(command: Command) -> Command:
    """`--temperature` and `--top-p`."""
    command = click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=1.0,
        show_default=True,
        show_envvar=True,
        help="Of sampled answers.",
    )(command)
    return click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        show_envvar=True,
        help="Of the answers; 0 is greedy.",
    )(command)


@click.group(name="traffic")
def command() -> None:
    """Import, complete and show recorded traffic."""


@command.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", "--target", "model", default=None, show_envvar=True, help="The target: its tokenizer is used.")
@click.option("--tokenizer", default=None, show_envvar=True, help="A tokenizer alone: folder or hub id.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    show_envvar=True,
    help="Folder for the traffic; made if missing, added to otherwise.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    default="auto",
    show_default=True,
    envvar="AUTOSPEC_TRAFFIC_IMPORT_FORMAT",
    show_envvar=True,
    help="Of the file; auto looks at its first entries.",
)
@click.option(
    "--tolerate",
    type=click.FloatRange(min=0, max=1),
    default=0.01,
    show_default=True,
    show_envvar=True,
    help="Share of the lines that may be broken; above it nothing is written.",
)
@click.option("--segment", default=None, show_envvar=True, help="Of requests whose line names none.")
@max_bytes_option
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def import_command(
    file: Path,
    model: str | None,
    tokenizer: str | None,
    out: Path,
    file_format: str,
    tolerate: float,
    segment: str | None,
    max_bytes: int,
    json: bool,
) -> None:
    """Add the requests of FILE to a folder of traffic.

    Formats: openai (completion logs with messages and choices), sharegpt, plain (prompt and completion), spec_bench
    (question.jsonl) and vllm (responses with per-request metrics of speculative decoding, logged with their requests).
    Unknown fields are ignored. Requests without an answer wait for autospec traffic complete.
    """
    if (model is None) == (tokenizer is None):
        raise click.UsageError("give --model or --tokenizer: token ids are those of one tokenizer")

    from tqdm import tqdm
    from transformers import AutoTokenizer

    from autospec import models
    from autospec.errors import ModelError
    from autospec.traffic.importing import import_file

    name = model or tokenizer or ""
    try:
        known = AutoTokenizer.from_pretrained(models.resolve(name))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load the tokenizer of {name!r}: {error}") from error
    target = Path(model).name if model is not None and Path(model).is_absolute() else model
    with tqdm(total=file.stat().st_size, desc="import", unit="B", unit_scale=True) as bar:
        done = import_file(
            file,
            out,
            known,
            target=target,
            format=file_format,
            tolerate=tolerate,
            segment=segment,
            max_bytes=max_bytes,
            progress=bar.update,
        )
    for each in done.broken:
        click.echo(f"line {each.number}: {each.reason}", err=True)
    if json:
        counts = {"requests": done.requests, "pending": done.pending, "lines": done.entries, "broken": done.num_broken}
        click.echo(dumps({"out": str(out), "format": done.format, **counts}))
        return
    click.echo(
        f"{out}: {done.requests} requests of {done.entries} lines ({done.format}), {done.pending} without an answer, "
        f"{done.num_broken} lines broken"
    )
    if done.pending:
        click.echo(f"answer them: autospec traffic complete {out} --model MODEL")


@command.command(name="show")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def show(folder: Path, json: bool) -> None:
    """Print what FOLDER holds: requests, tokens, segments, target, tokenizer, time span, damaged parts."""
    from autospec.traffic.summary import summarise

    content = summarise(folder)
    click.echo(dumps(content) if json else _as_text(content))


@command.command(name="complete")
@click.argument("folder", type=click.Path(path_type=Path))
@model_option
@click.option(
    "--new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    show_envvar=True,
    help="Tokens of answers whose request does not say.",
)
@sampling_options
@seed_option
@dtype_option("bfloat16")
@max_bytes_option
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def complete_command(
    folder: Path,
    model: str,
    new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    dtype: HalfOrFull,
    max_bytes: int,
    json: bool,
) -> None:
    """Answer the requests of FOLDER that have no answer, with the plain target.

    Each is decoded as its own log says; --temperature and --top-p are for those that say nothing. Each answer is kept
    as it comes: run again, the command goes on with the rest.
    """
    from tqdm import tqdm

    from autospec import models
    from autospec.answering import complete
    from autospec.traffic import TrafficReader

    total = sum(request.is_pending for request in TrafficReader(folder))
    answered = added = 0
    failed: list[str] = []
    if total:
        click.echo(f"loading {model} ...", err=True)
        target, tokenizer = models.load(model, dtype=dtype)
        options: dict[str, Any] | None = None
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_p": top_p}
        answers = complete(
            target, tokenizer, folder, options=options, max_new_tokens=new_tokens, seed=seed, max_bytes=max_bytes
        )
        with tqdm(total=total, desc="complete", unit="request") as bar:
            for each in answers:
                bar.total += each.num_follow_ups
                bar.update()
                added += each.num_follow_ups
                answered += each.error is None
                if each.error is not None:
                    failed.append(f"{each.request.request_id}: {each.error}")
    for line in failed[:10]:
        click.echo(line, err=True)
    if json:
        click.echo(dumps({"answered": answered, "follow_ups": added, "failed": len(failed)}))
    else:
        click.echo(f"{folder}: {answered} requests answered, {added} of them later turns; {len(failed)} failed")
    sys.exit(1 if failed else 0)


def _as_text(content: dict[str, Any]) -> str:
    from autospec.telemetry.labels import pad, visible

    rows = [*content["segments"], {"segment": "all", **content["all"]}]
    cells = [[visible(row["segment"], 40), *(f"{row[key]}" for key in content["all"])] for row in rows]
    table = [["segment", "requests", "unanswered", "prompt tokens", "output tokens"], *cells]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(
            [pad(row[0], widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    span = "not known" if content["first"] is None else f"{content['first']} to {content['last']}"
    damaged = [
        f"  {each['file']}, byte {each['position']}: {each['num_bytes']} bytes, {visible(each['reason'], 100)}"
        for each in content["damaged"][:10]
    ]
    return "\n".join(
        [
            lines[0],
            rule,
            *lines[1:-1],
            rule,
            lines[-1],
            "",
            f"target:    {visible(content['target'] or 'not named', 80)}",
            f"tokenizer: {visible(content['tokenizer'], 80)} ({content['fingerprint'][:8]})",
            f"arrived:   {span}",
            f"files:     {content['files']}, records superseded: {content['superseded']}",
            f"damaged:   {len(content['damaged'])} parts, left out",
            *damaged,
        ]
    )
