"""`autospec models`: get the demonstration model."""

from __future__ import annotations

from json import dumps

import click

from autospec import models


@click.group(name="models")
def command() -> None:
    """Fetch models that need no hub."""


@command.command(name="fetch")
@click.argument("name", default="smollm2-135m")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object with the path.")
def fetch(name: str, json: bool) -> None:
    """Fetch model NAME (default: smollm2-135m), check it, convert it once, and print its folder.

    The last line on stdout is the path alone. A folder that is there already is used again.
    """
    path = str(models.fetch(name))
    click.echo(dumps({"name": name, "path": path}) if json else path)
