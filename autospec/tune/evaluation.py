"""What a candidate came to on scored requests, segment by segment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autospec.costs.model import CostModel
from autospec.costs.table import CostTable
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
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes that each draft source takes
    memory_limit: int | None = None  # bytes for all of a policy's sources together

    def excess(self, sources: Collection[str]) -> float:
        """Bytes over the limit that these sources take, as a share of it; 0 or less where they fit."""
        if self.memory_limit is None:
            return 0.0
        return sum(self.memory.get(name, 0) for name in sources) / self.memory_limit - 1.0

    def offer(self, device: str) -> dict[str, Any]:
        """Plain values by which somebody else can go, on another device too."""
        assert isinstance(self.costs, CostModel)
        return {"device": device, "table": self.costs.table.to_json(), "host_seconds": self.host_seconds}

    @classmethod
    def by(cls, offered: Mapping[str, Any], luck: Luck, memory: Mapping[str, int], limit: int | None) -> Setting:
        """One that goes by such an offer from the start."""
        return cls(CostModel(CostTable.from_json(offered["table"])), luck, 0.0, memory, limit).going_by(offered)

    def going_by(self, offered: Mapping[str, Any]) -> Setting:
        """The same with the costs of such an offer."""
        table = CostTable.from_json(offered["table"])
        return replace(self, costs=CostModel(table), host_seconds=float(offered["host_seconds"]))


def walks(part: Part, requests: Sequence[ScoredRequest], setting: Setting) -> Iterator[Walked]:
    """The candidate along all requests, from nothing learned."""
    if set(part) == {"source", "block_length"}:
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
        seconds, off = sums.get(each.request.segment, (0.0, 0.0))
        sums[each.request.segment] = (seconds + each.whole_seconds, off + each.whole_off_seconds)
    return sums
