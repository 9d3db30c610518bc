"""`autospec tune`: the policy that would have been fastest on recorded traffic."""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autospec.cli.loading import HalfOrFull, assistant_for, dtype_option, load_assistant

if TYPE_CHECKING:
    from autospec.scores import ScoredRequest
    from autospec.tune.choice import Choice
    from autospec.tune.search import Tried


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
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{out.parent}: no folder that can be written to", param_hint="--out")

    from autospec import models
    from autospec.costs import CostModel
    from autospec.costs.fingerprint import digest
    from autospec.costs.measuring import measure
    from autospec.deployment import device_name, model_name
    from autospec.drafts import make_sources
    from autospec.errors import ConfigurationError
    from autospec.scores.folder import ScoreFolder
    from autospec.scores.luck import Luck
    from autospec.scores.scorer import Scorer
    from autospec.traffic import TrafficReader
    from autospec.tune.choice import can_be_named, choose
    from autospec.tune.evaluation import Setting
    from autospec.tune.policy_file import write_policy
    from autospec.tune.report import lines
    from autospec.tune.scoring import made_with
    from autospec.tune.search import Search
    from autospec.tune.split import split

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
    sources = make_sources(chosen)
    for source in sources.values():
        source.attach(model, tokenizer)
    scorer = Scorer(model, sources, sampling=sampling)
    described = made_with(model, sources, sampling, reader.manifest)
    folder = ScoreFolder(scores or traffic / "scores" / digest(described), described)
    taken, left_out, per_block, seconds = _score(reader, scorer, folder, imported)
    requests = [each for each in folder.read() if each.request_id in taken]  # it may know others from earlier
    for why, count in left_out.most_common():
        click.echo(f"{count} requests left out: {why}", err=True)
    train, rest = split(requests, by=split_by, held_out=held_out)
    table = measure(model, sources).table
    costs = CostModel(table)
    setting = Setting(costs, Luck(seed), per_block or 0.0)
    search = Search(
        train,
        setting,
        sources=list(sources),
        block_lengths=costs.block_lengths,
        storage=storage,
        name=study,
        seed=seed,
    )
    _search(search, trials, budget)
    tried = search.tried()
    choice = choose(tried, train, rest, setting, least_requests=least_requests)
    made = {
        "by": "autospec tune",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "traffic": {"requests": len(requests), "digest": digest_of(requests), "split": split_by, "held_out": held_out},
        "target": folder.made_with["target"],
        "tokenizer": reader.manifest.fingerprint,
        "drafts": sorted(sources),
        "sampling": sampling,
        "device": device_name(model.device),
        "seed": seed,
        "trials": len(tried),
        "speed_up": {
            each.segment: [round(value, 4) for value in (each.held_out.ratio, each.held_out.low, each.held_out.high)]
            for each in choice.segments
            if each.held_out is not None and can_be_named(each.segment)
        },
    }
    write_policy(out, choice.contents(made))
    notes = [
        f"scoring took {seconds:.0f} s; {len(requests)} requests walked, {sum(left_out.values())} left out",
        f"seconds are those of the cost model for {device_name(model.device)}"
        + ("" if per_block is not None else "; what a block takes besides is not known from this traffic"),
        f"written to {out}: autospec.wrap(..., policy='tuned:{out}')",
    ]
    if json:
        click.echo(dumps(_as_json(choice, tried, left_out, out, seconds)))
        return
    for line in lines(choice, tried, notes):
        click.echo(line)


def _score(
    reader: Any, scorer: Any, folder: Any, with_imported: bool
) -> tuple[set[str], Counter[str], float | None, float]:
    """Ids of what is scored, why others were left out, seconds of a block besides, and seconds of scoring."""
    import time

    from tqdm import tqdm

    from autospec.tune.scoring import host_seconds, score_traffic

    started = time.perf_counter()
    total = sum(1 for _ in reader)
    left_out: Counter[str] = Counter()
    taken = []
    progress = tqdm(total=total, desc="scoring", unit="request", disable=not sys.stderr.isatty())
    with progress:
        for request, why in score_traffic(reader, scorer, folder, with_imported=with_imported):
            progress.update()
            if why is None:
                taken.append(request)
            else:
                left_out[why] += 1
    return {each.request_id for each in taken}, left_out, host_seconds(taken), time.perf_counter() - started


def _search(search: Any, trials: int, budget: float | None) -> None:
    from tqdm import tqdm

    with tqdm(total=trials, desc="search", unit="policy", disable=not sys.stderr.isatty()) as progress:
        best = None
        for tried in search.run(trials=trials, seconds=budget):
            progress.update()
            if tried is not None and (best is None or tried.share < best):
                best = tried.share
                progress.set_postfix_str(f"{1 / best:.3f}x")


def digest_of(requests: list[ScoredRequest]) -> str:
    """Which requests these are, 16 hexadecimal digits."""
    import hashlib

    text = "\n".join(f"{each.request_id} {each.output_tokens}" for each in requests)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _as_json(
    choice: Choice, tried: list[Tried], left_out: Counter[str], out: Path, scoring_seconds: float
) -> dict[str, Any]:
    from dataclasses import asdict

    from autospec.tune.choice import shipped

    return {
        "policy": str(out),
        "tried": len(tried),
        "scoring_seconds": round(scoring_seconds, 1),
        "left_out": dict(left_out),
        "default": shipped(choice.default),
        "train": asdict(choice.train),
        "held_out": asdict(choice.held_out),
        "segments": [{**asdict(each), "part": shipped(each.part)} for each in choice.segments],
    }
