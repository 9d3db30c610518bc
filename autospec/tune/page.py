"""The report of a search as one HTML file: no scripts, nothing fetched, light and dark by the reader's setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from autospec.telemetry.labels import visible
from autospec.telemetry.pages.marks import TICKS
from autospec.telemetry.pages.rendering import style
from autospec.tune.choice import Choice, SegmentChoice
from autospec.tune.curves import ALL, Curve, Point
from autospec.tune.intervals import Interval, said
from autospec.tune.report import best_of, label, surplus
from autospec.tune.search import Tried

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 820, 56, 270, 12, 44
LEAST_HEIGHT, LABEL_HEIGHT, TICK_GAP = 250, 17, 18
SLOWEST, FASTEST = 0.4, 16.0  # ends that the axis never passes; lines leave the plot there
SHADES = 6
NAME_COLUMNS, SOURCE_COLUMNS, TEXT_COLUMNS = 60, 16, 300
SHOWN_ABOVE = "speed_up"
"""In what the policy's file is made of: the table of segments has it."""

STYLE = """
svg { display: block; width: 100%; max-width: 60rem; height: auto; }
svg text { fill: var(--text); font-size: 13px; unicode-bidi: isolate; }
circle { stroke-width: 2; }
.s0 { --shade: var(--s0); } .s1 { --shade: var(--s1); } .s2 { --shade: var(--s2); }
.s3 { --shade: var(--s3); } .s4 { --shade: var(--s4); } .s5 { --shade: var(--s5); }
.headline { font-size: 1.25rem; margin-bottom: .3rem; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
.scroll th.name { white-space: normal; min-width: 8rem; }
h3 { font-size: 1rem; margin: 2rem 0 .2rem; overflow-wrap: anywhere; unicode-bidi: isolate; } figure { margin: 0; }
.band { fill: var(--shade); fill-opacity: .14; stroke: none; }
.line { fill: none; stroke: var(--shade); stroke-width: 2; } .more .line { stroke-dasharray: 5 3; }
.dot circle { stroke: var(--shade); fill: var(--back); } .dot.best circle { fill: var(--shade); }
.leader { stroke: var(--shade, var(--soft)); stroke-width: 1; fill: none; opacity: .7; }
.held { stroke: var(--text); stroke-width: 2; stroke-dasharray: 2 4; stroke-linecap: round; }
.whisker { stroke: var(--text); stroke-width: 3; stroke-linecap: round; }
svg .to { fill: var(--shade, var(--text)); font-weight: 600; }
"""
"""What this page has beyond the style sheet that it shares with the report and the dashboard."""


def page(
    choice: Choice,
    tried: Sequence[Tried],
    curves: Mapping[str, Sequence[Curve]],
    notes: Sequence[str],
    made: Mapping[str, Any],
) -> str:
    """A whole page: what was found, for whom and why, plots for all traffic and each segment, and where it is from.

    Args:
        choice: what each segment got.
        tried: all policies that were walked to the end.
        curves: as `autospec.tune.curves.curves` makes them.
        notes: lines to show as they are.
        made: of the policy's file: traffic, target, device, date, versions, as plain values.

    Returns:
        The document. Every name in it is escaped and shortened.
    """
    title = "autospec tune"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style()}{STYLE}</style>\n</head>\n<body>\n"
        f'<header><p class="brand">autospec</p></header>\n<main>\n<h1>{title}</h1>\n'
        + "\n".join(_body(choice, tried, curves, notes, made))
        + "\n</main>\n</body>\n</html>\n"
    )


def _body(
    choice: Choice,
    tried: Sequence[Tried],
    curves: Mapping[str, Sequence[Curve]],
    notes: Sequence[str],
    made: Mapping[str, Any],
) -> Iterator[str]:
    yield (
        f'<p class="headline">Speed-up over plain decoding, on requests held out: <strong>{said(choice.held_out)}'
        f'</strong></p>\n<p class="soft">In training {said(choice.train)}; training minus held out '
        f"{surplus(choice):+.3f} (much above 0: overfitted). {len(tried)} policies were tried. "
        "In brackets 95 % intervals.</p>"
    )
    yield "<h2>Segments</h2>"
    yield _segments(choice)
    yield "<h2>Predicted speed-up by block length</h2>"
    yield (
        "<p>Each source at one block length in every block, walked along the recorded answers. Bands are 95 % "
        "intervals; a filled dot is the fastest of its line; the dotted line and the bar at its end are what was "
        "chosen, on requests held out.</p>"
    )
    yield _figure(0, "all traffic", curves.get(ALL, ()), choice.held_out, "the tuned policy")
    for number, each in enumerate(choice.segments, 1):
        own = curves.get(each.segment, ()) if each.segment != ALL else ()
        yield _figure(number, _name(each.segment), own, each.held_out, label(each.part))
    yield "<h2>Where it is from</h2>"
    rows = [[_text(key), _text(value)] for key, value in _flat("", made)]
    yield _table("What was tuned, with what, on what.", ["", ""], rows, texts=(0, 1))
    yield from (f"<p>{_text(note)}</p>" for note in notes)


