"""How many tokens a fixed drafter is to draft at each batch size, from what was accepted and what steps cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autospec.costs.batches import SAMPLED
from autospec.costs.steps import on_line
from autospec.errors import ConfigurationError
from autospec.telemetry.calibrations import newest_steps
from autospec.telemetry.store import Store
from autospec.types import split_label

Schedule = tuple[tuple[int, int, int], ...]
"""First and last number of requests, and draft tokens."""
LEAST_BLOCKS = 200
MINIMUM_GAIN = 0.02
"""Predicted gain in tokens per second over no drafting, below which there is none."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one source, whatever it found being drafted."""

    hit_rate: float  # share of the steps that had drafts
    survival: tuple[float, ...]  # [j] probability that at least j + 1 tokens are accepted, where there are drafts
    blocks: int


def measured_acceptance(store: Store, source: str) -> Acceptance:
    """From requests that were decoded by this source throughout: elsewhere a policy has chosen where it is used.

    Raises:
        ConfigurationError: there are too few.
    """
    blocks = drafting = 0
    at_risk: list[int] = []
    accepted: list[int] = []
    for record in store.requests():
        is_ingested = record.policy == f"vllm:{source}"
        if not is_ingested and not record.policy.startswith(f"fixed:{source}:"):
            continue
        for label, tally in record.by_action.items():
            is_asked = split_label(label)[0] == source
            if not is_asked and not is_ingested:
                continue  # the proposer was off: that is no miss
            blocks += tally.blocks
            if not is_asked or not tally.at_risk:
                continue
            drafting += tally.at_risk[0]
            missing = len(tally.at_risk) - len(at_risk)
            at_risk += [0] * missing
            accepted += [0] * missing
            for position, (risked, kept) in enumerate(zip(tally.at_risk, tally.accepted, strict=False)):
                at_risk[position] += risked
                accepted[position] += kept
    if blocks < LEAST_BLOCKS:
        raise ConfigurationError(
            f"{store.url}: {blocks} blocks of requests that {source!r} alone decoded, {LEAST_BLOCKS} are needed: take "
            f"in an engine's with `autospec ingest vllm --source {source}`, or serve with policy fixed:{source}:8"
        )
    survival, product = [], 1.0
    for risked, kept in zip(at_risk, accepted, strict=True):
        product *= kept / risked if risked else 0.0
        survival.append(product)
    return Acceptance(drafting / blocks, tuple(survival), blocks)


def measured_steps(store: Store) -> Callable[[float], float]:
    """Seconds of steps by their tokens, as engines with the proposer saw them: of the engine that saw last.

    Greedy steps; sampled ones where no engine has told of those.

    Raises:
        ConfigurationError: none did, or not widths enough.
    """
    grid: list[tuple[float, float]] = []
    for source in ("target", SAMPLED):
        if len(grid) < 2:
            grid = [(float(tokens), seconds) for tokens, seconds in newest_steps(store, source, device="vllm:%")]
    if len(grid) < 2:
        raise ConfigurationError(
            f"{store.url}: no engine has told what its steps cost: serve with the proposer for a while, or measure "
            "one with autospec calibrate --vllm (docs/vllm.md)"
        )
    return lambda num_tokens: on_line(grid, num_tokens)


def schedule(
    acceptance: Acceptance, step_seconds: Callable[[float], float], longest: int, most_requests: int
) -> Schedule:
    """The draft length with the most tokens per second at each batch size, 0 among them.

    Of so many requests a share has drafts in each step; tokens verified are one of each request and those drafts.

    Args:
        longest: draft tokens at most.
        most_requests: that the table goes to.
    """
    ranges: list[list[int]] = []
    for first, last in _sizes(most_requests):
        best = _best_length(acceptance, step_seconds, longest, last)
        if ranges and ranges[-1][2] == best:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, best])
    return tuple((first, last, best) for first, last, best in ranges)


def _sizes(most: int) -> Sequence[tuple[int, int]]:
    """Each size up to 8, then in doublings."""
    ends = [*range(1, min(most, 8) + 1)]
    while ends[-1] < most:
        ends.append(min(2 * ends[-1], most))
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def _best_length(
    acceptance: Acceptance, step_seconds: Callable[[float], float], longest: int, num_requests: int
) -> int:
    plain = num_requests / step_seconds(num_requests)
    best, most = 0, plain * (1.0 + MINIMUM_GAIN)
    expected = 1.0
    for length in range(1, longest + 1):
        expected += acceptance.hit_rate * (acceptance.survival[length - 1 : length] or (0.0,))[0]
        tokens = num_requests * (1.0 + acceptance.hit_rate * length)
        goodput = num_requests * expected / step_seconds(tokens)
        if goodput > most:
            best, most = length, goodput
    return best
