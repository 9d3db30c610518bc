"""`autospec explain`: why a recorded request was decoded as it was."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from json import dumps

import click


@click.command(name="explain")
@click.argument("request")
@click.option("--store", required=True, show_envvar=True, help="Telemetry database, as in sqlite:///autospec.db.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def command(request: str, store: str, json: bool) -> None:
    """Print the decisions of REQUEST and what came of them.

    REQUEST is the id of a recorded request, the first digits of one, or `last`. Reasons of every block are there where
    they were kept, as wrap(..., trace=...) asks for.
    """
    from autospec.telemetry.explain import explain, find_request
    from autospec.telemetry.store import Store

    with Store(store, readonly=True) as opened:
        record, blocks, trouble = find_request(opened, request)
    if json:
        values = asdict(record) | {"blocks": [asdict(block) for block in blocks], "trace_error": trouble}
        click.echo(dumps(values, default=str))
    else:
        click.echo(explain(record, blocks, shutil.get_terminal_size((120, 24)).columns, trouble), nl=False)
