"""`autospec ingest`: what other engines say of their requests, into a telemetry database."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autospec.cli.db import store_option

if TYPE_CHECKING:
    from autospec.integrations.vllm.ingest import Origin
    from autospec.telemetry.store import Store


class FileOrAddress(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click alone
    """A file that exists, or an address as in `http://127.0.0.1:8000`."""

    name = "file or address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            return value
        found: Path = click.Path(exists=True, dir_okay=False, path_type=Path).convert(value, param, ctx)
        return found


@click.group(name="ingest")
def command() -> None:
    """Take in what engines without autospec say of their requests."""


@command.command()
@click.argument("sources", nargs=-1, required=True, type=FileOrAddress())
@store_option
@click.option(
    "--source",
    default="vllm",
    show_default=True,
    show_envvar=True,
    help="What drafted, as in ngram: responses and metrics do not say.",
)
@click.option(
    "--name", default=None, show_envvar=True, help="Of the engine; else its host and port, of files this host's name."
)
@click.option("--device", default="vllm", show_default=True, show_envvar=True, help="Where it runs, for the report.")
@click.option(
    "--segment", default="default", show_default=True, show_envvar=True, help="Of requests whose line names none."
)
@click.option("--run", default=None, show_envvar=True, help="A label for all requests.")
@click.option(
    "--tolerate",
    type=click.FloatRange(min=0, max=1),
    default=0.01,
    show_default=True,
    show_envvar=True,
    help="Share of the lines of a file that may be broken; above it nothing of it is written.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1, max=86_400.0),
    default=None,
    show_envvar=True,
    help="Seconds between scrapes of the addresses, until Ctrl-C or SIGTERM; one scrape if left out.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1, max=600.0),
    default=5.0,
    show_default=True,
    show_envvar=True,
    help="Seconds that a server may take to answer.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def vllm(
    sources: tuple[Path | str, ...],
    store: str,
    source: str,
    name: str | None,
    device: str,
    segment: str,
    run: str | None,
    tolerate: float,
    every: float | None,
    timeout: float,
    json: bool,
) -> None:
    """Put what SOURCES say into the database.

    A file of vLLM's responses as JSON Lines, with per-request metrics of speculative decoding
    (vllm serve --per-request-spec-decode-metrics detailed), alone or beside their requests. A file that was taken in
    before changes nothing.

    The address of a server, as in http://127.0.0.1:8000, or a file with what its /metrics said: counters of the whole
    engine, which become sums by the hour and no requests.
    """
    from autospec.cli.scraping import Scrapes
    from autospec.errors import ConfigurationError
    from autospec.integrations.vllm.ingest import Origin
    from autospec.integrations.vllm.scraping import is_exposition, metrics_address, scraped
    from autospec.telemetry.recorder import Recorder
    from autospec.telemetry.store import Store

    origin = Origin(source, name, device, segment, run)
    files = [each for each in sources if isinstance(each, Path)]
    addresses = [metrics_address(each) for each in sources if isinstance(each, str)]
    if every is not None and (files or not addresses):
        raise ConfigurationError("--every is for addresses alone")
    totals: dict[str, Any] = {"entries": 0, "requests": 0, "broken": 0}
    with Store(store) as opened, Recorder(opened) as recorder:
        scrapes = Scrapes(recorder, origin, timeout)
        for file in files:
            if is_exposition(file):
                scrapes.take(scraped(file, origin))
            else:
                _take_responses(file, origin, opened, tolerate, totals)
        if addresses:
            scrapes.visit(addresses, every)
    totals |= {"scrapes": scrapes.done, "failed_scrapes": scrapes.failed, "engines": len(scrapes.engines)}
    if json:
        click.echo(dumps(totals))
    else:
        said = f"{totals['requests']} requests from {len(files)} files, {totals['broken']} lines left out"
        if scrapes.done or scrapes.failed:
            failed = f", {scrapes.failed} failed" if scrapes.failed else ""
            said = f"{scrapes.done} scrapes of {len(scrapes.engines)} engines{failed}" + (f"; {said}" if files else "")
        click.echo(said)
    if scrapes.failed and not scrapes.done:
        raise SystemExit(1)


def _take_responses(file: Path, origin: Origin, store: Store, tolerate: float, totals: dict[str, Any]) -> None:
    from autospec.integrations.vllm.ingest import Ingested, check_share, records_in

    ingested = Ingested()
    records = list(records_in(file, origin, ingested))
    check_share(file, ingested, tolerate)
    store.add(records)
    for line in ingested.broken[:5]:
        click.echo(f"{file}: left out: {line}", err=True)
    totals["entries"] += ingested.entries
    totals["requests"] += ingested.requests
    totals["broken"] += len(ingested.broken)
