"""`autospec calibrate`: what drafting and verifying cost on this device."""

from __future__ import annotations

import math
import os
from json import dumps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from autospec.cli.loading import HalfOrFull, assistant_for, backend_option, dtype_option, load_assistant, target_option


@click.command(name="calibrate")
@target_option
@click.option(
    "--drafts",
    default="ngram,suffix",
    show_default=True,
    show_envvar=True,
    help="Names of draft sources, comma-separated; plug-ins go by their names.",
)
@click.option(
    "--assistant",
    default=None,
    show_envvar=True,
    help="A smaller model to draft; `none` for none. The demonstration model has its own.",
)
@dtype_option("bfloat16")
@backend_option
@click.option("--fresh", is_flag=True, show_envvar=True, help="Measure also where costs are on disk, and replace them.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=3.5,
    show_default=True,
    show_envvar=True,
    help="To measure for, about; a slow model or a busy machine wants more. With --vllm 120 unless given.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="Also draw the curves into an HTML file.",
)
@click.option(
    "--vllm",
    default=None,
    metavar="URL|PATH",
    show_envvar=True,
    help="Measure steps of vLLM instead, by tokens verified: of an idle server, or of an engine started for PATH.",
)
@click.option("--store", default=None, show_envvar=True, help="With --vllm: the database that the steps' costs go to.")
@click.option(
    "--most-requests",
    type=click.IntRange(min=2, max=1024),
    default=16,
    show_default=True,
    show_envvar=True,
    help="With --vllm: at once, after 1, 2, 4 and so on.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=16, max=4096),
    default=64,
    show_default=True,
    show_envvar=True,
    help="With --vllm: of each answer.",
)
@click.option(
    "--device",
    default=None,
    show_envvar=True,
    help="With --vllm URL: what the server runs on, as reports call it, as in 'cuda: NVIDIA H200'.",
)
@click.option(
    "--engine",
    default=None,
    metavar="JSON",
    show_envvar=True,
    help="With --vllm PATH: further arguments of vllm.LLM; the engine should be as the one that will serve.",
)
@click.option("--api-key", default=None, show_envvar=True, help="With --vllm URL: that the server asks for.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object instead of the table.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    drafts: str,
    assistant: str | None,
    dtype: HalfOrFull,
    backend: str,
    fresh: bool,
    seconds: float,
    plot: Path | None,
    json: bool,
    vllm: str | None,
    store: str | None,
    most_requests: int,
    tokens: int,
    device: str | None,
    engine: str | None,
    api_key: str | None,
) -> None:
    """Measure what drafting and verifying cost on this device.

    In seconds, once: costs stay on disk for this model, device, number format, software and these draft sources, and
    policy `auto` starts from them. While decoding they are corrected by what blocks really take.

    With --vllm a running server is given a small load of known size, or an engine is started here, and what its steps
    cost goes to --store, for `autospec export --to vllm` and the proposer.
    """
    _check_options(ctx, vllm is not None)
    if plot is not None and plot.suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"{plot.name!r}: a name that ends in .html is needed", param_hint="--plot")
    if plot is not None and not os.access(plot.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{plot.parent}: no folder that can be written to", param_hint="--plot")
    if not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds}: a number of seconds is needed", param_hint="--seconds")
    if vllm is not None:
        from autospec.cli import calibrate_vllm

        if store is None:
            raise click.UsageError("--vllm needs --store: the database that the steps' costs go to")
        is_given = {name: ctx.get_parameter_source(name) is not ParameterSource.DEFAULT for name in _SHARED}
        calibrate_vllm.run(
            vllm,
            store,
            target=target if is_given["target"] else None,
            dtype=dtype if is_given["dtype"] else None,
            seconds=seconds if is_given["seconds"] else calibrate_vllm.SECONDS,
            most_requests=most_requests,
            tokens=tokens,
            device=device,
            engine=engine,
            key=api_key,
            as_json=json,
        )
        return

    from autospec import models
    from autospec.backend_choice import choose_backend
    from autospec.costs.measuring import measure
    from autospec.costs.plot import page
    from autospec.drafts import make_sources

    chosen: list[Any] = [name.strip() for name in drafts.split(",") if name.strip()]
    make_sources(chosen)  # an unknown name is better known before a model is loaded
    click.echo(f"loading {target} ...", err=True)
    model, tokenizer = models.load(target, dtype=dtype)
    if (assistant := assistant_for(target, assistant)) is not None:
        chosen.append(load_assistant(assistant, dtype))
    sources = make_sources(chosen)
    for source in sources.values():
        source.attach(model, tokenizer)
    prepared = choose_backend(backend, model, sources)
    click.echo(f"backend: {prepared}", err=True)
    measured = measure(model, sources, fresh=fresh, budget_seconds=seconds, backend=prepared)
    if plot is not None:
        try:
            plot.write_text(page(measured.table, f"Costs of {target} in {dtype}"), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"cannot write {plot}: {error.strerror or error}") from error
    if json:
        click.echo(
            dumps(
                {
                    "target": target,
                    "dtype": dtype,
                    "backend": prepared.name,
                    "file": str(measured.path) if measured.path else None,
                    "is_from_disk": measured.is_from_disk,
                    "seconds": round(measured.seconds, 3),
                    "failures": dict(measured.table.failures),
                    **measured.table.to_json(),
                }
            )
        )
        return
    click.echo(_as_text(measured.table))
    how = "read" if measured.is_from_disk else "measured"
    where = f"kept in {measured.path}" if measured.path else "not kept on disk: too uncertain, or incomplete"
    click.echo(f"\n{how} in {measured.seconds:.1f} s (measured {measured.table.measured_at}); {where}")


_SHARED = ("target", "dtype", "seconds", "json")
_OF_VLLM = ("store", "most_requests", "tokens", "device", "engine", "api_key")


def _check_options(ctx: click.Context, is_vllm: bool) -> None:
    """An option that would not be looked at is better refused, where it was written down."""
    for name in ctx.params:
        is_meant = name in (*_SHARED, "vllm") or (name in _OF_VLLM) == is_vllm
        if not is_meant and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is not for --vllm" if is_vllm else f"{option} is for --vllm")


def _as_text(table: Any) -> str:
    lines = ["verification, milliseconds by tokens verified (drafts + 1)", *_rows(table.verify)]
    for name, curve in table.drafts.items():
        lines += ["", f"{name}, milliseconds by tokens drafted", *_rows(curve)]
    for name, why in table.failures.items():
        lines += ["", f"{name} could not be timed everywhere: {why}"]
    lines += [
        "",
        f"repeats of a point lie {100 * table.spread:.1f} % apart, 100 % where there are none; ~ not measured",
    ]
    return "\n".join(lines)


def _rows(curve: Any) -> list[str]:
    from autospec.costs.plot import sparkline

    lines = ["context" + "".join(f"{tokens:>9}" for tokens in curve.tokens)]
    for context, row in zip(curve.contexts, curve.seconds, strict=True):
        cells = [
            f"{'~' if (context, tokens) in curve.composed else ''}{1000 * seconds:.4g}"
            for tokens, seconds in zip(curve.tokens, row, strict=True)
        ]
        lines.append(f"{context:>7}" + "".join(f"{cell:>9}" for cell in cells) + f"  {sparkline(row)}")
    return lines
