"""`autospec tune`: the policy that would have been fastest on recorded traffic."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autospec.cli.loading import HalfOrFull, assistant_for, dtype_option, load_assistant

if TYPE_CHECKING:
    from autospec.tune.confirm import Confirmed


@click.command(name="tune")
@click.argument("traffic", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--target",
    "--model",
    "target",
    default="smollm2-135m",
    show_default=True,
    show_envvar=True,
    help="The model that answered: folder or hub id.",
)
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
@click.option(
    "--sampling",
    type=click.Choice(["paired", "maximal"]),
    default="paired",
    show_default=True,
    show_envvar=True,
    help="How drawn drafts are to be verified, as in wrap(sampling=...).",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("policy.toml"),
    show_default=True,
    show_envvar=True,
    help="File for the policy.",
)
@click.option(
    "--scores",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="Folder for the scores, gone on with where a run was cut short; one in TRAFFIC/scores if left out.",
)
@click.option(
    "--trials", type=click.IntRange(min=1), default=60, show_default=True, show_envvar=True, help="Policies to try."
)
@click.option(
    "--budget", type=click.FloatRange(min=1), default=None, show_envvar=True, help="Seconds of the search at most."
)
@click.option(
    "--storage",
    default=None,
    show_envvar=True,
    help="URL of Optuna's database, which several machines may share; in memory if left out.",
)
@click.option("--study", default="autospec", show_default=True, show_envvar=True, help="Name of the study there.")
@click.option("--seed", type=int, default=0, show_default=True, show_envvar=True, help="Of search and luck.")
@click.option(
    "--split",
    "split_by",
    type=click.Choice(["time", "conversation"]),
    default="time",
    show_default=True,
    envvar="AUTOSPEC_TUNE_SPLIT",
    show_envvar=True,
    help="What is held out: the last requests, or a share of the conversations.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=0.3,
    show_default=True,
    show_envvar=True,
    help="Share of the requests that the policy is judged by, and not chosen by.",
)
@click.option(
    "--least-requests",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    show_envvar=True,
    help="To choose by, for a policy of a segment's own.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1, max=256),
    default=1,
    show_default=True,
    show_envvar=True,
    help="Processes of this machine that search.",
)
@click.option(
    "--vary/--no-vary",
    default=True,
    show_default=True,
    show_envvar=True,
    help="Try ngram and suffix with other settings, too.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    show_envvar=True,
    help="MiB that the draft sources of all segments may take together.",
)
@click.option(
    "--report",
    "page_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="Write a page with curves to this file.",
)
@click.option(
    "--confirm",
    type=click.IntRange(min=1),
    default=None,
    show_envvar=True,
    help="Decode so many held-out prompts, plainly and by the policy, and show predicted beside measured.",
)
@click.option("--imported", is_flag=True, show_envvar=True, help="Take imported answers for the target's own.")
@click.option("--rescore", is_flag=True, show_envvar=True, help="Also where another target is named in the traffic.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def command(
    traffic: Path,
    target: str,
    drafts: str,
    assistant: str | None,
    dtype: HalfOrFull,
    sampling: str,
    out: Path,
    scores: Path | None,
    trials: int,
    budget: float | None,
    storage: str | None,
    study: str,
    seed: int,
    split_by: str,
    held_out: float,
    least_requests: int,
    jobs: int,
    vary: bool,
    memory: float | None,
    page_file: Path | None,
    confirm: int | None,
    imported: bool,
    rescore: bool,
    json: bool,
) -> None:
    """Find the policy that would have been fastest on recorded TRAFFIC.

    Every answer is scored once: what each draft source would have done along it. Policies are then walked along the
    scores, without a forward, and judged by requests that had no part in the search. A segment in which nothing is
    surely faster than plain decoding gets plain decoding.
    """
    if out.suffix.lower() != ".toml":
        raise click.BadParameter(f"{out.name!r}: a name that ends in .toml is needed", param_hint="--out")
    if confirm is not None and split_by != "time":
        raise click.BadParameter("it needs --split time: sources know what came before", param_hint="--confirm")
    for file, hint in ((out, "--out"), (page_file, "--report")):
        if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
            raise click.BadParameter(f"{file.parent}: no folder that can be written to", param_hint=hint)

    from autospec import models
    from autospec.deployment import model_name
    from autospec.drafts import make_sources
    from autospec.errors import AutospecError, ConfigurationError
    from autospec.traffic import TrafficReader
    from autospec.tune.confirm import confirm_lines
    from autospec.tune.report import lines
    from autospec.tune.run import Options, live, tune

    chosen: list[Any] = [name.strip() for name in drafts.split(",") if name.strip()]
    make_sources(chosen)  # an unknown name is better known before a model is loaded
    TrafficReader(traffic)
    click.echo(f"loading {target} ...", err=True)
    model, tokenizer = models.load(target, dtype=dtype)
    reader = TrafficReader(traffic, tokenizer)
    recorded = reader.manifest.target
    if recorded is not None and recorded != model_name(model) and not rescore:
        raise ConfigurationError(
            f"{traffic} holds answers of {recorded}, not of {model_name(model)}: give that target, or --rescore"
        )
    if (assistant := assistant_for(target, assistant)) is not None:
        chosen.append(load_assistant(assistant, dtype))
    if not make_sources(chosen):
        raise click.UsageError("nothing to tune: give --drafts or --assistant")
    options = Options(
        out=out,
        scores=scores,
        page_file=page_file,
        sampling=sampling,
        vary=vary,
        imported=imported,
        trials=trials,
        budget=budget,
        storage=storage,
        study=study,
        jobs=jobs,
        seed=seed,
        split_by=split_by,
        held_out=held_out,
        least_requests=least_requests,
        memory_limit=None if memory is None else round(memory * 2**20),
    )
    found = tune(model, tokenizer, chosen, reader, options, lambda text: click.echo(text, err=True))
    if not json:
        for line in lines(found.choice, found.tried, found.notes, found.drawn):
            click.echo(line)
    confirmed: list[Confirmed] = []
    failure: AutospecError | None = None
    if confirm is not None:
        try:
            confirmed = live(model, tokenizer, chosen, reader, options, found, confirm)
        except AutospecError as error:  # what was found is said first
            failure = error
    if json:
        click.echo(dumps(found.to_json(confirmed)))
    elif confirmed:
        click.echo("")
        for line in confirm_lines(confirmed):
            click.echo(line)
    if failure is not None:
        raise failure
