"""The charts of the page of one segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autospec.telemetry.dashboard.buckets import Times
from autospec.telemetry.dashboard.chart import (
    DASHES,
    NAME_COLUMNS,
    PATTERNS,
    SYMBOLS,
    Chart,
    log_axis,
    plotly_text,
)
from autospec.telemetry.dashboard.segment import ActionSums, Change, Position, Predicted, Segment
from autospec.telemetry.labels import visible
from autospec.telemetry.pages.formats import count, duration, iso, percent
from autospec.telemetry.pages.rendering import moment
from autospec.telemetry.rows import SegmentRow, ratio
from autospec.telemetry.tables import ABSENT, number
from autospec.types import PhaseSeconds

MOST_LENGTHS = 33
HOST_PHASES = ("correction", "emission", "other")

Values = Sequence[float | None]


def over_time(times: Times, changes: Sequence[Change]) -> Chart:
    """Speed-up by stretch of time, with policy changes as lines."""
    starts, speed_ups = times.span.starts, times.speed_ups
    counts = [times.sums.get(n) for n in times.numbers]
    notes = [
        f"{count(each.requests)} requests, {count(each.control_requests)} control" if each else "" for each in counts
    ]
    numbers: dict[str, list[str]] = {}
    for place, change in enumerate(changes, 1):
        numbers.setdefault(iso(change.at), []).append(str(place))
    marks = [
        {
            "type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at,
            "line": {"width": 1, "dash": "dot"},
        }
        for at in numbers
    ]  # fmt: skip
    labels = [
        {
            "xref": "x", "yref": "paper", "x": at, "y": 1.0, "yanchor": "bottom", "showarrow": False,
            "text": ", ".join(those[:4]) + (" ..." if len(those) > 4 else ""), "font": {"size": 11},
        }
        for at, those in numbers.items()
    ]  # fmt: skip
    known = [value for value in speed_ups if value is not None]
    return Chart(
        name="over-time",
        title=f"Speed-up by {times.span.step_words} (UTC), with policy changes",
        terms=("speed-up", "policy change"),
        text=f"{len(known)} of {times.span.count} stretches have a speed-up"
        + (f", from {number(min(known))} to {number(max(known))}" if known else ""),
        traces=(
            {
                "type": "scatter", "mode": "lines+markers", "name": "speed-up", "x": [iso(start) for start in starts],
                "y": _positive(speed_ups), "text": notes, "connectgaps": False,
                "hovertemplate": "%{x} UTC<br>%{y:.2f}<br>%{text}<extra></extra>",
            },
            {  # not seen: noise is not drawn over the whole height
                "type": "scatter", "mode": "markers", "x": [iso(starts[0])] * 2, "y": [0.8, 1.25],
                "marker": {"opacity": 0}, "hoverinfo": "skip",
            },
        ),
        layout={
            "yaxis": log_axis("speed-up"),
            "xaxis": {"type": "date", "title": {"text": "UTC"}},
            "shapes": [*marks, _line_at_one()],
            "annotations": labels,
            "showlegend": False,
        },
        head=("from", "speed-up", "requests", "control"),
        rows=tuple(
            (
                moment(start),
                number(value),
                count(each.requests) if each else ABSENT,
                count(each.control_requests) if each else ABSENT,
            )
            for start, value, each in zip(starts, speed_ups, counts, strict=True)
            if each is not None
        ),
    )  # fmt: skip


def survival(by_source: Mapping[str, Sequence[Position]]) -> Chart:
    """The share of blocks that get as far as each draft position, by source."""
    traces = tuple(
        {
            "type": "scatter", "mode": "lines+markers", "name": plotly_text(source),
            "x": [each.position for each in positions], "y": [each.survival for each in positions],
            "line": {"dash": DASHES[place % len(DASHES)]}, "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)]},
            "text": [f"{count(each.accepted)} of {count(each.at_risk)} judged were accepted" for each in positions],
            "hovertemplate": "position %{x}: %{y:.0%}<br>%{text}",
        }
        for place, (source, positions) in enumerate(by_source.items())
    )  # fmt: skip
    return Chart(
        name="survival",
        title="Survival of draft tokens by position, by draft source",
        terms=("survival",),
        text=f"{len(by_source)} draft sources",
        traces=traces,
        layout={
            "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "title": {"text": "survival"}},
            "xaxis": {"title": {"text": "position in the block"}, "dtick": 1, "rangemode": "tozero"},
        },
        head=("source", "position", "judged tokens", "accepted tokens", "survival"),
        rows=tuple(
            (visible(source, NAME_COLUMNS), str(each.position), count(each.at_risk), count(each.accepted),
             percent(each.survival))
            for source, positions in by_source.items()
            for each in positions
        ),
    )  # fmt: skip


def split(row: SegmentRow) -> Chart:
    """Seconds per output token by phase, of requests and of their control."""
    sides = [("policy", row.seconds, row.output_tokens), ("control", row.control_seconds, row.control_output_tokens)]
    phases = {name: [_per_token(name, seconds, tokens) for _, seconds, tokens in sides] for name in _PHASES}
    return Chart(
        name="split",
        title="Where the time goes: seconds per output token, by phase",
        terms=("seconds per output token", "host seconds"),
        text="draft, verification, prefill and host, under the policy and in control requests",
        traces=tuple(
            {
                "type": "bar", "orientation": "h", "name": name, "y": [side for side, _, _ in sides],
                "x": [None if value is None else 1e3 * value for value in values],
                "marker": {"pattern": {"shape": PATTERNS[place]}},
                "hovertemplate": "%{y}, " + name + ": %{x:.2f} ms",
            }
            for place, (name, values) in enumerate(phases.items())
        ),
        layout={
            "barmode": "stack",
            "height": 230,
            "xaxis": {"title": {"text": "ms per output token"}},
            "yaxis": {"autorange": "reversed"},
        },
        head=("side", *(f"{name} seconds" for name in (*phases, "total"))),
        rows=tuple(
            (side, *(duration(values[place]) for values in phases.values()), duration(ratio(seconds.total, tokens)))
            for place, (side, seconds, tokens) in enumerate(sides)
        ),
    )  # fmt: skip


def lengths(segment: Segment) -> Chart:
    """Blocks by acceptance length."""
    counts = segment.acceptance_lengths
    total = sum(counts.values())
    found = sorted(counts)[:MOST_LENGTHS]
    return Chart(
        name="lengths",
        title=f"Acceptance lengths in the newest {sum(not each.is_control for each in segment.newest):,} requests",
        terms=("acceptance length",),
        text=f"{count(total)} blocks",
        traces=(
            {
                "type": "bar", "x": found, "y": [counts[length] / total for length in found],
                "text": [count(counts[length]) for length in found], "textposition": "none",
                "hovertemplate": "%{x} tokens: %{y:.1%} (%{text} blocks)<extra></extra>",
            },
        ),
        layout={
            "xaxis": {"title": {"text": "tokens committed by a block"}, "dtick": 1},
            "yaxis": {"title": {"text": "share of blocks"}, "tickformat": ".0%"},
            "showlegend": False,
        },
        head=("acceptance length", "blocks", "share of blocks"),
        rows=tuple((str(length), count(counts[length]), percent(counts[length] / total)) for length in found),
    )  # fmt: skip


def goodput(actions: Sequence[ActionSums], predicted: Sequence[Predicted]) -> Chart:
    """Tokens per second by block length: predicted lines, measured marks, which are the larger the more were chosen."""
    total = sum(each.blocks for each in actions)
    sources = list(dict.fromkeys([*(each.source for each in actions), *(each.source for each in predicted)]))
    traces: list[Mapping[str, Any]] = []
    for place, source in enumerate(sources):
        curve = [each for each in predicted if each.source == source]
        marks = [each for each in actions if each.source == source and each.goodput is not None]
        mark = {"symbol": SYMBOLS[place % len(SYMBOLS)]}
        if curve:
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers" if len(curve) == 1 else "lines", "marker": mark,
                    "name": f"{plotly_text(source)}, predicted", "legendgroup": str(place),
                    "x": [each.block_length for each in curve], "y": [each.goodput for each in curve],
                    "line": {"dash": DASHES[place % len(DASHES)]}, "meta": {"shade": place},
                    "hovertemplate": "block length %{x}: %{y:.1f} tokens/s predicted",
                }
            )  # fmt: skip
        if marks:
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": f"{plotly_text(source)}, measured",
                    "legendgroup": str(place), "meta": {"shade": place},
                    "x": [each.block_length for each in marks], "y": [each.goodput for each in marks],
                    "marker": {**mark, "size": [8 + 22 * (each.blocks / total) ** 0.5 for each in marks]},
                    "text": [percent(each.blocks / total) for each in marks],
                    "hovertemplate": "block length %{x}: %{y:.1f} tokens/s measured<br>%{text} of the blocks",
                }
            )  # fmt: skip
    lengths = [*(each.block_length for each in actions), *(each.block_length for each in predicted)]
    longest = max(lengths, default=0)
    ends = [-0.06 * max(1, longest), 1.06 * max(1, longest)]
    curves = {(each.source, each.block_length): each.goodput for each in predicted}
    keys = sorted({(each.source, each.block_length) for each in actions} | set(curves))
    sums = {(each.source, each.block_length): each for each in actions}

    def row(key: tuple[str, int]) -> tuple[str, ...]:
        found = sums.get(key)
        return (
            visible(key[0], NAME_COLUMNS),
            str(key[1]),
            number(curves.get(key)),
            number(found.goodput) if found else ABSENT,
            percent(found.blocks / total) if found and total else ABSENT,
        )

    return Chart(
        name="goodput",
        title="Goodput by block length: predicted, measured, chosen",
        terms=("goodput", "predicted goodput", "share of blocks"),
        text=f"{len(actions)} actions measured, {len(predicted)} predicted; larger marks were chosen more often",
        traces=tuple(traces),
        layout={
            "xaxis": {"title": {"text": "block length (0: plain)"}, "dtick": max(1, longest // 8), "range": ends},
            "yaxis": {"title": {"text": "tokens per second"}, "rangemode": "tozero"},
        },
        head=("source", "block length", "predicted goodput", "goodput", "share of blocks"),
        rows=tuple(row(key) for key in keys),
    )


_PHASES = ("prefill", "draft", "verify", "host")


def _per_token(phase: str, seconds: PhaseSeconds, tokens: int) -> float | None:
    names = HOST_PHASES if phase == "host" else (phase,)
    return ratio(sum(float(getattr(seconds, name)) for name in names), tokens)


def _positive(values: Values) -> list[float | None]:
    return [value if value is not None and value > 0 else None for value in values]


def _line_at_one() -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"width": 1.5}, "layer": "below",
    }  # fmt: skip
