"""The speed-up of each group as an SVG: a dot, its interval, and a line at 1, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from autospec.telemetry.labels import visible
from autospec.telemetry.rows import SegmentRow

MOST_ROWS = 40
NAME_COLUMNS = 30
LEFT, RIGHT, WIDTH, ROW_HEIGHT, TOP, BOTTOM = 230, 24, 800, 26, 12, 40
SLOWEST, FASTEST = 1 / 32, 64.0  # ends that the axis never passes
TICKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


def speed_up_plot(rows: Sequence[SegmentRow]) -> str:
    """The plot.

    Args:
        rows: the groups; those without a speed-up are left out.

    Returns:
        An `<svg>` element to put in a page, or an empty string if no group has a speed-up.
    """
    shown = [row for row in rows if row.speed_up is not None][:MOST_ROWS]
    if not shown:
        return ""
    values = [_clamp(value) for row in shown for value in (row.speed_up, row.speed_up_low, row.speed_up_high) if value]
    low, high = min(0.8, *values) / 1.1, max(1.25, *values) * 1.1

    def x(value: float) -> float:
        place = (math.log(_clamp(value)) - math.log(low)) / (math.log(high) - math.log(low))
        return LEFT + min(max(place, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    bottom = TOP + ROW_HEIGHT * len(shown)
    parts = []
    for tick in _ticks(low, high):
        kind = "one" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 34}" text-anchor="middle">'
        "speed-up (1 = control, logarithmic)</text>"
    )
    for index, row in enumerate(shown):
        parts.append(_row(row, TOP + ROW_HEIGHT * (index + 0.5), x))
    height = bottom + BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Speed-up of each group with its 95 % interval">'
        + "".join(parts)
        + "</svg>"
    )


def _row(row: SegmentRow, y: float, x: Callable[[float], float]) -> str:
    name = visible(" / ".join(row.group.values()) if row.group else "all", NAME_COLUMNS)
    low, high, middle = row.speed_up_low or 0.0, row.speed_up_high or 0.0, row.speed_up or 0.0
    kind = row.verdict or "unclear"
    title = f"{name}: {middle:.2f} ({low:.2f} to {high:.2f}), {kind}"
    return (
        f'<g class="{kind}"><title>{escape(title)}</title>'
        f'<text class="name" x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end" direction="ltr">{escape(name)}</text>'
        f'<line class="interval" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<circle cx="{x(middle):.1f}" cy="{y:.1f}" r="5"/></g>'
    )


def _ticks(low: float, high: float) -> list[float]:
    found = [tick for tick in TICKS if low <= tick <= high]
    while len(found) > 9:
        found = [tick for index, tick in enumerate(found) if (index - found.index(1.0)) % 2 == 0]
    return found


def _clamp(value: float) -> float:
    return min(max(value, SLOWEST), FASTEST)
