"""The report as plain text for a terminal."""

from __future__ import annotations

import textwrap
from typing import Any

from autospec.telemetry.engine_tables import engine_tables
from autospec.telemetry.labels import clip, columns, pad
from autospec.telemetry.rows import Report
from autospec.telemetry.tables import EMPTY, UNMATCHED, Table, methods, tables

GAP = "  "
NARROWEST_NAME = 6


def to_text(report: Report, width: int = 120) -> str:
    """Aligned tables, and below them what each column means.

    Args:
        report: what to show.
        width: columns of the terminal. Names are shortened to fit; below about 110 the numbers alone may take more.

    Returns:
        The text, ending in a newline.
    """
    if report.is_empty and not report.engines:
        return EMPTY + "\n"
    found: list[Table[Any]] = [*tables(report), *engine_tables(report.engines)]
    lines = [line for text in report.measured for line in textwrap.wrap(text, width, subsequent_indent="    ")]
    lines.append("")
    for table in found:
        lines += [table.title, "", *_lines(table, width), ""]
    for column in [column for table in found for column in table.columns if column.definition]:
        text = f"{' '.join(_header(column.header))}: {column.definition}"
        lines += textwrap.wrap(text, width, subsequent_indent="    ")
    if not report.is_empty:
        lines += ["", "How the intervals were made:" if methods(report) else "No interval: too little data."]
    for method in methods(report):
        lines += textwrap.wrap(method, width, initial_indent="  ", subsequent_indent="    ")
    if report.unmatched_comparisons:
        lines += textwrap.wrap(UNMATCHED.format(report.unmatched_comparisons), width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(table: Table[Any], width: int) -> list[str]:
    names = [table.row_names(row) for row in table.rows]
    cells = [[column.cell(row) for column in table.columns] for row in table.rows]
    headers = [_header(column.header) for column in table.columns]
    widths = [
        max(columns(text) for text in [*header, *(row[index] for row in cells)]) for index, header in enumerate(headers)
    ]
    name_widths = [
        max(columns(text) for text in [name, *(row[index] for row in names)]) for index, name in enumerate(table.names)
    ]
    left = width - sum(widths) - len(GAP) * (len(widths) + len(name_widths) - 1)
    while sum(name_widths) > left and max(name_widths) > NARROWEST_NAME:
        name_widths[name_widths.index(max(name_widths))] -= 1

    depth = max(len(header) for header in headers)
    lines = []
    for level in range(depth):
        is_last = level == depth - 1
        line = [
            pad(clip(name, size) if is_last else "", size) for name, size in zip(table.names, name_widths, strict=True)
        ]
        for header, size in zip(headers, widths, strict=True):
            raised = [""] * (depth - len(header)) + header
            line.append(pad(raised[level], size, right=True))
        lines.append(GAP.join(line))
    rule = "-" * columns(lines[-1])
    lines.append(rule)
    for index, (name_row, cell_row) in enumerate(zip(names, cells, strict=True)):
        if index == len(cells) - 1 and index > 0 and not table.rows[index].group:
            lines.append(rule)
        line = [pad(clip(name, size), size) for name, size in zip(name_row, name_widths, strict=True)]
        line += [pad(cell, size, right=True) for cell, size in zip(cell_row, widths, strict=True)]
        lines.append(GAP.join(line))
    return lines


def _header(text: str) -> list[str]:
    """Each word on a line of its own; those joined by a no-break space stay together."""
    return [word.replace("\u00a0", " ") for word in text.split(" ")]
