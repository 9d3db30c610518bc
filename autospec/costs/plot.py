"""Cost curves to look at: an SVG in a page of its own, and a line of blocks for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autospec.costs.table import CostTable, Curve

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 56, 110, 30, 44
SHADES = ("#0a6e5c", "#b3400a", "#5b4bb5", "#8a6d00", "#59636e")
BLOCKS = "▁▂▃▄▅▆▇█"

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --line: #3a424b; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 44rem; padding: 0 1rem; color: var(--text); }
svg { display: block; width: 100%; height: auto; margin: 1rem 0; } svg text { fill: var(--text); font-size: 12px; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 2; }
"""


def page(table: CostTable, title: str) -> str:
    """One HTML file, nothing fetched: a panel for verification and one for each draft source."""
    panels = [panel(table.verify, "verification, by tokens verified")]
    panels += [panel(curve, f"{name}, by tokens drafted") for name, curve in table.drafts.items()]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>Measured {escape(table.measured_at)}. Dots are measured; where a line has none, a "
        "context's addition was read off between its measured widths.</p>" + "".join(panels) + "</html>\n"
    )


def panel(curve: Curve, title: str) -> str:
    """An `<svg>` element: milliseconds by tokens, a line for each context."""
    most = 1000 * max(max(row) for row in curve.seconds) * 1.08
    last = max(curve.tokens[-1], 2)

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / last

    def y(milliseconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * milliseconds / most

    parts = [f'<text x="{LEFT}" y="16">{escape(title)}, milliseconds</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        height = y(most * share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{most * share:.3g}</text>')
    for tokens in curve.tokens:
        parts.append(f'<text x="{x(tokens):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tokens}</text>')
    for index, (context, row) in enumerate(zip(curve.contexts, curve.seconds, strict=True)):
        shade = SHADES[index % len(SHADES)]
        places = [(x(tokens), y(1000 * seconds)) for tokens, seconds in zip(curve.tokens, row, strict=True)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{points}" stroke="{shade}"/>')
        for tokens, (a, b) in zip(curve.tokens, places, strict=True):
            if (context, tokens) not in curve.composed:
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{shade}"/>')
        a, b = places[-1]
        parts.append(f'<text x="{a + 8:.1f}" y="{b + 4:.1f}">after {context:,}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def sparkline(values: Sequence[float]) -> str:
    """A block for each value, from the lowest one to the highest."""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)