def _segments(choice: Choice) -> str:
    header = ["segment", "policy", "requests to choose by", "requests held out", "speed-up in training"]
    header += ["speed-up held out", "why"]
    rows = [_segment(each) for each in choice.segments]
    rows.append(
        [
            "all",
            "",
            str(sum(each.train_requests for each in choice.segments)),
            str(sum(each.held_out_requests for each in choice.segments)),
            said(choice.train),
            said(choice.held_out),
            "",
        ]
    )
    verdicts = [_verdict(found) for found in (*(each.held_out for each in choice.segments), choice.held_out)]
    caption = "What each segment got, and why."
    return _table(caption, header, rows, texts=(0, 1, 6), verdicts=(5, verdicts), has_all=True)


def _segment(each: SegmentChoice) -> list[str]:
    return [
        escape(_name(each.segment)),
        escape(label(each.part)),
        str(each.train_requests),
        str(each.held_out_requests),
        said(each.train),
        said(each.held_out),
        _text(each.why),
    ]


def _verdict(found: Interval | None) -> str:
    if found is None or not found.is_sure or found.low <= 1.0 <= found.high:
        return ""
    return "faster" if found.low > 1.0 else "slower"


def _table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Sequence[int] = (0,),
    verdicts: tuple[int, Sequence[str]] | None = None,
    has_all: bool = False,
) -> str:
    """Cells are escaped already. Args: texts: columns of words; has_all: the last row is one of all others."""
    head = "".join(
        f'<th scope="col"{_kind("name" if place in texts else "")}>{name}</th>' for place, name in enumerate(header)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = f'<th scope="row" class="name">{row[0]}</th>'
        for place, cell in enumerate(row[1:], 1):
            kind = "word" if place in texts else ""
            if verdicts is not None and place == verdicts[0]:
                kind = verdicts[1][number]
            cells += f"<td{_kind(kind)}>{cell}</td>"
        lines.append(f"<tr{_kind('all' if has_all and number == len(rows) - 1 else '')}>{cells}</tr>")
    start = f"<thead><tr>{head}</tr></thead>\n" if any(header) else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n{start}<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table></div>"
    )


def _kind(name: str) -> str:
    return f' class="{name}"' if name else ""


def _figure(number: int, name: str, curves: Sequence[Curve], held_out: Interval | None, chosen: str) -> str:
    """Args: name, chosen: fit to be shown, not escaped."""
    judged = f"held out {said(held_out)}" if held_out is not None else "no request held out"
    head = f"<h3>{escape(name)}</h3>\n"
    caption = f"<figcaption>Chosen: {escape(chosen)}, {judged}.</figcaption>"
    if not curves:
        return f"{head}<figure>{caption}<p>Nothing to predict by: no request, or no draft source.</p></figure>"
    header = ["source", "block length", "predicted speed-up", "blocks", "tokens a block (+1 included)"]
    rows = [[escape(_source(curve)), *_point(point)] for curve in curves for point in curve.points]
    numbers = _table(f"Predicted speed-up by source and block length: {name}.", header, rows)
    plot = curve_plot(curves, name, held_out, number)
    return f"{head}<figure>{caption}\n{plot}\n<details><summary>numbers</summary>{numbers}</details></figure>"


def _point(point: Point) -> list[str]:
    return [str(point.block_length), said(point.speed_up), f"{point.blocks:,}", f"{point.mean_accepted:.2f}"]


def curve_plot(curves: Sequence[Curve], name: str, held_out: Interval | None, number: int = 0) -> str:
    """Speed-up over block length, both logarithmic: a line and a band for each source, a line at 1 for off.

    Args:
        curves: at least one.
        name: of the segment, fit to be shown.
        held_out: of what was chosen, drawn as a line across; None: it is left out.
        number: of the plot in its page.

    Returns:
        An `<svg>` element.
    """
    points = [point for curve in curves for point in curve.points]
    bottom = TOP + max(LEAST_HEIGHT, LABEL_HEIGHT * (len(curves) + 2))
    right = WIDTH - RIGHT
    x, y = _across(max(point.block_length for point in points), right), _up(points, held_out, bottom)
    inside = f"inside{number}"
    parts = [
        f"<desc>{escape('; '.join(f'{_source(curve)}, fastest {best_of(curve)}' for curve in curves))}</desc>",
        f'<clipPath id="{inside}">'
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}"/></clipPath>',
        *_axes({point.block_length for point in points}, x, y, right, bottom),
    ]
    ends = [(y(1.0), "off", "")]
    drawn = []
    for place, curve in enumerate(curves):
        kind = f"s{place % SHADES}" + (" more" if place >= SHADES else "")
        drawn.append(f'<g class="{kind}">{_line(curve, x, y)}</g>')
        best = curve.best
        found = f"{best.speed_up.ratio:.2f}x at {best.block_length}" if best.block_length else "off is faster"
        ends.append((y(curve.points[-1].speed_up.ratio), f"{_source(curve)}: {found}", kind))
    if held_out is not None:
        height = y(held_out.ratio)
        drawn.append(f'<line class="held" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        drawn.append(
            f'<line class="whisker" x1="{right - 5}" x2="{right - 5}" y1="{y(held_out.high):.1f}" '
            f'y2="{y(held_out.low):.1f}"><title>{escape(f"held out {said(held_out)}")}</title></line>'
        )
        ends.append((height, f"chosen, held out: {held_out.ratio:.2f}x", ""))
    parts.append(f'<g clip-path="url(#{inside})">{"".join(drawn)}</g>')
    parts += _names(ends, right, bottom)
    title = escape(f"Predicted speed-up by block length: {name}")
    return f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _across(longest: int, right: int) -> Callable[[int], float]:
    """Where a block length is: the first ones, which differ most, have the most room."""
    first, last = LEFT + 8, right - 18
    return lambda length: first + (last - first) * math.log1p(length) / math.log1p(max(longest, 1))


