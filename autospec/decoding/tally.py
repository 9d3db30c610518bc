"""Raw counts and seconds of one request, added up block by block."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from autospec.types import Action, ActionTally, BlockOutcome, PhaseSeconds


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
class BlockSums:
    """Counts and seconds of blocks."""

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    correction_seconds: float = 0.0
    emission_seconds: float = 0.0
    blocks: int = 0
    num_draft_tokens: int = 0
    num_judged_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    at_risk: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, outcome: BlockOutcome) -> None:
        self.draft_seconds += outcome.draft_seconds
        self.verify_seconds += outcome.verify_seconds
        self.correction_seconds += outcome.correction_seconds
        self.emission_seconds += outcome.emission_seconds
        self.blocks += 1
        self.num_draft_tokens += outcome.num_draft_tokens
        self.num_judged_tokens += outcome.num_judged_tokens
        self.num_accepted_tokens += outcome.num_accepted_tokens
        self.num_committed_tokens += outcome.num_committed_tokens
        missing = outcome.num_judged_tokens - len(self.at_risk)
        self.at_risk.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for position in range(outcome.num_judged_tokens):
            self.at_risk[position] += 1
        for position in range(outcome.num_accepted_tokens):
            self.accepted[position] += 1

    def frozen(self) -> ActionTally:
        values = {each.name: getattr(self, each.name) for each in fields(ActionTally)}
        return ActionTally(**{**values, "at_risk": tuple(self.at_risk), "accepted": tuple(self.accepted)})


@dataclass(slots=True)
class Tally(BlockSums):
    """What a request did so far. Its drafting seconds hold the catch-up, which belongs to no action."""

    prefill_seconds: float = 0.0
    is_control: bool = False  # decoded plainly, to measure what speed-up means
    is_prepared: bool = False  # its forwards after the prompt's were prepared ones, all of them
    decision_seconds: float = 0.0  # choosing, learning, and offers that were not taken
    acceptance_lengths: Counter[int] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)  # label and kind of reason
    by_action: dict[str, BlockSums] = field(default_factory=dict)
    outcomes: list[BlockOutcome] | None = None  # each block, where they are kept
    notes: list[str] = field(default_factory=list)  # sources switched off, speculation refused: with the reason

    def add(self, outcome: BlockOutcome) -> None:
        self.count(outcome)
        self.draft_seconds += outcome.catch_up_seconds
        if self.outcomes is not None:
            str(outcome.action.reason)  # made now, so that what the words are made of is not kept with every block
            self.outcomes.append(outcome)
        self._sums_of(outcome.action, outcome.num_committed_tokens).count(outcome)

    def add_plain_step(
        self,
        action: Action,
        verify_seconds: float,
        correction_seconds: float = 0.0,
        emission_seconds: float = 0.0,
        times: int = 1,
    ) -> None:
        """As `add`, of a block that was only ever going to be a plain step, or of so many: seconds of all of them."""
        for sums in (self, self._sums_of(action, 1, times)):
            sums.verify_seconds += verify_seconds
            sums.correction_seconds += correction_seconds
            sums.emission_seconds += emission_seconds
            sums.blocks += times
            sums.num_committed_tokens += times

    def _sums_of(self, action: Action, num_committed_tokens: int, times: int = 1) -> BlockSums:
        """Count a block with this action, and give what is summed up for its like."""
        label = action.label
        self.acceptance_lengths[num_committed_tokens] += times
        self.actions[label] += times
        self.decisions[f"{label} {action.reason_kind}"] += times
        sums = self.by_action.get(label)
        if sums is None:
            sums = self.by_action[label] = BlockSums()
        return sums

    def counts(self) -> dict[str, Any]:
        """What a `RequestRecord` takes of it, by its names there."""
        return {
            "blocks": self.blocks,
            "num_draft_tokens": self.num_draft_tokens,
            "num_judged_tokens": self.num_judged_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_lengths": dict(self.acceptance_lengths),
            "at_risk": tuple(self.at_risk),
            "accepted": tuple(self.accepted),
            "actions": dict(self.actions),
            "by_action": {label: sums.frozen() for label, sums in self.by_action.items()},
            "decisions": dict(self.decisions),
        }

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
