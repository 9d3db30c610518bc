"""Raw counts and seconds of one request, added up block by block."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from autospec.types import BlockOutcome, PhaseSeconds


class Stopwatch:
    """Splits time into laps: `lap()` gives the seconds since the last one."""

    def __init__(self) -> None:
        self.started = self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def total(self) -> float:
        return time.perf_counter() - self.started


@dataclass(slots=True)
class Tally:
    """What a request did so far."""

    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    correction_seconds: float = 0.0
    emission_seconds: float = 0.0
    blocks: int = 0
    num_draft_tokens: int = 0
    num_judged_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_lengths: Counter[int] = field(default_factory=Counter)
    at_risk: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    actions: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)  # sources switched off, speculation refused: with the reason

    def add(self, outcome: BlockOutcome) -> None:
        self.draft_seconds += outcome.draft_seconds + outcome.catch_up_seconds
        self.verify_seconds += outcome.verify_seconds
        self.correction_seconds += outcome.correction_seconds
        self.emission_seconds += outcome.emission_seconds
        self.blocks += 1
        self.num_draft_tokens += outcome.num_draft_tokens
        self.num_judged_tokens += outcome.num_judged_tokens
        self.num_accepted_tokens += outcome.num_accepted_tokens
        self.acceptance_lengths[outcome.num_committed_tokens] += 1
        self.actions[outcome.action.label] += 1
        missing = outcome.num_judged_tokens - len(self.at_risk)
        self.at_risk.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for position in range(outcome.num_judged_tokens):
            self.at_risk[position] += 1
        for position in range(outcome.num_accepted_tokens):
            self.accepted[position] += 1

    def phases(self, total_seconds: float) -> PhaseSeconds:
        """Seconds by phase; what no phase claims is `other`."""
        known = (
            self.prefill_seconds
            + self.draft_seconds
            + self.verify_seconds
            + self.correction_seconds
            + self.emission_seconds
        )
        return PhaseSeconds(
            prefill=self.prefill_seconds,
            draft=self.draft_seconds,
            verify=self.verify_seconds,
            correction=self.correction_seconds,
            emission=self.emission_seconds,
            other=max(0.0, total_seconds - known),
        )
