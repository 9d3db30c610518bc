"""What a report consists of: raw counts and seconds per group; every ratio is a property, absent where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autospec.types import PhaseSeconds

if TYPE_CHECKING:
    from autospec.telemetry.engines import EngineSums

TOO_LITTLE_DATA = "too little data"
NO_OUTPUT_TOKENS = "no output tokens"
UNEQUAL_CONTROL = "see groups"  # unequal shares of control: sums over all of them would compare unlike traffic

FEWEST_REQUESTS = 4
"""Requests on each side below which an interval would say more than it knows: there is none, and no verdict."""

FEWEST_SUMMED = 30
"""The same where sums are all that is known of their spread."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Requests beside what the cost model says their control would have taken; also those without a control."""

    requests: int = 0
    control_seconds: float = 0.0
    seconds: float = 0.0
    slower_requests: int = 0
    saved_seconds: float = 0.0  # by those faster than predicted
    lost_seconds: float = 0.0  # by those slower

    @property
    def speed_up(self) -> float | None:
        return ratio(self.control_seconds, self.seconds)

    @property
    def share_slower(self) -> float | None:
        return ratio(self.slower_requests, self.requests)


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One group of requests. "Requests" are those under a policy; control requests are counted apart."""

    group: Mapping[str, str]  # as in {"segment": "code"}; empty for the row over everything
    requests: int
    control_requests: int  # those that the speed-up is measured against
    failed_requests: int
    fallback_requests: int
    output_tokens: int
    control_output_tokens: int
    seconds: PhaseSeconds
    control_seconds: PhaseSeconds
    speed_up_low: float | None  # 95 % interval
    speed_up_high: float | None
    interval_method: str | None
    note: str | None  # why there is no speed-up
    paired_requests: int
    slower_requests: int  # of the paired ones
    blocks: int
    block_tokens: int  # tokens committed by blocks, +1 included
    num_draft_tokens: int
    num_judged_tokens: int
    num_accepted_tokens: int
    at_risk: tuple[int, ...]  # [j] blocks in which draft position j + 1 was judged
    accepted: tuple[int, ...]  # [j] blocks in which it was accepted
    actions: Mapping[str, int]  # Action.label -> blocks
    greedy_compared: int
    greedy_identical: int
    greedy_ties: int
    greedy_different: int
    sampled_compared: int
    sampled_identical: int
    prediction: Prediction = Prediction()
    peak_memory_bytes: int | None = None  # the most of any request
    model_bytes: int | None = None  # the most of any deployment

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens / seconds, prefill and failed requests included."""
        return ratio(self.output_tokens, self.seconds.total)

    @property
    def control_tokens_per_second(self) -> float | None:
        return ratio(self.control_output_tokens, self.control_seconds.total)

    @property
    def speed_up(self) -> float | None:
        """Control seconds per output token / seconds per output token; below 1 is a slow-down."""
        if self.note is not None:
            return None
        control = ratio(self.control_seconds.total, self.control_output_tokens)
        treated = ratio(self.seconds.total, self.output_tokens)
        return None if control is None or treated is None else ratio(control, treated)

    @property
    def verdict(self) -> str | None:
        """`faster` or `slower` when the interval excludes 1, else `unclear`; None without an interval."""
        if self.speed_up_low is None or self.speed_up_high is None:
            return None
        if self.speed_up_low > 1:
            return "faster"
        return "slower" if self.speed_up_high < 1 else "unclear"

    @property
    def share_slower(self) -> float | None:
        """Share of paired requests whose seconds per output token exceeded their control's."""
        return ratio(self.slower_requests, self.paired_requests)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed per block, +1 included."""
        return ratio(self.block_tokens, self.blocks)

    @property
    def usual_action(self) -> str | None:
        """The action of most blocks."""
        return max(self.actions, key=lambda label: (self.actions[label], label)) if self.actions else None

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """[j] accepted / judged at draft position j + 1; None where no block got that far."""
        return tuple(ratio(accepted, at_risk) for accepted, at_risk in zip(self.accepted, self.at_risk, strict=True))


@dataclass(frozen=True, slots=True)
class Report:
    """Rows by group, and one over everything."""

    group_by: tuple[str, ...]
    segments: tuple[SegmentRow, ...]
    all: SegmentRow
    resamples: int
    seed: int
    measured: tuple[str, ...] = ()  # what, where, under which policy and when; one line each
    unmatched_comparisons: int = 0  # comparisons one of whose requests is not in the report
    basis: str = "requests"  # or `hours`: sums by the hour, which stay when old requests are pruned
    engines: tuple[EngineSums, ...] = ()  # known by their counters alone; in no row

    @property
    def fewest(self) -> int:
        """Requests on each side from which on there is an interval and a verdict."""
        return FEWEST_SUMMED if self.basis == "hours" else FEWEST_REQUESTS

    @property
    def is_empty(self) -> bool:
        """Without a request; there may be engines all the same."""
        return self.all.requests == 0 and self.all.control_requests == 0


def ratio(numerator: float, denominator: float) -> float | None:
    """Their quotient; None, never 0, 1 or NaN, where there is nothing to divide by."""
    return numerator / denominator if denominator > 0 else None
