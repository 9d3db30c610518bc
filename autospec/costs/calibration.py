"""Measures the cost curves of a target and its draft sources, once, when a policy needs them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from autospec.backends.backend import Backend, Lease
from autospec.caches import context_window
from autospec.costs.fitting import Point, fit, monotone, spread, steadied, typical
from autospec.costs.probes import DraftProbe, VerifyProbe
from autospec.costs.table import CostTable, Curve
from autospec.drafts.base import DraftSource
from autospec.randomness import spared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_LENGTHS = (1, 2, 4, 8, 16)
CONTEXTS = (64, 1024, 4096)
REPEATS = 7
LEAST_REPEATS = 2
BUDGET_SECONDS = 3.5
"""Rounds end with it, once each point has its least repeats."""
EXTRA_WIDTHS = 11
"""Widths measured at most besides those of the block lengths."""
STEP = 0.04
"""A width in the middle of two that lies further from the line between them is a step: both halves are looked into."""
ANCHORS = (1, 2, 5, 17)
"""Widths measured in every context; the others in the first one alone."""
OVERDUE = 0.25
"""Share of the budget by which the least repeats may exceed it."""
LOOKING_AGAIN = 0.25
"""Share of the budget for timing again what looks like a step."""
LONG_SECONDS = 10.0
"""A calibration that takes longer says so."""

_log = logging.getLogger("autospec")


@dataclass(slots=True)
class _Job:
    """One point to time."""

    source: str | None  # None: the target
    point: Point
    seconds: Callable[[int], float]


class _Rounds:
    """Times all points in turn, round after round, so that a slow moment of the machine touches all of them."""

    def __init__(self, budget_seconds: float) -> None:
        self.started = time.perf_counter()
        self.seconds_kept = 0.0  # for what follows the rounds
        self._budget_seconds = budget_seconds
        self.jobs: list[_Job] = []
        self._timings: list[tuple[tuple[str | None, Point], float]] = []  # in the order in which they were made
        self.failures: dict[str, str] = {}
        self.catch_up: dict[str, dict[int, float]] = {}  # source -> context -> seconds of reading it

    @property
    def seconds_left(self) -> float:
        return self._budget_seconds - (time.perf_counter() - self.started)

    @property
    def is_overdue(self) -> bool:
        """Well beyond the budget: the machine is slow or busy, and one look at each point has to do."""
        return self.seconds_left < -OVERDUE * self._budget_seconds

    def round(self, *, is_least: bool) -> bool:
        """Time every point once. Returns: False when time ran out; in one of the least rounds only when overdue."""
        for job in list(self.jobs):
            if self.seconds_left <= self.seconds_kept and not is_least:
                return False
            if self.is_overdue and any(which == (job.source, job.point) for which, _ in self._timings):
                return False
            if job in self.jobs:
                self.run(job)
        self.jobs.reverse()  # so that no point always follows the same one
        return True

    def run(self, job: _Job) -> None:
        """Time one point; a source that raises is not asked again in this context."""
        try:
            seconds = job.seconds(job.point[1])
        except Exception as error:
            if job.source is None:
                raise
            self.give_up(job.source, job.point[0], error)
            return
        self._timings.append(((job.source, job.point), seconds))

    def samples(self) -> dict[str | None, dict[Point, list[float]]]:
        """Seconds of each source's points at the usual pace of the machine."""
        found: dict[str | None, dict[Point, list[float]]] = {None: {}}
        for ((source, point), _), seconds in zip(self._timings, steadied(self._timings), strict=True):
            found.setdefault(source, {}).setdefault(point, []).append(seconds)
        return found

    def give_up(self, source: str, context: int, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _log.warning("draft source %s cannot be timed after %d tokens: %s", source, context, text)
        self.failures[source] = text
        self.jobs = [job for job in self.jobs if (job.source, job.point[0]) != (source, context)]
        self._timings = [each for each in self._timings if (each[0][0], each[0][1][0]) != (source, context)]


class _Filling:
    """How long it will take to fill the cache of a longer context, from those filled before."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._per_token = 0.0

    def add(self, context: int, seconds: float) -> None:
        """The first one is all fixed cost."""
        self._first = seconds if self._first is None else self._first
        self._per_token = max(0.0, seconds - self._first) / context

    def seconds(self, context: int) -> float:
        return self._per_token * context


def calibrate(
    target: PreTrainedModel,
    sources: Mapping[str, DraftSource],
    *,
    block_lengths: Sequence[int] = BLOCK_LENGTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
    budget_seconds: float = BUDGET_SECONDS,
    extra_widths: int = EXTRA_WIDTHS,
    backend: Backend | None = None,
) -> CostTable:
    """Time verification for every block length and drafting for every source.

    Args:
        target: the model that verifies.
        sources: draft sources by name, attached.
        block_lengths: block lengths to measure, ascending.
        contexts: context lengths in tokens; those beyond the target's window are left out.
        repeats: rounds at most.
        budget_seconds: no further round begins after these; every point is measured twice in any case.
        extra_widths: widths at most that are measured besides, those in the middle of two and more where they show a
            step of the device; after the shortest context alone.
        backend: how forwards run; None: as the models themselves run them.

    Raises:
        RuntimeError: the backend cannot be used now, by a request that uses it or for what became of the target.
    """
    rounds = _Rounds(budget_seconds)
    widths = (1, *(k + 1 for k in block_lengths))
    lent = nullcontext(Lease()) if backend is None else backend.lease()
    with torch.no_grad(), spared(target.device), lent as lease:
        if lease.why_not is not None:  # what ran instead would be kept as its costs
            raise RuntimeError(f"costs cannot be measured now: {lease.why_not}")
        probes = _verify_jobs(rounds, target, _fitting(target, contexts, block_lengths, repeats), widths, lease)
        for name, source in sources.items():
            _draft_jobs(rounds, target, name, source, tuple(probes), block_lengths, lease)
        first = next(iter(probes))
        rounds.seconds_kept = LOOKING_AGAIN * budget_seconds
        for number in range(max(1, repeats)):
            if not rounds.round(is_least=number < LEAST_REPEATS):
                break
            if number == 0 and probes[first].can_roll_back:  # steps matter more than repeats, should time run out
                _look_between(rounds, probes[first], first, extra_widths)
        rounds.seconds_kept = 0.0
        if repeats > LEAST_REPEATS and probes[first].can_roll_back:
            _look_again(rounds, probes[first], first)
    samples = rounds.samples()
    verify = samples.pop(None)
    drafts = {str(name): curve for name, found in samples.items() if (curve := _curve(found, block_lengths))}
    seconds = time.perf_counter() - rounds.started
    level = logging.WARNING if seconds > LONG_SECONDS else logging.INFO
    _log.log(level, "measured what drafting and verifying cost on this device: %.1f s (policy auto, once)", seconds)
    return CostTable(
        tuple(block_lengths),
        fit(verify),
        drafts,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        calibration_seconds=seconds,
        spread=spread(verify),
        failures=rounds.failures,
        catch_up={name: _reading(found) for name, found in rounds.catch_up.items() if name in drafts},
    )


def _fitting(target: PreTrainedModel, contexts: Sequence[int], block_lengths: Sequence[int], repeats: int) -> list[int]:
    """The contexts that fit the target's window; at least one."""
    window = context_window(target) or sys.maxsize
    # what is measured reaches this far beyond the context: the longest block, and a token for each draft proposed
    reach = max(block_lengths) + 1 + (repeats + 1) * len(block_lengths)
    return [c for c in contexts if c + reach <= window] or [max(1, window - reach)]


def _verify_jobs(
    rounds: _Rounds, target: PreTrainedModel, contexts: Sequence[int], widths: Sequence[int], lease: Lease
) -> dict[int, VerifyProbe]:
    """Longer contexts are left out when their caches take too long to fill, or do not fit the memory."""
    probes: dict[int, VerifyProbe] = {}
    filling = _Filling()
    for context in contexts:
        if probes and filling.seconds(context) > rounds.seconds_left / 2:
            break
        started = time.perf_counter()
        try:
            probe = VerifyProbe(target, context, max(widths), lease)
            probe.seconds(1)
        except RuntimeError as error:
            if not probes:
                raise
            _log.info("contexts of %d tokens and more were not measured: %s", context, error)
            break
        filling.add(context, time.perf_counter() - started)
        measured = widths if not probes else [w for w in widths if w in ANCHORS or w == max(widths)]
        probes[context] = probe
        rounds.jobs += [_Job(None, (context, width), probe.seconds) for width in measured]
    return probes


def _draft_jobs(
    rounds: _Rounds,
    target: PreTrainedModel,
    name: str,
    source: DraftSource,
    contexts: Sequence[int],
    block_lengths: Sequence[int],
    lease: Lease,
) -> None:
    """In the contexts that the source can draft in; the first of them with all lengths, the others with both ends."""
    jobs: list[_Job] = []
    filling = _Filling()
    for context in contexts:
        if jobs and filling.seconds(context) > rounds.seconds_left / 2:
            break
        started = time.perf_counter()
        try:
            probe = DraftProbe(target, source, context, lease)
            probe.seconds(block_lengths[0])  # allocations, first calls, the prefill of a draft's cache
        except Exception as error:  # noqa: BLE001  # logged; while decoding it would be switched off with this reason
            rounds.give_up(name, context, error)
            continue
        filling.add(context, time.perf_counter() - started)
        if probe.catch_up_seconds and getattr(source, "catches_up", True):
            rounds.catch_up.setdefault(name, {})[context] = probe.catch_up_seconds
        measured = sorted({block_lengths[0], block_lengths[-1]}) if jobs else block_lengths
        jobs += [_Job(name, (context, length), probe.seconds) for length in measured]
    # between the target's forwards, as in decoding: a lookup is slower when they have used up the processor's caches
    for index, job in enumerate(jobs):
        rounds.jobs.insert(min(len(rounds.jobs), 2 * index + 1), job)


def _look_between(rounds: _Rounds, probe: VerifyProbe, context: int, room: int) -> None:
    """Measure widths between the others, where steps hide: a kernel that changes at 16 tokens shows at no other.

    Each between two known ones, so that a slow moment is not taken for a step.
    """
    known = sorted({job.point[1] for job in rounds.jobs if job.source is None and job.point[0] == context})
    waiting = list(pairwise(known))
    while waiting and room > 0 and not rounds.is_overdue:
        gaps = [(low, (low + high) // 2, high) for low, high in waiting if high - low > 1][:room]
        jobs = {width: _Job(None, (context, width), probe.seconds) for gap in gaps for width in gap}
        for low, width, high in gaps:
            for each in (low, width, high):
                rounds.run(jobs[each])
        rounds.jobs += [jobs[width] for _, width, _ in gaps]
        room -= len(gaps)
        found = {width: typical(seconds) for (c, width), seconds in rounds.samples()[None].items() if c == context}
        waiting = []
        for low, width, high in gaps:
            line = float(np.interp(width, (low, high), (found[low], found[high])))
            if abs(found[width] / line - 1.0) > STEP:
                waiting += [(low, width), (width, high)]


def _look_again(rounds: _Rounds, probe: VerifyProbe, context: int) -> None:
    """Time widths that look like a step again, between their neighbours: what was a slow moment is then outvoted.

    The farthest off first, for as long as there is time.
    """
    seen: set[int] = set()
    while rounds.seconds_left > 0.0:
        found = {width: typical(seconds) for (c, width), seconds in rounds.samples()[None].items() if c == context}
        widths = sorted(found)
        steps = [
            (
                abs(found[width] / float(np.interp(width, (low, high), (found[low], found[high]))) - 1.0),
                low,
                width,
                high,
            )
            for low, width, high in zip(widths, widths[1:], widths[2:], strict=False)
            if width not in seen
        ]
        off, low, width, high = max(steps, default=(0.0, 0, 0, 0))
        if off <= STEP:
            return
        seen.add(width)
        for each in (width, low, width, high, width):
            rounds.run(_Job(None, (context, each), probe.seconds))


def _reading(seconds: Mapping[int, float]) -> Curve:
    """Seconds by tokens read at once; each was timed once, the first with what first calls take."""
    tokens = sorted(seconds)
    rising = monotone([seconds[number] for number in tokens], [1.0] * len(tokens))
    return Curve((1,), tuple(tokens), (tuple(rising),))


def _curve(samples: Mapping[Point, Sequence[float]], block_lengths: Sequence[int]) -> Curve | None:
    """None where the shortest context was lost: without it there is nothing to add to."""
    if not samples or {length for c, length in samples if c == min(samples)[0]} != set(block_lengths):
        return None
    return fit(samples)
