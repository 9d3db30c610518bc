"""Measured seconds by tokens verified and by context, read off between the measured points. Plain numbers in JSON."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

MOST_BLOCK = 1024
"""Draft tokens in a block, at most: policies keep a price for each number up to the longest."""
MOST_TOKENS = 1 << 40
"""On the axis of a curve."""
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
"""Of a point; what lies beyond was never measured."""
PADDING_GAIN = 0.05
"""A wider forward must be cheaper by this share before padding to it is worth while: less is noise."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds on a grid: one row per context, one column per number of tokens. No smoothing across steps."""

    contexts: tuple[int, ...]  # ascending
    tokens: tuple[int, ...]  # ascending
    seconds: tuple[tuple[float, ...], ...]  # [contexts][tokens]
    composed: frozenset[tuple[int, int]] = frozenset()  # (context, tokens) not measured: see autospec/costs/fitting.py

    def at(self, num_tokens: int, context_tokens: int) -> float:
        """Linear between grid points; beyond the last ones along the last slope, which is never taken as negative."""
        below, context_share = _place(self.contexts, context_tokens)
        left, tokens_share = _place(self.tokens, num_tokens)
        rows = [self._in_row(row, left, tokens_share) for row in (below, min(below + 1, len(self.contexts) - 1))]
        return _between(rows[0], rows[1], context_share)

    def is_extrapolated(self, num_tokens: int, context_tokens: int) -> bool:
        """Was nothing measured that far out? Contexts shorter than the shortest measured cost as much as that one."""
        return num_tokens > self.tokens[-1] or context_tokens > self.contexts[-1]

    def _in_row(self, row: int, left: int, share: float) -> float:
        seconds = self.seconds[row]
        return _between(seconds[left], seconds[min(left + 1, len(seconds) - 1)], share)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of verification and of each draft source as they were measured on one device."""

    block_lengths: tuple[int, ...]
    verify: Curve  # tokens = drafts + 1
    drafts: Mapping[str, Curve]  # tokens = block length
    measured_at: str = ""  # UTC, ISO 8601
    calibration_seconds: float = 0.0
    spread: float = 0.0  # how far repeats of a point lie from their median, as a share of it; the median over points
    failures: Mapping[str, str] = field(default_factory=dict)  # sources that could not be timed, and why
    catch_up: Mapping[str, Curve] = field(default_factory=dict)  # tokens = of a text that a draft reads at once

    @property
    def version(self) -> int:
        """A table never changes."""
        return 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """One target forward over `num_tokens` tokens (drafts + 1) after `context_tokens` tokens."""
        return self.verify.at(num_tokens, context_tokens)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        """One proposal of `block_length` tokens; infinite for a source that could not be timed."""
        curve = self.drafts.get(source)
        return curve.at(block_length, context_tokens) if curve is not None else math.inf

    def catch_up_seconds(self, source: str, num_tokens: int) -> float | None:
        """A draft's reading of so many tokens that it has not seen; None where that was not measured."""
        curve = self.catch_up.get(source)
        return None if curve is None else curve.at(num_tokens, 1)

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        """Does the answer lie beyond what was measured? Of verification, or of a source's `num_tokens` drafts."""
        curve = self.verify if source is None else self.drafts.get(source)
        return curve is None or curve.is_extrapolated(num_tokens, context_tokens)

    def cheapest_width(self, num_tokens: int, context_tokens: int) -> int:
        """The width, `num_tokens` or a measured wider one, that a forward over `num_tokens` tokens costs least at."""
        return cheapest_width(self.verify.tokens, self.verify_seconds, num_tokens, context_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `from_json`."""
        return {
            "block_lengths": list(self.block_lengths),
            "verify": _curve_to_json(self.verify),
            "drafts": {name: _curve_to_json(curve) for name, curve in self.drafts.items()},
            "catch_up": {name: _curve_to_json(curve) for name, curve in self.catch_up.items()},
            "measured_at": self.measured_at,
            "calibration_seconds": self.calibration_seconds,
            "spread": self.spread,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CostTable:
        """The table that `to_json` wrote.

        Raises:
            ValueError: the values are not those of a table.
        """
        try:
            table = cls(
                block_lengths=_ascending(values["block_lengths"], low=1, high=MOST_BLOCK),
                verify=_curve_from_json(values["verify"]),
                drafts={str(name): _curve_from_json(curve) for name, curve in values["drafts"].items()},
                measured_at=str(values["measured_at"]),
                calibration_seconds=float(values["calibration_seconds"]),
                spread=float(values["spread"]),
                catch_up={str(name): _curve_from_json(curve) for name, curve in values["catch_up"].items()},
            )
            if not all(0.0 <= value < math.inf for value in (table.calibration_seconds, table.spread)):
                raise ValueError("seconds of calibration and spread must be numbers of at least 0")
            if table.measured_at and datetime.fromisoformat(table.measured_at).tzinfo is None:
                raise ValueError(f"measured at {table.measured_at} of no time zone")
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"no cost table: {type(error).__name__}: {error}") from error
        return table


def cheapest_width(widths: Sequence[int], seconds: Any, num_tokens: int, context_tokens: int) -> int:
    """Args: widths: measured; seconds: of (num_tokens, context_tokens), called for each of them."""
    needed = seconds(num_tokens, context_tokens)
    wider = [(seconds(width, context_tokens), width) for width in widths if width > num_tokens]
    least, width = min(wider, default=(math.inf, num_tokens))
    return width if least < needed * (1.0 - PADDING_GAIN) else num_tokens


def _place(grid: Sequence[int], value: float) -> tuple[int, float]:
    """Index of the grid point below, and how far on to the next: 0 to 1, and more beyond the last."""
    if len(grid) == 1 or value <= grid[0]:
        return 0, 0.0
    left = min(bisect_right(grid, value) - 1, len(grid) - 2)
    return left, (value - grid[left]) / (grid[left + 1] - grid[left])


def _between(low: float, high: float, share: float) -> float:
    """Beyond `high` a falling curve is not believed to fall on."""
    return low + (high - low) * share if share <= 1.0 else high + max(0.0, high - low) * (share - 1.0)


def _curve_to_json(curve: Curve) -> dict[str, Any]:
    return {
        "contexts": list(curve.contexts),
        "tokens": list(curve.tokens),
        "seconds": [list(row) for row in curve.seconds],
        "composed": sorted(list(cell) for cell in curve.composed),
    }


def _curve_from_json(values: Mapping[str, Any]) -> Curve:
    contexts, tokens = _ascending(values["contexts"], low=0), _ascending(values["tokens"], low=1)
    seconds = tuple(tuple(float(value) for value in row) for row in values["seconds"])
    if len(seconds) != len(contexts) or any(len(row) != len(tokens) for row in seconds):
        raise ValueError(f"{len(contexts)} contexts and {len(tokens)} widths, and seconds of another shape")
    if not all(LEAST_SECONDS <= value <= MOST_SECONDS for row in seconds for value in row):
        raise ValueError("seconds must be positive numbers, and such as can be measured")
    return Curve(contexts, tokens, seconds, frozenset((int(c), int(t)) for c, t in values["composed"]))


def _ascending(values: Any, low: int, high: int = MOST_TOKENS) -> tuple[int, ...]:
    found = tuple(values)
    is_whole = found and all(type(value) is int and low <= value <= high for value in found)
    if not is_whole or list(found) != sorted(set(found)):
        raise ValueError(f"{found!r:.60}: ascending whole numbers from {low} to {high} are needed")
    return found
