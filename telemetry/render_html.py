"""The report as one HTML file: no scripts, nothing fetched, light and dark by the reader's setting."""

from __future__ import annotations

from html import escape

from autospec.telemetry.labels import visible
from autospec.telemetry.plot import MOST_ROWS, speed_up_plot
from autospec.telemetry.rows import Report
from autospec.telemetry.tables import EMPTY, UNMATCHED, Column, Table, methods, tables

TITLE_COLUMNS = 120

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #59636e; --line: #d1d9e0;
  --faster: #0a6e5c; --slower: #b3400a; --unclear: #59636e; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --text: #e6e9ec; --soft: #9aa4ae; --line: #3a424b;
  --faster: #4cc9b0; --slower: #f2965a; --unclear: #9aa4ae; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom; }
thead th { color: var(--soft); font-weight: 600; }
th.name { text-align: left; font-weight: 400; overflow-wrap: anywhere; min-width: 8rem; unicode-bidi: isolate; }
tr.all th, tr.all td { font-weight: 600; border-top: 2px solid var(--line); }
td.faster { color: var(--faster); } td.slower { color: var(--slower); }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.5rem; color: var(--soft); }
svg { display: block; width: 100%; max-width: 60rem; height: auto; }
svg text { fill: var(--text); font-size: 13px; unicode-bidi: isolate; }
svg .tick { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .one { stroke: var(--text); stroke-width: 1.5; }
.interval { stroke-width: 3; stroke-linecap: round; } circle { stroke-width: 2; }
.faster .interval, .faster circle { stroke: var(--faster); fill: var(--faster); }
.slower .interval, .slower circle { stroke: var(--slower); fill: var(--slower); }
.unclear .interval, .unclear circle { stroke: var(--unclear); fill: var(--back); }
"""


def to_html(report: Report, title: str = "autospec report") -> str:
    """A whole page with a plot, the tables and what each column means.

    Args:
        report: what to show.
        title: the page's title; plain text.

    Returns:
        The document. Every name in it is escaped and shortened.
    """
    shown = escape(visible(title, TITLE_COLUMNS))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{shown}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{shown}</h1>\n"
        + (f"<p>{EMPTY}</p>\n" if report.is_empty else _body(report))
        + "</body>\n</html>\n"
    )


def _body(report: Report) -> str:
    found = tables(report)
    rows = (*report.segments, report.all)
    parts = [f"<p>{'<br>'.join(escape(line) for line in report.measured)}</p>"]
    parts += [speed_up_plot(rows) or "<p>No speed-up can be shown: too little data.</p>"]
    if sum(row.speed_up is not None for row in rows) > MOST_ROWS:
        parts.append(f"<p>The plot shows the first {MOST_ROWS} groups; the tables show all.</p>")
    parts += [_table(table) for table in found]
    if methods(report):
        items = "".join(f"<li>{escape(method)}</li>" for method in methods(report))
        parts.append(f"<h2>How the intervals were made</h2>\n<ul>{items}</ul>")
    if report.unmatched_comparisons:
        parts.append(f"<p>{UNMATCHED.format(report.unmatched_comparisons)}</p>")
    columns = [column for table in found for column in table.columns if column.definition]
    parts.append(f"<h2>What the columns mean</h2>\n<dl>{''.join(_definition(column) for column in columns)}</dl>")
    return "\n".join(parts) + "\n"


def _definition(column: Column) -> str:
    return f"<dt>{escape(column.header)}</dt><dd>{escape(column.definition)}</dd>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col" class="name">{escape(name)}</th>' for name in table.names)
    head += "".join(f'<th scope="col">{escape(column.header)}</th>' for column in table.columns)
    lines = []
    for row in table.rows:
        cells = "".join(f'<th scope="row" class="name">{escape(name)}</th>' for name in table.row_names(row))
        for column in table.columns:
            kind = f' class="{row.verdict}"' if column.header == "verdict" and row.verdict else ""
            cells += f"<td{kind}>{escape(column.cell(row))}</td>"
        start = "<tr>" if row.group else '<tr class="all">'
        lines.append(f"{start}{cells}</tr>")
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )
