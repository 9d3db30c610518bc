"""Arms, the actions that bandits choose between: a draft source with a block length, or a plain step.

Seconds are counted in plain steps of the device (measured seconds / `CostEstimates.verify_seconds(1, context)`), so
that evidence from long and short contexts can be added up, and a goodput of 1.3 reads as 1.3 times plain decoding.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from autospec.policies.base import MAX_SEGMENTS, CostEstimates
from autospec.policies.reading import Floats, Indices
from autospec.types import NONE, Action, BlockContext, BlockOutcome

T = TypeVar("T")
_MAX_CACHED = 20_000
_MAX_PENDING = 1_000


class Arms:
    """Numbers the arms in the order in which they are met; number 0 is the plain step, and always usable."""

    def __init__(self, costs: CostEstimates) -> None:
        self._costs = costs
        self.names: list[tuple[str, int]] = [(NONE, 0)]
        self._numbers: dict[tuple[str, int], int] = {(NONE, 0): 0}
        self._usable: dict[tuple[tuple[str, ...], int], Indices] = {}
        self._of_source: dict[str, Indices] = {}
        self._made_for: object = None  # lengths and version of the costs that both hold for

    def __len__(self) -> int:
        return len(self.names)

    def usable(self, context: BlockContext) -> Indices:
        """[n], the arms that can be played now: sources usable, block lengths below the tokens left."""
        lengths = self._lengths()
        fitting = bisect_left(lengths, context.tokens_left)
        key = (context.sources, fitting)
        found = self._usable.get(key)
        if found is None:
            if len(self._usable) >= _MAX_CACHED:
                self._usable.clear()
            numbers = [
                self._number((source, k))
                for source in context.sources
                for k in lengths[:fitting]
                if self._costs.draft_seconds(source, k, context.context_tokens) < math.inf
            ]
            found = self._usable[key] = np.array([0, *numbers], dtype=np.intp)
        return found

    def of_source(self, source: str) -> Indices:
        """[block lengths], the arms of a source."""
        lengths = self._lengths()
        found = self._of_source.get(source)
        if found is None:
            numbers = [self._number((source, k)) for k in lengths]
            found = self._of_source[source] = np.array(numbers, dtype=np.intp)
        return found

    def of(self, action: Action) -> int | None:
        """The arm that was played; None for a block length that is no arm, as when the context's end cut it short."""
        if action.block_length == 0:
            return 0
        key = (action.source, action.block_length)
        return self._number(key) if action.block_length in self._costs.block_lengths else self._numbers.get(key)

    def action(self, arm: int, kind: str, gain: float, num_arms: int) -> Action:
        """Args: gain: its goodput over that of plain steps."""
        source, block_length = self.names[arm]
        kind = "off" if kind == "best" and block_length == 0 else kind
        label = f"{source}:{block_length}" if block_length else source
        reason = f"{kind}: {label} {gain:.2f}x plain of {num_arms} arms"
        return Action(source, block_length, reason, gain)

    def state(self) -> list[list[Any]]:
        return [list(name) for name in self.names]

    def restored(self, state: Any) -> Arms:
        """Arms of the same costs, numbered as they were."""
        arms = Arms(self._costs)
        for source, block_length in state[1:]:
            if type(source) is not str or type(block_length) is not int or block_length < 1:
                raise ValueError(f"{source!r}:{block_length!r} is no arm")
            arms._number((source, block_length))
        if list(map(list, arms.names)) != [list(name) for name in state]:
            raise ValueError("arms that do not begin with the plain step, or twice the same")
        return arms

    def _lengths(self) -> tuple[int, ...]:
        lengths = self._costs.block_lengths
        made_for = lengths, getattr(self._costs, "version", None)
        if made_for != self._made_for:  # after calibrating again other lengths, and other sources, may be usable
            self._usable.clear()
            self._of_source.clear()
            self._made_for = made_for
        return lengths

    def _number(self, key: tuple[str, int]) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.names)
            self.names.append(key)
        return found


class PlainSteps:
    """Seconds by the cost model, in plain steps at the same context. Contexts within a tenth are taken as one."""

    def __init__(self, costs: CostEstimates) -> None:
        self._costs = costs
        self._version: object = None
        self._units: dict[int, float] = {}
        self._rows: dict[tuple[str, int | None, int], Floats] = {}

    def unit(self, context_tokens: int) -> float:
        """Seconds of a plain step."""
        self._keep_up()
        place = _place(context_tokens)
        found = self._units.get(place)
        if found is None:
            found = self._units[place] = self._costs.verify_seconds(1, _context(place))
        return found

    def of(self, source: str, block_length: int, num_draft_tokens: int, context_tokens: int) -> float:
        """Predicted cost of a block that asks for `block_length` tokens and gets `num_draft_tokens`."""
        if block_length == 0:
            return 1.0
        context = _context(_place(context_tokens))
        draft = self._costs.draft_seconds(source, block_length, context)
        return (draft + self._costs.verify_seconds(num_draft_tokens + 1, context)) / self.unit(context_tokens)

    def row(self, source: str, most: int | None, context_tokens: int) -> Floats:
        """[block lengths], predicted cost of blocks that get at most so many tokens; None: all that they ask for."""
        self._keep_up()
        key = (source, most, _place(context_tokens))
        found = self._rows.get(key)
        if found is None:
            lengths = self._costs.block_lengths
            each = [self.of(source, k, k if most is None else min(k, most), context_tokens) for k in lengths]
            found = self._rows[key] = np.array(each)
        return found

    def _keep_up(self) -> None:
        version = getattr(self._costs, "version", None)  # grows when estimates are refined
        if version != self._version or len(self._rows) >= _MAX_CACHED:
            self._units.clear()
            self._rows.clear()
            self._version = version


def _place(context_tokens: int) -> int:
    return round(8.0 * math.log2(1 + context_tokens))


def _context(place: int) -> int:
    """Whoever asks first, for contexts of a place the answer is the same."""
    return max(1, round(math.exp2(place / 8.0)) - 1)


class BySegment(Generic[T]):
    """Something for each segment, at most MAX_SEGMENTS of them: the one not seen for longest is forgotten."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def seen(self, segment: str) -> T:
        found = self._kept.pop(segment, None)
        if found is None:
            found = self._make()
        self._kept[segment] = found  # the newest last
        if len(self._kept) > MAX_SEGMENTS:
            del self._kept[next(iter(self._kept))]
        return found

    def put(self, segment: str, value: T) -> None:
        """In place of what was kept for a segment just seen."""
        self._kept[segment] = value

    def state(self, write: Callable[[T], Any]) -> list[list[Any]]:
        """Pairs, those not seen for longest first: a JSON object may lose its order in a database."""
        return [[segment, write(kept)] for segment, kept in self._kept.items()]

    def restored(self, state: Any, read: Callable[[Any], T]) -> BySegment[T]:
        restored = BySegment(self._make)
        for segment, kept in state:
            if type(segment) is not str:
                raise ValueError(f"segment {segment!r} is no text")
            restored._kept[segment] = read(kept)
        return restored


class Pending(Generic[T]):
    """What was noted at a choice, for when its outcome comes. Requests that run at once differ in their contexts."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, int], T] = {}

    def note(self, context: BlockContext, what: T) -> None:
        key = (context.segment, context.context_tokens)
        self._noted.pop(key, None)
        self._noted[key] = what  # the newest last
        if len(self._noted) > _MAX_PENDING:  # blocks that ended in an error have no outcome
            del self._noted[next(iter(self._noted))]

    def take(self, outcome: BlockOutcome) -> T | None:
        return self._noted.pop((outcome.segment, outcome.context_tokens), None)
