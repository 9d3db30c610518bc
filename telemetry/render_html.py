"""The report as one HTML file that looks like the dashboard's overview: no scripts, nothing fetched."""

from __future__ import annotations

import math
from typing import Any

from autospec.telemetry.engine_tables import engine_tables
from autospec.telemetry.labels import visible
from autospec.telemetry.pages.definitions import definition
from autospec.telemetry.pages.marks import axis_of
from autospec.telemetry.pages.rendering import render, style
from autospec.telemetry.rows import Report, SegmentRow
from autospec.telemetry.tables import EMPTY, UNMATCHED, Table, methods, tables

TITLE_COLUMNS = 120
ALSO_SHOWN = ("tokens", "measured from")
"""Numbers of the page that are in none of the tables."""


def to_html(report: Report, title: str = "autospec report") -> str:
    """A whole page: what it comes to, every group with its interval, the worst first, the tables, what columns mean.

    Args:
        report: what to show.
        title: the page's title; plain text.

    Returns:
        The document. Every name in it is escaped and shortened.
    """
    found: list[Table[Any]] = [*tables(report), *engine_tables(report.engines)]
    return render(
        "report.html",
        {
            "title": visible(title, TITLE_COLUMNS),
            "style": style(),
            "empty": EMPTY,
            "report": report,
            "rows": sorted(report.segments, key=_worst_first),
            "axis": axis_of(report.segments),
            "tables": found,
            "methods": methods(report),
            "unmatched": UNMATCHED.format(report.unmatched_comparisons) if report.unmatched_comparisons else None,
            "meanings": _meanings(found),
        },
    )


def _worst_first(row: SegmentRow) -> float:
    return math.inf if row.speed_up is None else row.speed_up


def _meanings(found: list[Table[Any]]) -> dict[str, str]:
    columns = [column for table in found for column in table.columns if column.definition]
    return {column.header: column.definition for column in columns} | {name: definition(name) for name in ALSO_SHOWN}
