"""From recorded traffic to a policy's file: score, search, choose, write, and look at it live."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from autospec.costs import CostModel
from autospec.costs.fingerprint import digest
from autospec.costs.measuring import measure
from autospec.deployment import device_name
from autospec.drafts import make_sources
from autospec.drafts.base import DraftSource
from autospec.errors import ConfigurationError
from autospec.memory import held_bytes
from autospec.policies.base import Policy
from autospec.policies.registry import make_policy
from autospec.scores import ScoredRequest
from autospec.scores.folder import ScoreFolder
from autospec.scores.luck import Luck
from autospec.scores.scorer import Scorer
from autospec.traffic import TrafficReader
from autospec.traffic.request import TrafficRequest
from autospec.tune.arms import teach
from autospec.tune.choice import Choice, choose, shipped
from autospec.tune.confirm import Confirmed, confirm
from autospec.tune.curves import Curve, best_fixed, curves
from autospec.tune.evaluation import Setting, walk_policy
from autospec.tune.page import page
from autospec.tune.policy_file import made_by, write_page, write_policy
from autospec.tune.scoring import check_costs, host_seconds, made_with, score_traffic
from autospec.tune.search import Search, Tried
from autospec.tune.split import split
from autospec.tune.variants import draft_table, make_variants
from autospec.tune.workers import Job, helping, shared_storage
from autospec.tuned_files import drafts_with


@dataclass(frozen=True, slots=True)
class Options:
    """How a policy is searched, judged and written."""

    out: Path  # of the policy, ends in `.toml`
    scores: Path | None = None  # folder, gone on with where a run was cut short; None: one in that of the traffic
    page_file: Path | None = None  # a page with curves, too
    sampling: str = "paired"  # how drawn drafts are to be verified
    vary: bool = True  # retrieval sources with other settings, too
    imported: bool = False  # imported answers are taken for the target's own
    trials: int = 60
    budget: float | None = None  # seconds of the search at most
    storage: str | None = None  # of Optuna's, that several machines may share; None: in memory
    study: str = "autospec"
    jobs: int = 1  # processes of this machine that search
    seed: int = 0
    split_by: str = "time"  # what is held out: the last requests, or `conversation`s
    held_out: float = 0.3  # share of the requests
    least_requests: int = 8  # to choose by, for a policy of a segment's own
    memory_limit: int | None = None  # bytes that the draft sources of all segments may take together


@dataclass(frozen=True, slots=True)
class Scoring:
    """What became of the traffic."""

    requests: list[TrafficRequest]  # that can be walked
    left_out: Counter[str]  # others, by why
    seconds: float  # that scoring took
    block_seconds: float | None = None  # of a block besides drafting and verifying

    @property
    def taken(self) -> set[str]:
        return {each.request_id for each in self.requests}


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found."""

    choice: Choice
    tried: list[Tried]
    drawn: dict[str, list[Curve]]
    notes: list[str]
    scoring: Scoring
    search_seconds: float
    setting: Setting
    sources: dict[str, DraftSource]
    parts: tuple[list[ScoredRequest], list[ScoredRequest]] = field(repr=False)  # to choose by, held out
    out: Path

    def to_json(self, confirmed: Sequence[Confirmed] = ()) -> dict[str, Any]:
        """As plain values."""
        choice = self.choice
        return {
            "policy": str(self.out),
            "tried": len(self.tried),
            "scoring_seconds": round(self.scoring.seconds, 1),
            "search_seconds": round(self.search_seconds, 1),
            "left_out": dict(self.scoring.left_out),
            "default": shipped(choice.default),
            "train": asdict(choice.train),
            "held_out": asdict(choice.held_out),
            "segments": [{**asdict(each), "part": shipped(each.part)} for each in choice.segments],
            "confirmed": [asdict(each) for each in confirmed],
        }


