"""`autospec metrics`: what a monitoring system is given."""

from __future__ import annotations

from importlib.resources import files

import click

_FILES = {"alerts": "alerts.yml", "dashboard": "grafana.json"}


@click.command(name="metrics")
@click.argument("what", type=click.Choice(["dashboard", "alerts", "names"]))
def command(what: str) -> None:
    """Print a Grafana dashboard, Prometheus alert rules, or the names of all metrics.

    Write it to a file: autospec metrics dashboard > autospec.json. What the metrics mean: docs/metrics.md.
    """
    if what != "names":
        text = files("autospec.telemetry").joinpath("dashboards", _FILES[what]).read_text(encoding="utf-8")
        click.echo(text, nl=False)
        return
    from prometheus_client import CollectorRegistry

    from autospec.telemetry.metrics import Metrics

    for family in Metrics(CollectorRegistry()).describe():
        suffix = "_total" if family.type == "counter" else ""
        click.echo(f"{family.name}{suffix} ({family.type}): {family.documentation}")
