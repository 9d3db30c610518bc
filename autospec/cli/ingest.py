"""`autospec ingest`: what other engines say of their requests, into a telemetry database."""

from __future__ import annotations

from json import dumps
from pathlib import Path

import click

from autospec.cli.db import store_option


@click.group(name="ingest")
def command() -> None:
    """Take in what engines without autospec say of their requests."""


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@store_option
@click.option(
    "--source",
    default="vllm",
    show_default=True,
    show_envvar=True,
    help="What drafted, as in ngram: responses do not say.",
)
@click.option("--name", default=None, show_envvar=True, help="Of the engine; this host's name if left out.")
@click.option("--device", default="vllm", show_default=True, show_envvar=True, help="Where it runs, for the report.")
@click.option(
    "--segment", default="default", show_default=True, show_envvar=True, help="Of requests whose line names none."
)
@click.option("--run", default=None, show_envvar=True, help="A label for all of them.")
@click.option(
    "--tolerate",
    type=click.FloatRange(min=0, max=1),
    default=0.01,
    show_default=True,
    show_envvar=True,
    help="Share of the lines of a file that may be broken; above it nothing of it is written.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def vllm(
    files: tuple[Path, ...],
    store: str,
    source: str,
    name: str | None,
    device: str,
    segment: str,
    run: str | None,
    tolerate: float,
    json: bool,
) -> None:
    """Put the requests of FILES into the database.

    Each file holds vLLM's responses as JSON Lines, with per-request metrics of speculative decoding
    (vllm serve --per-request-spec-decode-metrics detailed), alone or beside their requests. A file that was taken in
    before changes nothing.
    """
    from autospec.integrations.vllm.ingest import Ingested, Origin, check_share, records_in
    from autospec.telemetry.store import Store

    origin = Origin(source, name, device, segment, run)
    totals = {"entries": 0, "requests": 0, "broken": 0}
    with Store(store) as opened:
        for file in files:
            ingested = Ingested()
            records = list(records_in(file, origin, ingested))
            check_share(file, ingested, tolerate)
            opened.add(records)
            for line in ingested.broken[:5]:
                click.echo(f"{file}: left out: {line}", err=True)
            totals["entries"] += ingested.entries
            totals["requests"] += ingested.requests
            totals["broken"] += len(ingested.broken)
    if json:
        click.echo(dumps(totals))
    else:
        click.echo(f"{totals['requests']} requests from {len(files)} files, {totals['broken']} lines left out")
