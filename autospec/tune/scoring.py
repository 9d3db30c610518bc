"""From a folder of traffic to a folder of scores: each request once, also after an interruption."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autospec.costs.fingerprint import describe
from autospec.drafts.base import DraftSource
from autospec.errors import ConfigurationError
from autospec.policies.base import CostEstimates
from autospec.policies.prices import Prices
from autospec.scores.folder import ScoreFolder
from autospec.scores.scorer import Scorer
from autospec.traffic import TrafficRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 32
"""Requests that are scored together, and so lost together where a run is cut short."""
BATCH_TOKENS = 8192
"""Of the requests scored together, prompts with them; a longer one is scored by itself."""
_MOST_WAITING = 1024
_OFF_BY = 0.15
"""Share by which plain decoding may differ from the cost model before it is worth a question."""

_KNOWN_WORDS = {"greedy", "sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"}
_KNOWN_WORDS |= {"eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"}


def why_not(request: TrafficRequest, *, with_imported: bool = False) -> str | None:
    """Why blocks cannot be walked along a request's answer; None when they can.

    Args:
        with_imported: take answers that were imported for the target's own.
    """
    if request.is_pending:
        return "no answer yet (autospec traffic complete)"
    if len(request.output) < 2:
        return "an answer of one token"
    if request.origin.startswith("import:") and not with_imported:
        return "an imported answer, perhaps another model's (--imported takes it for the target's own)"
    if request.fallback_reason is not None and not request.is_control:
        return "left to the original generate"
    words = [word.partition("=")[0] for word in request.decoding.split()]
    if unknown := [word for word in words if word not in _KNOWN_WORDS]:
        return f"decoded with {unknown[0]}, which traffic does not keep"
    return None


def made_with(
    target: PreTrainedModel, sources: Mapping[str, DraftSource], sampling: str, manifest: Any
) -> dict[str, Any]:
    """What scores depend on, as plain JSON values; the device is none of it."""
    found = describe(target, sources)
    return {
        "target": found["target"],
        "sources": found["sources"],
        "sampling": sampling,
        "tokenizer": manifest.fingerprint,
    }


def score_traffic(
    reader: Iterable[TrafficRequest],
    scorer: Scorer,
    folder: ScoreFolder,
    *,
    with_imported: bool = False,
    batch: int = BATCH,
) -> Iterator[tuple[TrafficRequest, str | None]]:
    """Score what is not scored yet, in the order of arrival.

    Args:
        reader: the requests, the first to arrive first.
        batch: how many are scored together at most.

    Yields:
        each request, and why it was left out if it was; those scored together once they are all in the folder.
    """
    done = folder.done()
    waiting = _Waiting(scorer, folder)
    for request in reader:
        why = why_not(request, with_imported=with_imported)
        if why is None and request.request_id in done:
            yield from waiting.score()  # pools see them in this order
            scorer.learn(request)
            yield request, None
            continue
        if why is None and not waiting.has_room(request, batch):
            yield from waiting.score()
        waiting.add(request, why)
        if not waiting.num_tokens or len(waiting.requests) >= _MOST_WAITING:
            yield from waiting.score()
    yield from waiting.score()


class _Waiting:
    """Requests that came one after the other, and are to be scored together; among them some that are left out."""

    def __init__(self, scorer: Scorer, folder: ScoreFolder) -> None:
        self._scorer = scorer
        self._folder = folder
        self._clear()

    def _clear(self) -> None:
        self.requests: list[tuple[TrafficRequest, str | None]] = []
        self.num_tokens = 0  # of those to be scored
        self._num_scored = 0

    def has_room(self, request: TrafficRequest, batch: int) -> bool:
        is_small = self.num_tokens + _num_tokens(request) <= BATCH_TOKENS
        return not self._num_scored or (self._num_scored < batch and is_small)

    def add(self, request: TrafficRequest, why: str | None) -> None:
        self.requests.append((request, why))
        if why is None:
            self.num_tokens += _num_tokens(request)
            self._num_scored += 1

    def score(self) -> Iterator[tuple[TrafficRequest, str | None]]:
        """Score and keep them, then give them one by one with what `score_traffic` says of each."""
        found = iter(self._scorer.score_batch([request for request, why in self.requests if why is None]))
        settled = []
        for request, why in self.requests:
            scored = None if why is not None else next(found)
            if isinstance(scored, Exception):
                why = _why_failed(scored)
            elif scored is not None:
                self._folder.add(scored)
            settled.append((request, why))
        self._clear()
        yield from settled


def _num_tokens(request: TrafficRequest) -> int:
    return len(request.prompt) + len(request.output)


def _why_failed(error: Exception) -> str:
    if isinstance(error, ConfigurationError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def host_seconds(requests: Sequence[TrafficRequest]) -> float | None:
    """Of a block beside drafting and verifying, by the phases that traffic keeps; None where it keeps none."""
    found = [_host_seconds(request) / _num_blocks(request) for request in requests if _has_phases(request)]
    return statistics.median(found) if found else None


def _has_phases(request: TrafficRequest) -> bool:
    """Were the seconds of its blocks measured one by one? Those of a log, or of the original `generate`, were not."""
    return request.seconds is not None and request.seconds.verify > 0.0 and _num_blocks(request) > 0


def _num_blocks(request: TrafficRequest) -> int:
    return sum(request.acceptance_lengths.values())


def _host_seconds(request: TrafficRequest) -> float:
    """Beside prefill, drafting and verifying."""
    seconds = request.seconds
    return 0.0 if seconds is None else seconds.correction + seconds.emission + seconds.other


@dataclass(frozen=True, slots=True)
class CostCheck:
    """Plain decoding as it was recorded, beside what the cost model says of it. Prefill is left out."""

    requests: int  # decoded plainly, with seconds by phase
    blocks: int  # of one token each
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float | None:
        """Predicted seconds over measured ones; None where nothing was measured."""
        return self.predicted_seconds / self.measured_seconds if self.measured_seconds > 0.0 else None

    @property
    def note(self) -> str:
        """One line for a report."""
        if self.ratio is None or self.predicted_seconds <= 0.0:
            return "no control requests in this traffic: seconds are the cost model's alone"
        times = self.measured_seconds / self.predicted_seconds
        what = f"{self.requests} control request{'' if self.requests == 1 else 's'}"
        question = ": recorded on another device, or on a busy one?" if abs(times - 1.0) > _OFF_BY else ""
        return f"plain decoding of {what} took {times:.2f} times what the cost model says{question}"


def check_costs(requests: Sequence[TrafficRequest], costs: CostEstimates, per_block: float | None) -> CostCheck:
    """Compare the cost model with requests that were decoded plainly: controls, and those under the policy `off`.

    Args:
        requests: of the traffic; those that were not decoded plainly, or without seconds by phase, are left out.
        costs: of the device that policies are walked for.
        per_block: seconds of a block beside drafting and verifying, as `host_seconds` has them; None where that is not
            known, and then verification alone is compared.
    """
    plain = [
        request
        for request in requests
        if _has_phases(request)
        and (request.is_control or request.policy == "off")
        and not request.num_draft_tokens
        and set(request.acceptance_lengths) == {1}
    ]
    prices = Prices(costs, pads=False)
    predicted = measured = 0.0
    for request in plain:
        assert request.seconds is not None  # it has phases
        start = len(request.prompt) + 1  # prefill gave the first token
        steps = [prices.at(start + block).step for block in range(_num_blocks(request))]
        predicted += sum(steps) + len(steps) * (per_block or 0.0)
        measured += request.seconds.verify + (0.0 if per_block is None else _host_seconds(request))
    return CostCheck(len(plain), sum(map(_num_blocks, plain)), predicted, measured)
