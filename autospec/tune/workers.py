"""Several processes of this machine that work on one study."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autospec.notices import warn
from autospec.scores.folder import ScoreFolder
from autospec.scores.luck import Luck
from autospec.scores.scored import ScoredRequest
from autospec.tune.evaluation import Setting
from autospec.tune.search import Search
from autospec.tune.study import JOURNAL

_END_SECONDS = 600.0
"""For a policy that is being walked when the search is over."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process needs to take part in a search."""

    scores: Path  # folder that holds the requests
    request_ids: Sequence[str]  # to choose by, in order of arrival
    offer: Mapping[str, Any]  # of costs, see `Setting.offer`; those of the study's first worker count
    luck: int  # its seed
    memory: Mapping[str, int]
    memory_limit: int | None
    sources: Sequence[str]
    block_lengths: Sequence[int]
    storage: str | None  # None: in memory, where nobody else takes part
    name: str
    seed: int
    origin: str  # what the scores were made with, see `Search`
    trials: int
    seconds: float | None

    def search(self, requests: Sequence[ScoredRequest], worker: int = 0) -> Search:
        """This worker's part of it. Args: requests: those with the ids, in that order."""
        return Search(
            requests,
            Setting.by(self.offer, Luck(self.luck), self.memory, self.memory_limit),
            sources=self.sources,
            block_lengths=self.block_lengths,
            storage=self.storage,
            name=self.name,
            seed=self.seed,
            origin=self.origin,
            worker=worker,
            device=str(self.offer["device"]),
        )


@contextmanager
def shared_storage(storage: str | None, jobs: int) -> Iterator[str | None]:
    """A storage that so many processes can share; a file that is gone afterwards where none was given."""
    if storage is not None or jobs == 1:
        yield storage
        return
    with tempfile.TemporaryDirectory(prefix="autospec-study-") as folder:
        yield f"{JOURNAL}{Path(folder) / 'study.journal'}"


@contextmanager
def helping(job: Job, count: int) -> Iterator[None]:
    """So many more processes work on the study while the block runs, and end what they have begun after it.

    One that fails is warned of: what the others have found counts.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not live through a fork
    processes = [context.Process(target=_work, args=(job, number + 1), daemon=True) for number in range(count)]
    for process in processes:
        process.start()
    failed = []
    try:
        yield
        end = time.monotonic() + _END_SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        failed = [process.exitcode for process in processes if process.exitcode]
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
    if failed:
        warn(
            f"{len(failed)} of {count} more processes of the search failed (exit status {failed[0]}): "
            "what they printed says why; the policy is chosen by what the others found"
        )


def _work(job: Job, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one says when it ends
    known = {request.request_id: request for request in ScoreFolder(job.scores).read()}
    search = job.search([known[request_id] for request_id in job.request_ids], worker)
    for _ in search.run(trials=job.trials, seconds=job.seconds):
        pass
    search.close()
