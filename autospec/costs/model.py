"""The cost model: what was calibrated, corrected by what is measured in service, and a watch over both."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from autospec.costs.correction import Correction
from autospec.costs.table import CostTable, cheapest_width
from autospec.forks import renew_after_fork
from autospec.types import BlockOutcome

SETTLE_EVERY = 16
"""Blocks between two looks at what was measured: estimates stand still meanwhile, so that policies can keep tables."""
DRIFTED = 1.25
"""Verification this many times slower or faster than calibrated, for `PATIENCE` looks in a row: calibrate again."""
RECOVERED = 1.12
"""The need ends only once drift is less than this."""
PATIENCE = 3
_CONTEXT_TOKENS = 64
"""Contexts that differ by less have the same cheapest width."""
_MOST_WIDTHS = 4096
"""Cheapest widths remembered."""


@dataclass(frozen=True, slots=True)
class _Calibration:
    """What belongs to one calibration. Replaced as a whole: readers take no lock, and never see parts of two."""

    table: CostTable
    verify: Correction = field(default_factory=Correction)
    drafts: Mapping[str, Correction] = field(default_factory=dict)


class CostModel:
    """Estimates for policies, from a calibrated table and from each block's outcome. Safe to share between threads.

    Args:
        table: what calibration measured.
        is_asynchronous: an accelerator's forwards end while tokens are chosen, so that a block's verification is the
            seconds of both; nothing is synchronised for the measurement.
    """

    def __init__(self, table: CostTable, *, is_asynchronous: bool = False) -> None:
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._version = 0
        self.is_asynchronous = is_asynchronous
        self._start(table)

    def _start(self, table: CostTable) -> None:
        self._calibration = _Calibration(table, drafts={source: Correction() for source in table.drafts})
        self._unread: list[BlockOutcome] = []  # since the last look
        self._drift = 1.0
        self._looks_adrift = 0
        self._needs_calibration = False
        self._cheapest: dict[tuple[int, int], int] = {}  # replaced, never emptied: a late answer goes with the old one

    @property
    def table(self) -> CostTable:
        """What was calibrated last."""
        return self._calibration.table

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Block lengths worth choosing between, ascending, 0 not listed."""
        return self.table.block_lengths

    @property
    def version(self) -> int:
        """Grows whenever an estimate changes; between two versions every answer is the same."""
        return self._version

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """One target forward over `num_tokens` tokens (drafts + 1) after `context_tokens` tokens."""
        now = self._calibration
        return now.table.verify.at(num_tokens, context_tokens) * now.verify.factor(num_tokens)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        """One proposal when `block_length` tokens are asked for; infinite for a source that could not be timed."""
        now = self._calibration
        curve = now.table.drafts.get(source)
        if curve is None:
            return math.inf
        return curve.at(block_length, context_tokens) * now.drafts[source].factor(block_length)

    def catch_up_seconds(self, source: str, num_tokens: int) -> float | None:
        """A draft's reading of so many tokens that it has not seen; None where that was not measured."""
        return self.table.catch_up_seconds(source, num_tokens)

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        """Does the answer lie beyond what was measured? Of verification, or of a source's `num_tokens` drafts."""
        return self.table.is_extrapolated(num_tokens, context_tokens, source)

    def cheapest_width(self, num_tokens: int, context_tokens: int) -> int:
        """The width, `num_tokens` or a measured wider one, that a forward over `num_tokens` tokens costs least at.

        Asked before every block, and so remembered for contexts of about the same length.
        """
        known, place = self._cheapest, (num_tokens, context_tokens // _CONTEXT_TOKENS)
        width = known.get(place)
        if width is None:
            if len(known) >= _MOST_WIDTHS:
                self._cheapest = known = {}
            typical = place[1] * _CONTEXT_TOKENS + _CONTEXT_TOKENS // 2
            width = cheapest_width(self.table.verify.tokens, self.verify_seconds, num_tokens, typical)
            known[place] = width
        return width

    @property
    def drift(self) -> float:
        """Verification now over verification as calibrated: 1.3 is 30 % slower. A median over the last blocks."""
        return self._drift

    @property
    def needs_calibration(self) -> bool:
        """Has the device been far from its calibration for long?"""
        return self._needs_calibration

    def observe(self, outcome: BlockOutcome) -> None:
        """Learn what a block took. Prefill and catch-up are not in an outcome; see `BlockOutcome`."""
        request = outcome.request
        if request is not None and outcome.context_tokens <= request.prompt_tokens + 1:
            return  # the first block of an answer: retrieval indexes the prompt in it, caches are allocated
        with self._lock:
            self._unread.append(outcome)
            if len(self._unread) == SETTLE_EVERY:
                unread, self._unread = self._unread, []
                for each in unread:
                    self._read(each)
                self._settle()

    def recalibrate(self, table: CostTable, *, is_asynchronous: bool) -> None:
        """Go on from a new table; what was learnt beside the old one is forgotten. Args: as for the model itself."""
        with self._lock:
            self.is_asynchronous = is_asynchronous
            self._start(table)
            self._version += 1

    def _read(self, outcome: BlockOutcome) -> None:
        now, action = self._calibration, outcome.action
        width = outcome.num_draft_tokens + 1 + outcome.num_padding_tokens
        verify_seconds = outcome.verify_seconds + (outcome.correction_seconds if self.is_asynchronous else 0.0)
        _add(now.verify, width, verify_seconds, now.table.verify_seconds(width, outcome.context_tokens))
        if action.block_length and (correction := now.drafts.get(action.source)) is not None:
            steps = outcome.num_draft_steps
            calibrated = now.table.draft_seconds(action.source, steps, outcome.context_tokens)
            _add(correction, steps, outcome.draft_seconds, calibrated)

    def _settle(self) -> None:
        now = self._calibration
        if any([each.settle() for each in (now.verify, *now.drafts.values())]):  # noqa: C419  # all of them settle
            self._version += 1
            self._cheapest = {}
        drift = now.verify.median()
        if drift is None:
            return
        self._drift = drift
        size = max(drift, 1.0 / drift)
        self._looks_adrift = self._looks_adrift + 1 if size > DRIFTED else 0
        if self._looks_adrift >= PATIENCE:
            self._needs_calibration = True
        elif size < RECOVERED:
            self._needs_calibration = False


def _add(correction: Correction, width: int, measured: float, calibrated: float) -> None:
    if measured > 0.0 and 0.0 < calibrated < math.inf:
        correction.add(width, measured / calibrated)
