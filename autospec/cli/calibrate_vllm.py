"""`autospec calibrate --vllm`: what steps of a vLLM engine cost by the tokens that they verify, into the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

SECONDS = 120.0
UNKNOWN = "unknown"


def run(
    where: str,
    store: str,
    *,
    target: str | None,
    dtype: str | None,
    seconds: float,
    most_requests: int,
    tokens: int,
    device: str | None,
    engine: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Measure a server (an address) or an engine of one's own (a folder), and write what was found.

    Raises:
        AutospecError: it cannot be measured; nothing is written.
    """
    from autospec.errors import ConfigurationError
    from autospec.integrations.vllm import load, own_engine, web
    from autospec.integrations.vllm.steps import sizes_up_to
    from autospec.telemetry.codec import to_entry
    from autospec.telemetry.store import Store

    def say(text: str) -> None:
        click.echo(text, err=True)

    sizes = sizes_up_to(most_requests)
    with Store(store) as opened:  # better refused before anything is measured
        if web.is_address(where):
            if engine is not None:
                raise ConfigurationError("--engine is for an engine that is started here: give a model's folder")
            server = load.Server(where, key=key)
            model = server.model(target)
            device, dtype = device or UNKNOWN, dtype or UNKNOWN
            measured = load.measure(server, model, sizes, tokens, seconds, device, dtype, say)
        else:
            for option, value in (("--device", device), ("--target", target), ("--api-key", key)):
                if value is not None:
                    raise ConfigurationError(
                        f"{option} is for a server: of the engine that is started here it is known"
                    )
            folder = _folder(where)
            measured = own_engine.measure(folder, sizes, tokens, seconds, dtype or "auto", _engine(engine), say)
        now = datetime.now(UTC)
        opened.write([to_entry(sample) for sample in measured.samples(now)])
        place = opened.url
    if as_json:
        points = [{"tokens": each.tokens, "seconds": each.seconds, "steps": each.num_steps} for each in measured.points]
        found = measured.deployment
        described = {"host": found.host, "device": found.device, "target": found.target, "dtype": found.dtype}
        click.echo(json.dumps({**described, "store": place, "points": points}))
        return
    click.echo("a step, milliseconds by tokens verified (those of all requests, drafts + 1 of each)")
    for each in measured.points:
        click.echo(f"{each.tokens:>7}{1000 * each.seconds:>10.4g}   median of {each.num_steps}")
    click.echo(f"\nwritten to {place} for {measured.deployment.target} on {measured.deployment.device}")


def _folder(where: str) -> str:
    """The folder of a model, a known name's included: vLLM is to fetch nothing."""
    from autospec import models

    found = models.resolve(where)
    if not Path(found).is_dir():
        raise click.BadParameter(f"{where}: neither an address nor a folder", param_hint="--vllm")
    return found


def _engine(text: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(
            f"{text!r}: a JSON object is needed, as in '{{\"enforce_eager\": true}}'", param_hint="--engine"
        )
    return found
