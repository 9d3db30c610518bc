"""What a candidate came to on scored requests, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autospec.policies.base import CostEstimates, Policy
from autospec.scores.fixed import walk_fixed
from autospec.scores.luck import Luck
from autospec.scores.scored import ScoredRequest
from autospec.scores.walk import Walked, walk
from autospec.tune.candidates import Part, build
from autospec.types import Action


@dataclass(frozen=True, slots=True)
class Setting:
    """What all candidates are judged in."""

    costs: CostEstimates
    luck: Luck
    host_seconds: float = 0.0  # of a block beside drafting and verifying


def walks(part: Part, requests: Sequence[ScoredRequest], setting: Setting) -> Iterator[Walked]:
    """The candidate along all requests, from nothing learned."""
    if "policy" not in part:
        action = Action(str(part["source"]), int(part["block_length"]))
        yield from walk_fixed(action, requests, setting.costs, luck=setting.luck, host_seconds=setting.host_seconds)
        return
    yield from walk_policy(build(part, setting.costs), requests, setting)


def walk_policy(policy: Policy, requests: Sequence[ScoredRequest], setting: Setting) -> Iterator[Walked]:
    """A policy along all requests, from what it has learned."""
    yield from walk(policy, requests, setting.costs, luck=setting.luck, host_seconds=setting.host_seconds)


def seconds_by_segment(walked: Sequence[Walked]) -> Mapping[str, tuple[float, float]]:
    """Of each segment, seconds and those of plain decoding; prefill, where known, in both."""
    sums: dict[str, tuple[float, float]] = {}
    for each in walked:
        prefill = each.request.prefill_seconds or 0.0
        seconds, off = sums.get(each.request.segment, (0.0, 0.0))
        sums[each.request.segment] = (seconds + each.seconds + prefill, off + each.off_seconds + prefill)
    return sums
