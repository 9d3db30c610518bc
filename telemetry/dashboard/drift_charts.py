"""The charts of the page on decisions and drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autospec.telemetry.dashboard.buckets import ActionTimes, Span, Times
from autospec.telemetry.dashboard.chart import NAME_COLUMNS, PATTERNS, Chart, log_axis, plotly_text
from autospec.telemetry.dashboard.decisions import Decisions
from autospec.telemetry.labels import visible
from autospec.telemetry.pages.formats import count, duration, iso, percent
from autospec.telemetry.pages.rendering import moment
from autospec.telemetry.rows import ratio
from autospec.telemetry.tables import number

MOST_ACTIONS = 7

Values = Sequence[float | None]


def actions_over_time(times: ActionTimes) -> Chart:
    """The share of blocks of each action, by stretch of time."""
    span = times.span
    if span is None:
        raise ValueError("there are no stretches of time")
    totals = {label: sum(counts.values()) for label, counts in times.blocks.items()}
    kept = sorted(totals, key=lambda label: (-totals[label], label))
    rest = [] if len(kept) <= MOST_ACTIONS else kept[MOST_ACTIONS - 1 :]
    groups = {label: [label] for label in kept if label not in rest} | ({f"{len(rest)} others": rest} if rest else {})
    of_stretch = [sum(counts.get(n, 0) for counts in times.blocks.values()) for n in range(span.count)]
    traces = []
    for place, (name, labels) in enumerate(groups.items()):
        blocks = [sum(times.blocks[label].get(n, 0) for label in labels) for n in range(span.count)]
        traces.append(
            {
                "type": "bar", "name": plotly_text(name), "x": [iso(start) for start in span.starts],
                "y": [ratio(mine, of_all) for mine, of_all in zip(blocks, of_stretch, strict=True)],
                "marker": {"pattern": {"shape": PATTERNS[place % len(PATTERNS)]}},
                "text": [count(mine) for mine in blocks], "textposition": "none",
                "hovertemplate": "%{x} UTC: %{y:.0%} (%{text} blocks)",
            }
        )  # fmt: skip
    return Chart(
        name="actions",
        title=f"Actions by {span.step_words} (UTC)",
        terms=("share of blocks", "usual action"),
        text="; ".join(f"{visible(name, NAME_COLUMNS)} {percent(ratio(_sum(totals, labels), sum(totals.values())))}"
                       for name, labels in groups.items()),
        traces=tuple(traces),
        layout={
            "barmode": "stack", "bargap": 0.05, "xaxis": {"type": "date", "title": {"text": "UTC"}},
            "yaxis": {"tickformat": ".0%", "title": {"text": "share of blocks"}, "range": [0, 1]},
        },
        head=("action", "blocks", "share of blocks"),
        rows=tuple((visible(label, NAME_COLUMNS), count(totals[label]),
                    percent(ratio(totals[label], sum(totals.values())))) for label in kept),
    )  # fmt: skip


def control_share(times: Times) -> Chart:
    """Control requests / all requests, by stretch of time."""
    found = [times.sums.get(n) for n in times.numbers]
    values = [ratio(each.control_requests, each.control_requests + each.requests) if each else None for each in found]
    return _line(
        "control-share", f"Control share by {times.span.step_words} (UTC)", ("control share",), times.span, values,
        {"tickformat": ".0%", "rangemode": "tozero", "title": {"text": "control share"}}, "%{y:.1%}", percent,
    )  # fmt: skip


def plain_step(times: ActionTimes) -> Chart:
    """Seconds of a plain target step, by stretch of time."""
    span = times.span
    if span is None:
        raise ValueError("there are no stretches of time")
    values = [times.plain_seconds.get(n) for n in range(span.count)]
    milliseconds = [None if value is None else 1e3 * value for value in values]
    return _line(
        "plain-step", f"Cost drift: a plain target step, by {span.step_words} (UTC)", ("plain step",), span,
        milliseconds, {"rangemode": "tozero", "title": {"text": "ms"}}, "%{y:.2f} ms",
        lambda value: duration(None if value is None else value / 1e3),
    )  # fmt: skip


def calibration(decisions: Decisions) -> Chart:
    """Predicted beside measured speed-up of each segment."""
    rows = [row for row in decisions.report.segments if row.speed_up and row.prediction.speed_up]
    names = [row.group["segment"] for row in rows]
    measured = [row.speed_up or 0.0 for row in rows]
    predicted = [row.prediction.speed_up or 0.0 for row in rows]
    ends = [min([*measured, *predicted, 0.9]), max([*measured, *predicted, 1.1])]
    return Chart(
        name="calibration",
        title="Calibration: predicted and measured speed-up of each segment",
        terms=("predicted speed-up", "measured speed-up", "calibration error"),
        text=f"{len(rows)} segments; on the line a prediction is right",
        traces=(
            {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "hoverinfo": "skip", "meta": {"shade": -1},
             "line": {"dash": "dot", "width": 1}},
            {"type": "scatter", "mode": "markers", "x": measured, "y": predicted, "text": list(map(plotly_text, names)),
             "marker": {"size": 9}, "meta": {"shade": 0},
             "hovertemplate": "%{text}<br>measured %{x:.2f}, predicted %{y:.2f}<extra></extra>"},
        ),
        layout={
            "xaxis": log_axis("measured speed-up"),
            "yaxis": log_axis("predicted speed-up"),
            "showlegend": False,
        },
        head=("segment", "measured speed-up", "predicted speed-up", "calibration error"),
        rows=tuple(
            (visible(name, NAME_COLUMNS), number(real), number(said), f"{100 * (said / real - 1):+.0f}\u00a0%")
            for name, real, said in zip(names, measured, predicted, strict=True)
        ),
    )  # fmt: skip


def _line(
    name: str, title: str, terms: tuple[str, ...], span: Span, values: Values, axis: Mapping[str, Any], template: str,
    form: Any,
) -> Chart:  # fmt: skip
    known = [value for value in values if value is not None]
    return Chart(
        name=name,
        title=title,
        terms=terms,
        text=f"from {form(min(known))} to {form(max(known))}" if known else "no values",
        traces=(
            {
                "type": "scatter", "mode": "lines+markers", "x": [iso(start) for start in span.starts],
                "y": list(values), "connectgaps": False, "hovertemplate": "%{x} UTC: " + template + "<extra></extra>",
            },
        ),
        layout={"yaxis": dict(axis), "xaxis": {"type": "date", "title": {"text": "UTC"}}, "showlegend": False},
        head=("from", terms[0]),
        rows=tuple(
            (moment(start), form(value)) for start, value in zip(span.starts, values, strict=True) if value is not None
        ),
    )  # fmt: skip


def _sum(totals: Mapping[str, int], labels: Sequence[str]) -> int:
    return sum(totals[label] for label in labels)
