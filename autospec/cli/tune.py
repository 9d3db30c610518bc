"""`autospec tune`: the policy that would have been fastest on recorded traffic."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autospec.cli.loading import HalfOrFull, assistant_for, dtype_option, load_assistant

if TYPE_CHECKING:
    from autospec.policies.base import Policy
    from autospec.scores import ScoredRequest
    from autospec.tune.choice import Choice
    from autospec.tune.confirm import Confirmed
    from autospec.tune.evaluation import Setting
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
    from autospec.costs import CostModel
    from autospec.costs.fingerprint import digest
    from autospec.costs.measuring import measure
    from autospec.deployment import device_name, model_name
    from autospec.drafts import make_sources
    from autospec.errors import AutospecError, ConfigurationError
    from autospec.memory import held_bytes
    from autospec.policies.registry import make_policy
    from autospec.scores.folder import ScoreFolder
    from autospec.scores.luck import Luck
    from autospec.scores.scorer import Scorer
    from autospec.traffic import TrafficReader
    from autospec.tune.choice import choose
    from autospec.tune.curves import best_fixed, curves
    from autospec.tune.evaluation import Setting
    from autospec.tune.page import page
    from autospec.tune.policy_file import made_by, write_page, write_policy
    from autospec.tune.report import lines
    from autospec.tune.scoring import check_costs, made_with
    from autospec.tune.split import split
    from autospec.tune.variants import make_variants
    from autospec.tune.workers import Job, helping, shared_storage
    from autospec.tuned_files import drafts_with

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
    if not sources:
        raise click.UsageError("nothing to tune: give --drafts or --assistant")
    if vary:
        sources |= make_variants(sources)
    for source in sources.values():
        source.attach(model, tokenizer)
    scorer = Scorer(model, sources, sampling=sampling)
    described = made_with(model, sources, sampling, reader.manifest)
    folder = ScoreFolder(scores or traffic / "scores" / digest(described), described)
    scoring = _score(reader, scorer, folder, imported)
    requests = [each for each in folder.read() if each.request_id in scoring.taken]  # it may know others from earlier
    if folder.damage:
        click.echo(folder.damage, err=True)
    train, rest = split(requests, by=split_by, held_out=held_out)
    table = measure(model, sources).table
    setting = Setting(
        CostModel(table),
        Luck(seed),
        scoring.per_block or 0.0,
        {name: held_bytes([source], shared=[model, tokenizer]) for name, source in sources.items()},
        None if memory is None else round(memory * 2**20),
    )
    device = device_name(model.device)
    with shared_storage(storage, jobs) as place:
        job = Job(
            scores=folder.path,
            request_ids=[each.request_id for each in train],
            offer=setting.offer(device),
            luck=seed,
            memory=setting.memory,
            memory_limit=setting.memory_limit,
            sources=list(sources),
            block_lengths=table.block_lengths,
            storage=place,
            name=study,
            seed=seed,
            origin=digest(described),
            trials=trials,
            seconds=budget,
        )
        search = job.search(train)
        started = time.perf_counter()
        with helping(job, jobs - 1):
            _search(search, trials, budget)
        search_seconds = time.perf_counter() - started
        tried, trials_finished = search.tried(), search.num_finished
        search.close()
    setting = search.setting
    choice = choose(tried, train, rest, setting, least_requests=least_requests)
    drawn = curves(rest, setting, table.block_lengths)
    made = made_by(
        choice,
        model,
        sources,
        requests=requests,
        best_fixed=best_fixed(curves(train, setting, table.block_lengths), setting),
        settings={
            "split": split_by,
            "held_out": held_out,
            "sampling": sampling,
            "seed": seed,
            "trials": len(tried),
            "tokenizer": reader.manifest.fingerprint,
        },
    )
    if search.device != device:  # what the seconds are of
        made["device"] = search.device
        del made["threads"]
    write_policy(out, choice.contents(made))
    notes = [
        f"scoring took {scoring.seconds:.0f} s, the search {search_seconds:.0f} s ({trials_finished} trials, "
        f"{len(tried)} different policies to their end); {len(requests)} requests walked, "
        f"{sum(scoring.left_out.values())} left out",
        f"seconds are those of the cost model for {search.device}"
        + ("" if search.device == device else f", where the study was begun, and not for {device}")
        + ("" if scoring.per_block is not None else "; what a block takes besides is not known from this traffic"),
        check_costs(scoring.requests, setting.costs, scoring.per_block).note,
        f"written to {out}: autospec.wrap(model, tokenizer=tokenizer, {_passed(choice)}policy='tuned:{out}')",
    ]
    if page_file is not None:
        write_page(page_file, page(choice, tried, drawn, notes, made))
        notes.append(f"the same with curves: {page_file}")
    if not json:
        for line in lines(choice, tried, notes, drawn):
            click.echo(line)
    confirmed: list[Confirmed] = []
    failure: AutospecError | None = None
    if confirm is not None:
        named = f"tuned:{out}"
        try:
            confirmed = _confirm(
                model,
                tokenizer,
                drafts_with(named, chosen),
                reader,
                (train, rest),
                lambda: make_policy(named, sources, lambda: setting.costs),
                setting,
                sampling,
                confirm,
            )
        except AutospecError as error:  # what was found is said first
            failure = error
    if json:
        click.echo(dumps(_as_json(choice, tried, scoring, out, search_seconds, confirmed)))
    elif confirmed:
        from autospec.tune.confirm import confirm_lines

        click.echo("")
        for line in confirm_lines(confirmed):
            click.echo(line)
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What became of the traffic."""

    requests: list[Any]  # as recorded, that can be walked
    left_out: Counter[str]  # others, by why
    per_block: float | None  # seconds besides drafting and verifying
    seconds: float  # that scoring took

    @property
    def taken(self) -> set[str]:
        return {each.request_id for each in self.requests}


