"""`autospec export`: what other runtimes take from a tuned policy."""

from __future__ import annotations

from json import dumps
from pathlib import Path

import click

RUNTIMES = ("transformers", "vllm", "sglang", "llama.cpp")


@click.command(name="export")
@click.argument("policy")
@click.option(
    "--to",
    "runtime",
    type=click.Choice(RUNTIMES),
    required=True,
    envvar="AUTOSPEC_EXPORT_TO",
    show_envvar=True,
    help="The runtime that is to take it.",
)
@click.option(
    "--segment", default=None, show_envvar=True, help="Whose action all traffic is to get; the default's if left out."
)
@click.option(
    "--assistant",
    default=None,
    show_envvar=True,
    help="The small model that drafts, as the runtime is to find it: a folder, a hub id, a GGUF file.",
)
@click.option(
    "--early-exit",
    type=click.IntRange(min=1),
    default=None,
    show_envvar=True,
    help="How many of the target's first layers draft, where the policy uses early_exit.",
)
@click.option(
    "--store",
    default=None,
    show_envvar=True,
    help="For vllm: the database with what was accepted and what steps cost, for a table by batch size.",
)
@click.option(
    "--most-requests",
    type=click.IntRange(min=1, max=65536),
    default=256,
    show_default=True,
    show_envvar=True,
    help="Batch size that the table goes to, as in vLLM's --max-num-seqs.",
)
@click.option(
    "--check",
    "target",
    metavar="TARGET",
    default=None,
    show_envvar=True,
    help="For vllm: have the vLLM that is installed make its configuration of it, for this model.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="File for what the runtime takes; printed if left out.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object, with the limits in it.")
def command(
    policy: str,
    runtime: str,
    segment: str | None,
    assistant: str | None,
    early_exit: int | None,
    store: str | None,
    most_requests: int,
    target: str | None,
    out: Path | None,
    json: bool,
) -> None:
    """Print what a runtime can take from the tuned POLICY file.

    A runtime has one setting for all traffic. What of the policy it cannot be told is said on stderr, line by line; a
    draft source that it has no counterpart of is refused.
    """
    from autospec.errors import ConfigurationError
    from autospec.export.base import Options
    from autospec.export.chosen import choose
    from autospec.export.registry import RUNTIMES as EXPORTS
    from autospec.tune.policy_file import write_page

    chosen = choose(policy, segment)
    if runtime != "vllm" and (store or target):
        raise ConfigurationError("--store and --check are for --to vllm alone")
    schedule = None
    if store and chosen.block_length:
        from autospec.export import batch_sizes
        from autospec.telemetry.store import Store

        with Store(store, readonly=True) as opened:
            acceptance = batch_sizes.measured_acceptance(opened, chosen.source)
            steps = batch_sizes.measured_steps(opened)
        schedule = batch_sizes.schedule(acceptance, steps, chosen.block_length, most_requests)
    exported = EXPORTS[runtime](chosen, Options(assistant, early_exit, schedule))
    text = exported.text + "\n" if exported.text else ""
    if out is not None:
        write_page(out, text)
    click.echo(f"{runtime} gets {chosen.label} ({chosen.field}): {exported.use}", err=True)
    for limit in exported.limits:
        click.echo(f"limit: {limit}", err=True)
    if target:
        from autospec.export.vllm_check import check
        from autospec.models import resolve

        click.echo(check(exported.settings, resolve(target), most_requests), err=True)
    if json:
        record = {
            "runtime": runtime,
            "field": chosen.field,
            "source": chosen.name,
            "block_length": chosen.block_length,
            "settings": dict(exported.settings),
            "text": exported.text,
            "use": exported.use,
            "limits": list(exported.limits),
        }
        click.echo(dumps(record))
    elif out is None:
        click.echo(text, nl=False)
