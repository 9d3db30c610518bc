"""`autospec report`: what speculation did, by segment, from the database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from autospec.telemetry.report import Report


MOST_REQUESTS = 50_000
"""Beyond this many the report is made of sums by the hour."""


@click.command(name="report")
@click.option("--store", required=True, show_envvar=True, help="Telemetry database, as in sqlite:///autospec.db.")
@click.option("--run", default=None, show_envvar=True, help="Only requests with this label; `last` for the newest.")
@click.option(
    "--by",
    default="segment",
    show_default=True,
    show_envvar=True,
    help="Comma-separated groups: segment, decoding, policy, device, day, source.",
)
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M"]),
    default=None,
    show_envvar=True,
    help="Only requests from this time (UTC) on.",
)
@click.option(
    "--until",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M"]),
    default=None,
    show_envvar=True,
    help="Only requests before this time (UTC).",
)
@click.option(
    "--basis",
    type=click.Choice(["auto", "requests", "hours"]),
    default="auto",
    show_default=True,
    show_envvar=True,
    help="Read every request, or sums by the hour; auto: sums beyond 50,000 requests.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
@click.option("--csv", is_flag=True, show_envvar=True, help="Print comma-separated values.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="Also write the report as one self-contained page.",
)
def command(
    store: str,
    run: str | None,
    by: str,
    since: datetime | None,
    until: datetime | None,
    basis: str,
    json: bool,
    csv: bool,
    html: Path | None,
) -> None:
    """Print speed-up and slow-down by segment against the control, from a telemetry database."""
    if json and csv:
        raise click.UsageError("--json and --csv exclude each other")
    group_by = tuple(part.strip() for part in by.split(",") if part.strip())
    period = tuple(None if time is None else time.replace(tzinfo=UTC) for time in (since, until))
    report = load_report(store, run, group_by, period, basis)
    print_report(report, "csv" if csv else "json" if json else "text", html)


def load_report(
    store: str,
    run: str | None,
    group_by: tuple[str, ...],
    period: tuple[datetime | None, ...] = (None, None),
    basis: str = "auto",
) -> Report:
    """The report of a database, opened read-only."""
    from autospec.errors import ConfigurationError
    from autospec.telemetry import hourly
    from autospec.telemetry.engines import engine_sums
    from autospec.telemetry.report import GROUP_KEYS, build_report
    from autospec.telemetry.store import Store

    if unknown := [key for key in group_by if key not in GROUP_KEYS]:
        raise ConfigurationError(f"--by {','.join(unknown)}: known are {', '.join(GROUP_KEYS)}")
    since, until = period
    if since is not None and until is not None and until <= since:
        raise ConfigurationError(f"--until {until:%Y-%m-%dT%H:%M} is not after --since {since:%Y-%m-%dT%H:%M}")
    with Store(store, readonly=True) as opened:
        can_sum = run is None and set(group_by) <= set(hourly.KEYS) and all(map(hourly.is_full_hour, period))
        if basis == "hours" and not can_sum:
            groups = ", ".join(hourly.KEYS)
            raise ConfigurationError(f"--basis hours knows no runs, full hours alone, and these groups: {groups}")
        if (
            basis == "auto"
            and can_sum
            and hourly.num_requests(opened, since, until, enough=MOST_REQUESTS) > MOST_REQUESTS
        ):
            basis = "hours"
        engines = engine_sums(opened, since, until) if run is None else ()  # they know no runs
        if basis == "hours":
            report = hourly.build_hourly_report(opened, group_by=group_by, since=since, until=until)
            return replace(report, engines=engines)
        if run is not None:
            runs = opened.runs()
            run = runs[-1] if run == "last" and runs else run
            if run not in runs:
                raise ConfigurationError(f"run {run!r} is not in {store}: known are {', '.join(runs) or 'none'}")
        requests = opened.requests(run=run, since=since)
        if until is not None:
            requests = (record for record in requests if record.started_at < until)
        report = build_report(requests, opened.comparisons(run=run), group_by=group_by)
        return replace(report, engines=engines)


def print_report(report: Report, form: str, html: Path | None) -> None:
    """Print to stdout, and to a page if asked. Args: form: `text`, `json` or `csv`."""
    from autospec.errors import AutospecError
    from autospec.telemetry.render_csv import to_csv
    from autospec.telemetry.report import to_dict, to_html, to_text

    if form == "json":
        click.echo(dumps(to_dict(report)))
    else:
        click.echo(to_csv(report) if form == "csv" else to_text(report), nl=False)
    if html is not None:
        try:
            html.write_text(to_html(report), encoding="utf-8")
        except OSError as error:
            raise AutospecError(f"cannot write {html}: {error.strerror}") from error