def _passed(choice: Choice) -> str:
    """What `wrap` is to be given of the sources that a policy uses: those that the file cannot have made."""
    from autospec.tune.variants import draft_table

    others = sorted(choice.sources - set(draft_table(set(choice.sources))))
    return (
        f"drafts=[{', '.join('Assistant(...)' if name == 'assistant' else name for name in others)}], "
        if others
        else ""
    )


def _score(reader: Any, scorer: Any, folder: Any, with_imported: bool) -> _Scoring:
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
    for why, count in left_out.most_common():
        click.echo(f"{count} requests left out: {why}", err=True)
    return _Scoring(taken, left_out, host_seconds(taken), time.perf_counter() - started)


def _search(search: Any, trials: int, budget: float | None) -> None:
    from tqdm import tqdm

    with (
        tqdm(total=trials, desc="search", unit="policy", disable=not sys.stderr.isatty()) as progress,
        _interrupted_between() as interrupts,
    ):
        best = None
        for tried in search.run(trials=trials, seconds=budget):
            progress.update()
            if interrupts:
                break
            if tried is not None and (best is None or tried.share < best):
                best = tried.share
                progress.set_postfix_str(f"{1 / best:.3f}x")
    if interrupts:
        click.echo("stopped: scores are kept, and with --storage what was tried; the same command goes on", err=True)
        raise click.Abort


@contextmanager
def _interrupted_between() -> Iterator[list[int]]:
    """Ctrl-C is noted, and the policy that is being walked ends first: within a database's own code it may get lost.

    The second one ends the walk, too.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if len(noted) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _confirm(
    model: Any,
    tokenizer: Any,
    drafts: list[Any],
    reader: Any,
    parts: tuple[list[ScoredRequest], list[ScoredRequest]],
    build: Callable[[], Policy],
    setting: Setting,
    sampling: str,
    most: int,
) -> list[Confirmed]:
    """Held-out prompts live, by a policy and by sources that know the training part and nothing later."""
    from tqdm import tqdm

    from autospec.tune.arms import teach
    from autospec.tune.confirm import confirm
    from autospec.tune.evaluation import walk_policy

    train, rest = parts
    walked = {each.request.request_id: each for each in walk_policy(build(), [*train, *rest], setting)}
    predicted = {request.request_id: walked[request.request_id] for request in rest}
    policy = build()
    for _ in walk_policy(policy, train, setting):
        pass
    early = {request.request_id for request in train}
    recorded = list(reader)
    past = [request for request in recorded if request.request_id in early]
    with tqdm(total=min(most, len(rest)), desc="live", unit="request", disable=not sys.stderr.isatty()) as progress:
        return confirm(
            model,
            tokenizer,
            teach(model, drafts, past, sampling=sampling),
            policy,
            [request for request in recorded if request.request_id in predicted],
            predicted,
            sampling=sampling,
            max_requests=most,
            progress=lambda _: progress.update(),
        )


def _as_json(
    choice: Choice, tried: list[Tried], scoring: _Scoring, out: Path, search_seconds: float, confirmed: Sequence[Any]
) -> dict[str, Any]:
    from dataclasses import asdict

    from autospec.tune.choice import shipped

    return {
        "policy": str(out),
        "tried": len(tried),
        "scoring_seconds": round(scoring.seconds, 1),
        "search_seconds": round(search_seconds, 1),
        "left_out": dict(scoring.left_out),
        "default": shipped(choice.default),
        "train": asdict(choice.train),
        "held_out": asdict(choice.held_out),
        "segments": [{**asdict(each), "part": shipped(each.part)} for each in choice.segments],
        "confirmed": [asdict(each) for each in confirmed],
    }
