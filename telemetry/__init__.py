"""Telemetry: the database of requests, the recorder that fills it, the report that reads it, metrics and spans.

Names are handed on lazily: importing this package loads no database or metrics library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autospec.telemetry.metrics import Metrics
    from autospec.telemetry.recorder import Recorder
    from autospec.telemetry.report import Report, SegmentRow, build_report, to_dict, to_html, to_text
    from autospec.telemetry.store import Store
    from autospec.telemetry.tracing import Spans

__all__ = [
    "Metrics",
    "Recorder",
    "Report",
    "SegmentRow",
    "Spans",
    "Store",
    "build_report",
    "to_dict",
    "to_html",
    "to_text",
]

_HOMES = {
    "Metrics": "metrics",
    "Recorder": "recorder",
    "Report": "report",
    "SegmentRow": "report",
    "Spans": "tracing",
    "Store": "store",
    "build_report": "report",
    "to_dict": "report",
    "to_html": "report",
    "to_text": "report",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
