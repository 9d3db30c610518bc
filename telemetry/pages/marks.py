"""Small drawings that need no script: the speed-up of a segment on the shared axis, and its trend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from markupsafe import Markup

from autospec.telemetry.rows import SegmentRow
from autospec.telemetry.tables import number

WIDTH, HEIGHT, MARGIN = 220, 26, 8
TREND_WIDTH, TREND_HEIGHT = 120, 26
LEAST_GAP = 30
SLOWEST, FASTEST = 1 / 32, 64.0  # ends that the axis never passes
TICKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
SHAPES = {
    "faster": "M{x:.1f} {top:.1f}l6 11h-12z",
    "slower": "M{x:.1f} {bottom:.1f}l6 -11h-12z",
    "unclear": "M{x:.1f} {top:.1f}l6 6l-6 6l-6 -6z",
}
"""A triangle up, a triangle down, a diamond: the verdict can be seen without colours."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis of speed-ups, 1 on it, shared by the rows of a table."""

    low: float
    high: float

    def x(self, value: float) -> float:
        place = math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return MARGIN + place * (WIDTH - 2 * MARGIN)

    @property
    def ticks(self) -> list[float]:
        """Those with room for their numbers, 1 among them."""
        found = [1.0]
        for tick in sorted(TICKS, key=lambda tick: abs(math.log(tick))):
            has_room = all(abs(self.x(tick) - self.x(other)) >= LEAST_GAP for other in found)
            if self.low <= tick <= self.high and has_room:
                found.append(tick)
        return sorted(found)


def axis_of(rows: Sequence[SegmentRow]) -> Axis:
    """An axis that holds every interval, within bounds."""
    values = [value for row in rows for value in (row.speed_up, row.speed_up_low, row.speed_up_high) if value]
    held = [min(max(value, SLOWEST), FASTEST) for value in values]
    return Axis(min([0.8, *held]) / 1.1, max([1.25, *held]) * 1.1)


def axis_head(axis: Axis) -> Markup:
    """The ticks, for the head of the column."""
    parts = [
        f'<text class="tick" x="{axis.x(tick):.1f}" y="15" text-anchor="middle">{tick:g}</text>' for tick in axis.ticks
    ]
    return _svg(WIDTH, 20, "axis", parts, "axis of the speed-up, logarithmic")


def dot(row: SegmentRow, axis: Axis) -> Markup:
    """The speed-up with its interval; without a verdict the axis alone."""
    lines = [
        f'<line class="{"one" if tick == 1 else "grid"}" x1="{axis.x(tick):.1f}" x2="{axis.x(tick):.1f}" y1="0" '
        f'y2="{HEIGHT}"/>'
        for tick in axis.ticks
    ]
    speed_up, low, high = row.speed_up, row.speed_up_low, row.speed_up_high
    if speed_up is None:
        return _svg(WIDTH, HEIGHT, "dot", lines, "no speed-up")
    middle = HEIGHT / 2
    kind = row.verdict or "unclear"
    label = f"speed-up {number(speed_up)}"
    if low is not None and high is not None:
        lines.append(
            f'<line class="interval" x1="{axis.x(low):.1f}" x2="{axis.x(high):.1f}" y1="{middle}" y2="{middle}"/>'
        )
        label += f", 95 % interval {number(low)} to {number(high)}, {kind}"
    shape = SHAPES[kind].format(x=axis.x(speed_up), top=middle - 6, bottom=middle + 6)
    lines.append(f'<path class="shape" d="{shape}"/>')
    return _svg(WIDTH, HEIGHT, f"dot {kind}", lines, label)


def trend(values: Sequence[float | None]) -> Markup:
    """Speed-up over time on a logarithmic scale with a line at 1; gaps stay gaps."""
    there = [value for value in values if value is not None and value > 0]
    if not there:
        return Markup('<span class="absent">-</span>')
    most = max(abs(math.log(min(max(value, SLOWEST), FASTEST))) for value in there)
    span = max(most, math.log(1.25))

    def y(value: float) -> float:
        held = math.log(min(max(value, SLOWEST), FASTEST))
        return TREND_HEIGHT / 2 - held / span * (TREND_HEIGHT / 2 - 4)

    def x(place: int) -> float:
        return 3 + place * (TREND_WIDTH - 6) / max(1, len(values) - 1)

    middle = TREND_HEIGHT / 2
    parts = [f'<line class="one" x1="0" x2="{TREND_WIDTH}" y1="{middle}" y2="{middle}"/>']
    for run in gaps([value if value is not None and value > 0 else None for value in values]):
        points = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in run)
        if len(run) == 1:
            parts.append(f'<circle class="last" cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" r="2.5"/>')
        else:
            parts.append(f'<polyline class="line" points="{points}"/>')
    label = f"trend: {number(there[0])} at first, {number(there[-1])} at last"
    return _svg(TREND_WIDTH, TREND_HEIGHT, "trend", parts, label)


def gaps(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Runs of values with their places: a line is drawn within each, and none across a gap."""
    runs: list[list[tuple[int, float]]] = []
    there = [(place, value) for place, value in enumerate(values) if value is not None]
    for before, now in pairwise([(-2, 0.0), *there]):
        if now[0] - before[0] > 1:
            runs.append([])
        runs[-1].append(now)
    return runs


def _svg(width: int, height: int, kind: str, parts: Sequence[str], label: str) -> Markup:
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
