"""A chart as plain data for Plotly, with the same numbers as a table for whoever cannot see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from autospec.telemetry.labels import visible
from autospec.telemetry.pages.marks import TICKS

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "x")
PATTERNS = ("", "/", ".", "x", "-", "|", "+", "\\")
NAME_COLUMNS = 40


@dataclass(frozen=True, slots=True)
class Chart:
    name: str  # of the element; letters and dashes
    title: str
    terms: tuple[str, ...]  # names of definitions
    text: str  # what can be seen in it, for screen readers
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(default=())

    @property
    def figure(self) -> dict[str, Any]:
        return {"data": list(self.traces), "layout": dict(self.layout)}


def log_axis(title: str) -> dict[str, Any]:
    """A logarithmic axis of speed-ups."""
    ticks = {"tickmode": "array", "tickvals": list(TICKS), "ticktext": [f"{tick:g}" for tick in TICKS]}
    return {"type": "log", "title": {"text": title}, **ticks}


def plotly_text(name: str) -> str:
    """A name for Plotly, which takes some HTML in text for what it is."""
    return escape(visible(name, NAME_COLUMNS), quote=False)
