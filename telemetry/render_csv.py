"""The report as comma-separated values, one line for each group and one over everything."""

from __future__ import annotations

import csv
import io
from typing import Any

from autospec.telemetry.render_json import to_dict
from autospec.telemetry.rows import Report


def to_csv(report: Report) -> str:
    """A header and one line per row of the report; nested values get names with dots, lists their positions from 1."""
    data = to_dict(report)
    lines = [_flat({key: row[key] for key in row if key != "group"}) for row in (*data["segments"], data["all"])]
    groups = [*(row["group"] for row in data["segments"]), dict.fromkeys(report.group_by, "all")]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*report.group_by, *columns])
    for group, line in zip(groups, lines, strict=True):
        writer.writerow([*(_safe(group[key]) for key in report.group_by), *(_safe(line.get(c, "")) for c in columns)])
    return text.getvalue()


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}" if name else key).items()}
    if isinstance(value, list):
        return {f"{name}.{index}": item for index, item in enumerate(value, 1)}
    return {name: "" if value is None else value}


def _safe(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
