"""`autospec version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from json import dumps

import click

_SHOWN = ("autospec-decoding", "torch", "transformers", "scikit-learn", "optuna", "pandas", "sqlalchemy")


@click.command(name="version")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def command(json: bool) -> None:
    """Print the versions of autospec and of what it builds on."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _SHOWN}}
    if json:
        click.echo(dumps(versions))
        return
    for name, number in versions.items():
        click.echo(f"{name} {number}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