def tune(
    model: Any,
    tokenizer: Any,
    drafts: Sequence[Any],
    reader: TrafficReader,
    options: Options,
    say: Callable[[str], None],
) -> Found:
    """Find the policy that would have been fastest, and write its file.

    Args:
        model, tokenizer: the target, that answered.
        drafts: draft sources, as `wrap` takes them.
        reader: of the traffic.
        options: how.
        say: told in one line what a person should know meanwhile.

    Raises:
        AutospecError: nothing can be tuned, or something cannot be written.
        KeyboardInterrupt: after the policy that was being walked; scores are kept.
    """
    if not (sources := make_sources(drafts)):
        raise ConfigurationError("nothing to tune: no draft source")
    if options.vary:
        sources |= make_variants(sources)
    for source in sources.values():
        source.attach(model, tokenizer)
    described = made_with(model, sources, options.sampling, reader.manifest)
    folder = ScoreFolder(options.scores or reader.folder / "scores" / digest(described), described)
    scoring = _score(reader, Scorer(model, sources, sampling=options.sampling), folder, options.imported)
    for why, count in scoring.left_out.most_common():
        say(f"{count} requests left out: {why}")
    requests = [each for each in folder.read() if each.request_id in scoring.taken]  # it may know others from earlier
    if folder.damage:
        say(folder.damage)
    train, rest = split(requests, by=options.split_by, held_out=options.held_out)
    table = measure(model, sources).table
    setting = Setting(
        CostModel(table),
        Luck(options.seed),
        scoring.block_seconds or 0.0,
        {name: held_bytes([source], shared=[model, tokenizer]) for name, source in sources.items()},
        options.memory_limit,
    )
    device = device_name(model.device)
    with shared_storage(options.storage, options.jobs) as place:
        job = Job(
            scores=folder.path,
            request_ids=[each.request_id for each in train],
            offer=setting.offer(device),
            luck=options.seed,
            memory=setting.memory,
            memory_limit=setting.memory_limit,
            sources=list(sources),
            block_lengths=table.block_lengths,
            storage=place,
            name=options.study,
            seed=options.seed,
            origin=digest(described),
            trials=options.trials,
            seconds=options.budget,
        )
        search = job.search(train)
        started = time.perf_counter()
        with helping(job, options.jobs - 1):
            _search(search, options, say)
        search_seconds = time.perf_counter() - started
        tried, trials_finished = search.tried(), search.num_finished
        search.close()
    setting = search.setting
    choice = choose(tried, train, rest, setting, least_requests=options.least_requests)
    drawn = curves(rest, setting, table.block_lengths)
    made = made_by(
        choice,
        model,
        sources,
        requests=requests,
        best_fixed=best_fixed(curves(train, setting, table.block_lengths), setting),
        settings={
            "split": options.split_by,
            "held_out": options.held_out,
            "sampling": options.sampling,
            "seed": options.seed,
            "trials": len(tried),
            "tokenizer": reader.manifest.fingerprint,
        },
    )
    if search.device != device:  # what the seconds are of
        made["device"] = search.device
        del made["threads"]
    write_policy(options.out, choice.contents(made))
    notes = [
        f"scoring took {scoring.seconds:.0f} s, the search {search_seconds:.0f} s ({trials_finished} trials, "
        f"{len(tried)} different policies to their end); {len(requests)} requests walked, "
        f"{sum(scoring.left_out.values())} left out",
        f"seconds are those of the cost model for {search.device}"
        + ("" if search.device == device else f", where the study was begun, and not for {device}")
        + ("" if scoring.block_seconds is not None else "; what a block takes besides is not known from this traffic"),
        check_costs(scoring.requests, setting.costs, scoring.block_seconds).note,
        f"written to {options.out}: "
        f"autospec.wrap(model, tokenizer=tokenizer, {_passed(choice)}policy='tuned:{options.out}')",
    ]
    if options.page_file is not None:
        write_page(options.page_file, page(choice, tried, drawn, notes, made))
        notes.append(f"the same with curves: {options.page_file}")
    return Found(choice, tried, drawn, notes, scoring, search_seconds, setting, sources, (train, rest), options.out)


def live(
    model: Any,
    tokenizer: Any,
    drafts: Sequence[Any],
    reader: TrafficReader,
    options: Options,
    found: Found,
    most: int,
) -> list[Confirmed]:
    """Held-out prompts live, by the policy and by sources that know the training part and nothing later.

    Args:
        model, tokenizer, drafts, reader, options: as given to `tune`.
        found: what it found.
        most: prompts.

    Raises:
        AutospecError: it cannot be compared.
    """
    named = f"tuned:{found.out}"

    def build() -> Policy:
        return make_policy(named, found.sources, lambda: found.setting.costs)

    train, rest = found.parts
    walked = {each.request.request_id: each for each in walk_policy(build(), [*train, *rest], found.setting)}
    predicted = {request.request_id: walked[request.request_id] for request in rest}
    policy = build()
    for _ in walk_policy(policy, train, found.setting):
        pass
    early = {request.request_id for request in train}
    recorded = list(reader)
    past = [request for request in recorded if request.request_id in early]
    with tqdm(total=min(most, len(rest)), desc="live", unit="request", disable=not sys.stderr.isatty()) as progress:
        return confirm(
            model,
            tokenizer,
            teach(model, drafts_with(named, drafts), past, sampling=options.sampling),
            policy,
            [request for request in recorded if request.request_id in predicted],
            predicted,
            sampling=options.sampling,
            max_requests=most,
            progress=lambda _: progress.update(),
        )


def _score(reader: TrafficReader, scorer: Scorer, folder: ScoreFolder, with_imported: bool) -> Scoring:
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
    return Scoring(taken, left_out, time.perf_counter() - started, host_seconds(taken))


def _search(search: Search, options: Options, say: Callable[[str], None]) -> None:
    with (
        tqdm(total=options.trials, desc="search", unit="policy", disable=not sys.stderr.isatty()) as progress,
        _interrupted_between() as interrupts,
    ):
        best = None
        for tried in search.run(trials=options.trials, seconds=options.budget):
            progress.update()
            if interrupts:
                break
            if tried is not None and (best is None or tried.share < best):
                best = tried.share
                progress.set_postfix_str(f"{1 / best:.3f}x")
    if interrupts:
        say("stopped: scores are kept, and with --storage what was tried; the same command goes on")
        raise KeyboardInterrupt


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


def _passed(choice: Choice) -> str:
    """What `wrap` is to be given of the sources that a policy uses: those that the file cannot have made."""
    others = sorted(choice.sources - set(draft_table(set(choice.sources))))
    if not others:
        return ""
    return f"drafts=[{', '.join('Assistant(...)' if name == 'assistant' else name for name in others)}], "
