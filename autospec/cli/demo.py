"""`autospec demo`: the main job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from autospec.cli.loading import assistant_for, backend_option, load_models, prompts_option, target_option
from autospec.cli.report import load_report, print_report


@click.command(name="demo")
@target_option
@click.option(
    "--assistant",
    default=None,
    show_envvar=True,
    help="A smaller model to draft; `none` for retrieval alone. The demonstration model has its own.",
)
@click.option(
    "--policy", default="auto", show_default=True, show_envvar=True, help="auto, off, or fixed:SOURCE:LENGTH."
)
@click.option(
    "--store",
    default="sqlite:///autospec-demo.db",
    show_default=True,
    show_envvar=True,
    help="Telemetry database; runs are added to it.",
)
@click.option(
    "--dtype",
    type=click.Choice(["faster", "float32", "bfloat16", "float16"]),
    default="faster",
    show_default=True,
    show_envvar=True,
    help="Number format of the models; faster: bfloat16, or float32 where a short trial says so.",
)
@backend_option
@prompts_option
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    show_envvar=True,
    help="Prompts of each segment (the demonstration has five); every prompt of your own.",
)
@click.option("--seed", type=int, default=0, show_default=True, show_envvar=True, help="Seed of the sampled answers.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("autospec-demo.html"),
    show_default=True,
    show_envvar=True,
    help="Where the report page is written.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object instead of the table.")
def command(
    target: str,
    assistant: str | None,
    policy: str,
    store: str,
    dtype: Any,
    backend: str,
    prompts: Path | None,
    limit: int,
    seed: int,
    html: Path,
    json: bool,
) -> None:
    """Decode demonstration prompts plainly and under a policy, and print what it brought by segment.

    Each prompt is answered greedily and sampled, each time by the model's own generate (control) and speculatively, in
    alternating order. All numbers are measured now, on this machine.
    """
    from autospec.data import load_prompts
    from autospec.demo import new_run_name, run_demo
    from autospec.models import faster_dtype
    from autospec.policies.base import Unmeasured
    from autospec.policies.registry import make_policy
    from autospec.telemetry.store import Store

    chosen = load_prompts(prompts)
    if prompts is None:
        chosen = _first_of_each_segment(chosen, limit)
    # what cannot be used is better known before minutes of work than after them
    Store(store).close()
    assistant = assistant_for(target, assistant)
    names = ["ngram", *(["assistant"] if assistant is not None else [])]
    make_policy(policy, names, Unmeasured)
    _check_writable(html)
    if dtype == "faster":
        dtype = faster_dtype()
        click.echo(f"number format: {dtype}, the faster one for single tokens here", err=True)
    model, tokenizer, drafts = load_models(target, assistant, dtype)
    run = new_run_name()
    is_whole = True
    try:
        run_demo(
            model,
            tokenizer,
            chosen,
            store=store,
            run=run,
            drafts=drafts,
            policy=policy,
            backend=backend,
            seed=seed,
            show_progress=sys.stderr.isatty() or not json,
            say=lambda text: click.echo(text, err=True),
        )
    except KeyboardInterrupt:
        is_whole = False
        click.echo("\ninterrupted: this is what was measured until now", err=True)
    print_report(load_report(store, run, ("segment",)), "json" if json else "text", html)
    notes = [
        f"database: {store} (run {run})",
        f"report:   {html}",
        f"again:    {sys.argv[0]} report --store {store} --run {run}",
    ]
    for note in notes:
        click.echo(note, err=json)
    if not is_whole:
        sys.exit(130)


def _first_of_each_segment(prompts: list[Any], limit: int) -> list[Any]:
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.segment] = seen.get(prompt.segment, 0) + 1
        if seen[prompt.segment] <= limit:
            chosen.append(prompt)
    return chosen


def _check_writable(path: Path) -> None:
    from autospec.errors import AutospecError

    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise AutospecError(f"cannot write {path}: {error.strerror}") from error
