"""`autospec report`: what speculation did, by segment, from the database."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from autospec.telemetry.report import Report


@click.command(name="report")
@click.option("--store", required=True, show_envvar=True, help="Telemetry database, as in sqlite:///autospec.db.")
@click.option("--run", default=None, show_envvar=True, help="Only requests with this label; `last` for the newest.")
@click.option(
    "--by",
    default="segment",
    show_default=True,
    show_envvar=True,
    help="Comma-separated groups: segment, decoding, policy, device.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="Also write the report as one self-contained page.",
)
def command(store: str, run: str | None, by: str, json: bool, html: Path | None) -> None:
    """Print speed-up and slow-down by segment against the control, from a telemetry database."""
    print_report(load_report(store, run, tuple(part.strip() for part in by.split(",") if part.strip())), json, html)


def load_report(store: str, run: str | None, group_by: tuple[str, ...]) -> Report:
    """The report of a database, opened read-only."""
    from autospec.errors import ConfigurationError
    from autospec.telemetry.report import GROUP_KEYS, build_report
    from autospec.telemetry.store import Store

    if unknown := [key for key in group_by if key not in GROUP_KEYS]:
        raise ConfigurationError(f"--by {','.join(unknown)}: known are {', '.join(GROUP_KEYS)}")
    with Store(store, readonly=True) as opened:
        if run is not None:
            runs = opened.runs()
            run = runs[-1] if run == "last" and runs else run
            if run not in runs:
                raise ConfigurationError(f"run {run!r} is not in {store}: known are {', '.join(runs) or 'none'}")
        return build_report(opened.requests(run=run), opened.comparisons(run=run), group_by=group_by)


def print_report(report: Report, json: bool, html: Path | None) -> None:
    """Print to stdout, and to a page if asked."""
    from autospec.errors import AutospecError
    from autospec.telemetry.report import to_dict, to_html, to_text

    click.echo(dumps(to_dict(report)) if json else to_text(report), nl=json)
    if html is not None:
        try:
            html.write_text(to_html(report), encoding="utf-8")
        except OSError as error:
            raise AutospecError(f"cannot write {html}: {error.strerror}") from error
