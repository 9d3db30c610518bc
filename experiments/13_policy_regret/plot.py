"""Small line plots side by side, as one SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, COLUMNS = 300, 200, 46, 28, 3
SHADES = ("#8a6d00", "#c9a227", "#59636e", "#9aa4ae", "#b3400a", "#d98a5f", "#5b4bb5", "#8f7fe0", "#2a78c2", "#0a6e5c")


def lines(plots: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """A panel for each plot: plain steps lost against the oracle, over the traffic; the last line is drawn thickest."""
    names = list(dict.fromkeys(name for plot in plots.values() for name in plot))
    shades = dict(zip(names, SHADES[-len(names) :], strict=True))
    rows = -(-len(plots) // COLUMNS)
    parts = [_panel(title, plot, shades, index) for index, (title, plot) in enumerate(plots.items())]
    bottom = rows * HEIGHT + 20
    for index, name in enumerate(names):
        x, y = 20 + 300 * (index % COLUMNS), bottom + 18 * (index // COLUMNS)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{shades[name]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y - 4}">{name}</text>')
    height = bottom + 18 * (-(-len(names) // COLUMNS)) + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * COLUMNS} {height}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>' + "".join(parts) + "</svg>\n"
    )


def _panel(title: str, plot: Mapping[str, Sequence[float]], shades: Mapping[str, str], index: int) -> str:
    left, top = WIDTH * (index % COLUMNS) + LEFT, HEIGHT * (index // COLUMNS) + TOP
    width, height = WIDTH - LEFT - 12, HEIGHT - TOP - 24
    values = [value for line in plot.values() for value in line]
    low, high = min(0.0, *values), max(1.0, *values)

    def y(value: float) -> float:
        return top + height * (high - value) / (high - low)

    parts = [f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>']
    for tick in (low, 0.0, high):
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#d1d9e0"/>')
        parts.append(f'<text x="{left - 4}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0f}</text>')
    for name, line in plot.items():
        points = " ".join(f"{left + width * (i + 1) / len(line):.1f},{y(v):.1f}" for i, v in enumerate(line))
        thickness = 2.4 if name == list(plot)[-1] else 1.2
        parts.append(f'<polyline points="{points}" fill="none" stroke="{shades[name]}" stroke-width="{thickness}"/>')
    return "".join(parts)