def _up(points: Sequence[Point], held_out: Interval | None, bottom: float) -> Callable[[float], float]:
    """Where a speed-up is."""
    found = [point.speed_up for point in points] + ([] if held_out is None else [held_out])
    values = [min(max(value, SLOWEST), FASTEST) for each in found for value in (each.ratio, each.low, each.high)]
    low, high = math.log(min(0.8, *values) / 1.05), math.log(max(1.25, *values) * 1.05)
    return lambda value: bottom - (bottom - TOP) * (math.log(max(value, 1e-3)) - low) / (high - low)


def _axes(
    lengths: set[int], x: Callable[[int], float], y: Callable[[float], float], right: int, bottom: float
) -> Iterator[str]:
    heights: list[float] = []
    for tick in sorted(TICKS, key=lambda tick: abs(math.log(tick))):  # 1 comes first
        height = y(tick)
        if not TOP <= height <= bottom or any(abs(height - other) < TICK_GAP for other in heights):
            continue
        heights.append(height)
        kind = "one" if tick == 1 else "grid"
        yield f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{tick:g}x</text>'
    last = -math.inf
    for length in sorted(lengths):
        if x(length) - last >= TICK_GAP:
            last = x(length)
            name = length or "off"
            yield f'<text class="tick" x="{last:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{name}</text>'
    middle = (LEFT + right) / 2
    yield f'<text class="tick" x="{middle}" y="{bottom + 36:.1f}" text-anchor="middle">block length</text>'


def _line(curve: Curve, x: Callable[[int], float], y: Callable[[float], float]) -> str:
    def path(values: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{x(length):.1f},{y(value):.1f}" for length, value in values)

    above = [(point.block_length, point.speed_up.high) for point in curve.points]
    below = [(point.block_length, point.speed_up.low) for point in reversed(curve.points)]
    middle = [(point.block_length, point.speed_up.ratio) for point in curve.points]
    parts = [f'<polygon class="band" points="{path([*above, *below])}"/>']
    parts.append(f'<polyline class="line" points="{path(middle)}"/>')
    for point in curve.points[1:]:
        tokens = f"{point.mean_accepted:.2f} tokens a block"
        title = f"{_source(curve)}:{point.block_length} {said(point.speed_up)}, {tokens}"
        is_best = point is curve.best
        parts.append(
            f'<g class="dot{" best" if is_best else ""}"><title>{escape(title)}</title><circle '
            f'cx="{x(point.block_length):.1f}" cy="{y(point.speed_up.ratio):.1f}" r="{5 if is_best else 3}"/></g>'
        )
    return "".join(parts)


def _names(ends: Sequence[tuple[float, str, str]], right: int, bottom: float) -> Iterator[str]:
    """What each line is, beside its end. Args: ends: height, name and class of each."""
    inside = sorted((min(max(height, TOP), bottom), name, kind) for height, name, kind in ends)
    heights = spread([height for height, _, _ in inside], LABEL_HEIGHT, TOP, bottom)
    for (end, name, kind), height in zip(inside, heights, strict=True):
        yield (
            f'<g{_kind(kind)}><polyline class="leader" points="{right + 2},{end:.1f} {right + 14},{height:.1f}"/>'
            f'<text class="to" x="{right + 18}" y="{height + 4:.1f}" direction="ltr">{escape(name)}</text></g>'
        )


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending heights moved until they are `gap` apart, between `low` and `high` where there is room for all."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else max(height, low))
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], high - gap * (len(moved) - 1 - place))
    return moved


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Rows of nested values, with the path to each; policies by their labels."""
    if name and isinstance(value, Mapping) and ("policy" in value or "block_length" in value):
        yield name, label(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if name or key != SHOWN_ABOVE:
                own = "all" if key == ALL else str(key)
                yield from _flat(f"{name}.{own}" if name else own, each)
    elif isinstance(value, (list, tuple)):
        yield name, ", ".join(map(str, value))
    elif value is not None:
        yield name, str(value)


def _name(segment: str) -> str:
    return visible(segment, NAME_COLUMNS)


def _source(curve: Curve) -> str:
    return visible(curve.source, SOURCE_COLUMNS)


def _text(value: str) -> str:
    return escape(visible(value, TEXT_COLUMNS))
