"""The search: an Optuna study over candidates, each walked along the training requests."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autospec.errors import AutospecError
from autospec.scores.scored import ScoredRequest
from autospec.tune.candidates import Part, Space, heuristics, sources_in, suggest
from autospec.tune.evaluation import Setting, seconds_by_segment, walks
from autospec.tune.study import close_study, open_study
from autospec.tune.variants import families

if TYPE_CHECKING:
    import optuna

RUNGS = 4
"""Parts of the requests after each of which a trial may be given up."""
NOT_SLOWER = 1e-9


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was walked to the end."""

    part: Part
    seconds: Mapping[str, tuple[float, float]]  # by segment, and those of plain decoding

    @property
    def share(self) -> float:
        """Seconds over those of plain decoding; the less, the better."""
        return sum(on for on, _ in self.seconds.values()) / sum(off for _, off in self.seconds.values())

    @property
    def worst(self) -> float:
        """The same of the slowest segment."""
        return max(on / off for on, off in self.seconds.values())


class Search:
    """One study, which several processes and machines may work on.

    Args:
        requests: to choose by, in order of arrival.
        setting: costs, luck and memory.
        sources, block_lengths: of candidates.
        storage: URL of Optuna's database, or `journal:FILE`; None: in memory.
        name: of the study.
        seed: of the sampler, together with each trial's number and the worker.
        worker: which of several.
        origin: a digest of what the scores were made with; results of others are no results of these.
        device: on which the costs were measured. Where it is given, all who work on the study go by the costs and the
            host's seconds of the one who began it.

    Raises:
        ConfigurationError: the study is of other requests, sources, block lengths or luck.
        AutospecError: the storage cannot be used.
    """

    def __init__(
        self,
        requests: Sequence[ScoredRequest],
        setting: Setting,
        *,
        sources: Sequence[str],
        block_lengths: Sequence[int],
        storage: str | None = None,
        name: str = "autospec",
        seed: int = 0,
        worker: int = 0,
        origin: str = "",
        device: str | None = None,
    ) -> None:
        import optuna  # heavy

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._requests = list(requests)
        models = frozenset(name for request in self._requests for name in request.drafts)
        self._space = Space(families(dict.fromkeys(sources)), tuple(block_lengths), models)
        content = self._content(setting, origin)
        offered = None if device is None else setting.offer(device)
        self.study, agreed = open_study(storage, name, content, offered, list(heuristics(self._space)))
        self.setting = setting if agreed is None else setting.going_by(agreed)
        self.device = device if agreed is None else str(agreed["device"])
        self._seed, self._worker = seed, worker
        self.study.pruner = optuna.pruners.MedianPruner(n_startup_trials=8)

    def run(
        self, *, trials: int | None = None, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[Tried | None]:
        """Try candidates until so many are finished in the study, or so many seconds are over.

        Yields:
            each that was walked to the end; None for one that was given up.
        """
        from sqlalchemy.exc import SQLAlchemyError

        started = clock()
        lost = (SQLAlchemyError, self._optuna.exceptions.StorageInternalError)
        try:
            while trials is None or self.num_finished < trials:
                if seconds is not None and clock() - started >= seconds:
                    return
                yield self._try()
        except lost as error:
            why = str(error).partition("\n")[0]
            raise AutospecError(
                f"the storage of study {self.study.study_name!r} went away: {why}; what is finished is in it, "
                "the same command goes on"
            ) from error

    def close(self) -> None:
        """Give the connections to a database back. What was found stays there."""
        close_study(self.study)

    def tried(self) -> list[Tried]:
        """All candidates that were walked to the end, by any worker, the best first."""
        complete = self.study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        found = {json.dumps(each.user_attrs["part"], sort_keys=True): each for each in complete}
        made = [Tried(each.user_attrs["part"], _pairs(each.user_attrs["seconds"])) for each in found.values()]
        return sorted(made, key=lambda each: each.share)

    def _content(self, setting: Setting, origin: str) -> str:
        """Results of other requests, scores or luck are no results of these."""
        scored = [(each.request_id, each.segment, each.output_tokens) for each in self._requests]
        limit = [setting.memory_limit, sorted(setting.memory) if setting.memory_limit else None]
        text = json.dumps([scored, self._space.sources, self._space.block_lengths, setting.luck.seed, origin, limit])
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    @property
    def num_finished(self) -> int:
        """Trials, of all workers: those given up early and those of policies tried before among them."""
        return len(self.study.get_trials(deepcopy=False, states=_finished(self._optuna)))

    def _try(self) -> Tried | None:
        trial = self.study.ask()
        self.study.sampler = self._optuna.samplers.TPESampler(
            seed=derived_seed(self._seed, trial.number, self._worker)  # two that begin together choose differently
        )
        try:
            part = suggest(trial, self._space)
            trial.set_user_attr("part", dict(part))
            trial.set_user_attr("host", os.uname().nodename)
            known = self._known(part)
            if known is None:
                found = self._walk(trial, part)
                if found is None:
                    self.study.tell(trial, state=self._optuna.trial.TrialState.PRUNED, skip_if_finished=True)
                    return None
                known = Tried(part, found)
            trial.set_user_attr("seconds", {name: list(pair) for name, pair in known.seconds.items()})
            trial.set_constraint("worst segment", known.worst - 1.0 - NOT_SLOWER)
            trial.set_constraint("memory", self.setting.excess(sources_in(part)))
            self.study.tell(trial, known.share, skip_if_finished=True)
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return None  # SQLite may give one waiting trial to two processes, and the other one was faster
        except BaseException as error:
            try:
                self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL, skip_if_finished=True)
            except Exception as second:  # noqa: BLE001  # the first one says more
                error.add_note(f"and the trial could not be ended: {second}")
            raise
        return known

    def _known(self, part: Part) -> Tried | None:
        """The same candidate's result, if it was tried before: walks are deterministic."""
        wanted = json.dumps(part, sort_keys=True)
        return next((each for each in self.tried() if json.dumps(each.part, sort_keys=True) == wanted), None)

    def _walk(self, trial: optuna.Trial, part: Part) -> Mapping[str, tuple[float, float]] | None:
        walked = []
        borders = [round(len(self._requests) * (rung + 1) / RUNGS) for rung in range(RUNGS - 1)]
        for each in walks(part, self._requests, self.setting):
            walked.append(each)
            if len(walked) in borders:
                sums = seconds_by_segment(walked).values()
                trial.report(sum(on for on, _ in sums) / sum(off for _, off in sums), borders.index(len(walked)))
                if trial.should_prune():
                    return None
        return seconds_by_segment(walked)


def _finished(optuna: Any) -> tuple[Any, ...]:
    states = optuna.trial.TrialState
    return (states.COMPLETE, states.PRUNED, states.FAIL)


def derived_seed(seed: int, number: int, worker: int) -> int:
    """Another one for each trial, by its number in the study, and for each worker."""
    digest = hashlib.sha256(f"{seed}/{number}/{worker}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _pairs(stored: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (float(on), float(off)) for name, (on, off) in stored.items()}
