"""`autospec db`: look after a telemetry database."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

_AGE = re.compile(r"(\d+)([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


class Age(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click alone
    """`90d`, `12w` or `36h`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = _AGE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no age: as in 90d, 12w or 36h", param, ctx)
        try:
            return int(found[1]) * _UNITS[found[2]]
        except OverflowError:
            self.fail(f"{value!r} is too long ago", param, ctx)


store_option = click.option(
    "--store", required=True, show_envvar=True, help="The database, as in sqlite:///autospec.db."
)


@click.group(name="db")
def command() -> None:
    """Look after a telemetry database: prune, vacuum, export, import, merge, check, replay."""


@command.command()
@store_option
@click.option(
    "--older-than", type=Age(), required=True, show_envvar=True, help="Age of what goes, as in 90d; at least a day."
)
@click.option("--hours", is_flag=True, show_envvar=True, help="Delete the sums by the hour, too.")
@click.option("--dry-run", is_flag=True, show_envvar=True, help="Only say how much that would be.")
def prune(store: str, older_than: timedelta, hours: bool, dry_run: bool) -> None:
    """Delete old requests. Their sums by the hour stay, and with them the report by hours."""
    from autospec.errors import ConfigurationError
    from autospec.telemetry import upkeep
    from autospec.telemetry.store import Store

    try:
        before = datetime.now(UTC) - older_than
    except OverflowError:
        raise ConfigurationError(f"--older-than {older_than.days}d: that is before the calendar begins") from None
    _check_it_exists(store)
    with Store(store, readonly=dry_run) as opened:
        count = upkeep.num_older(opened, before)
        if dry_run:
            click.echo(f"{count} requests started before {before:%Y-%m-%d %H:%M} UTC; nothing was deleted")
            return
        with _progress("requests", count) as bar:
            count = upkeep.prune(opened, before, hours=hours, progress=bar.update)
    click.echo(f"{count} requests deleted; autospec db vacuum gives the room back to the disk")


@command.command()
@store_option
def vacuum(store: str) -> None:
    """Give room that is not used any more back to the disk."""
    from autospec.telemetry import upkeep
    from autospec.telemetry.store import Store

    _check_it_exists(store)
    with Store(store) as opened:
        upkeep.vacuum(opened)
    click.echo("done")


@command.command()
@store_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    show_envvar=True,
    help="Folder for the files.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["parquet", "csv"]),
    default="parquet",
    show_default=True,
    envvar="AUTOSPEC_DB_EXPORT_FORMAT",
    show_envvar=True,
    help="Parquet needs pyarrow.",
)
@click.option(
    "--without-recordings", is_flag=True, show_envvar=True, help="Leave out prompts and answers kept by wrap(record=)."
)
def export(store: str, out: Path, file_format: str, without_recordings: bool) -> None:
    """Write requests with all that belongs to them, comparisons, policies and what they learned, and costs to files."""
    from autospec.errors import AutospecError
    from autospec.telemetry import transfer
    from autospec.telemetry.store import Store

    with Store(store, readonly=True) as opened, _progress("rows", transfer.num_entries(opened)) as bar:
        try:
            written = transfer.export(opened, out, file_format, bar.update, recordings=not without_recordings)
        except OSError as error:
            raise AutospecError(f"cannot write to {out}: {error.strerror}") from error
    for name, count in written.items():
        click.echo(f"{out / name}: {count} rows")
    if not written:
        click.echo("nothing is recorded there yet")


@command.command(name="import")
@store_option
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def import_(store: str, folder: Path) -> None:
    """Read an exported folder into a database. What is there already is skipped."""
    from autospec.telemetry import transfer
    from autospec.telemetry.store import Store

    batches = transfer.read_export(folder)
    first = next(batches, [])  # before a database is made
    with Store(store) as opened, _progress("rows", None) as bar:
        before = opened.count()
        for batch in chain([first], batches):
            opened.write(batch)
            bar.update(len(batch))
        count = opened.count() - before
    click.echo(f"{count} new requests")


@command.command()
@click.argument("into")
@click.argument("source")
def merge(into: str, source: str) -> None:
    """Write everything of the database SOURCE into the database INTO, which keeps what it has."""
    from autospec.telemetry import transfer
    from autospec.telemetry.store import Store

    with Store(source, readonly=True) as other, Store(into) as opened:
        before = opened.count()
        with _progress("rows", transfer.num_entries(other)) as bar:
            transfer.merge(opened, other, bar.update)
        count, pruned = opened.count() - before, transfer.num_pruned(other)
    click.echo(f"{count} new requests")
    if pruned > 0:
        click.echo(
            f"{pruned} pruned requests of {source} are left in its sums by the hour alone and were not merged", err=True
        )


@command.command()
@store_option
def check(store: str) -> None:
    """Look for damage: of the file, of keys, tables and indexes, of the sums by the hour. Changes nothing."""
    from autospec.telemetry import upkeep
    from autospec.telemetry.store import Store

    with Store(store, readonly=True) as opened:
        problems = upkeep.check(opened)
        waiting = _waiting(opened.url)
    for problem in problems:
        click.echo(f"{problem.what}: {problem.advice}")
    if waiting:
        click.echo(f"records wait in {waiting} spool files: autospec db replay writes them")
    if problems:
        sys.exit(1)
    click.echo("no damage found")


@command.command()
@store_option
def replay(store: str) -> None:
    """Write what recorders that are gone have left in the spool. Otherwise the next recorder does it."""
    from autospec.telemetry.recorder import Recorder

    _check_it_exists(store)
    with Recorder(store) as recorder:
        is_done = recorder.replay()
        replayed, damaged, error = recorder.replayed, recorder.damaged, recorder.last_error
    click.echo(f"{replayed} records written" + (f", {damaged} could not be read" if damaged else ""))
    if not is_done:
        click.echo(f"some are left: {error}", err=True)
        sys.exit(1)


def _check_it_exists(store: str) -> None:
    """A mistyped path is to be an error, not a new database."""
    from autospec.errors import ConfigurationError
    from autospec.telemetry.urls import parse_url, shown_url

    url = parse_url(store)
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).exists()):
        raise ConfigurationError(f"there is no telemetry database at {shown_url(url)}: record into it first")


def _waiting(url: str) -> int:
    from autospec.telemetry.spool import folder_for, orphans

    folder = folder_for(url)
    found = list(orphans(folder)) if folder is not None else []
    for orphan in found:
        orphan.close()
    return len(found)


def _progress(unit: str, total: int | None) -> Any:
    return tqdm(total=total, unit=f" {unit}", disable=None, leave=False)
