"""Telemetry: the database of requests, the recorder that fills it, and the report that reads it.

Names are handed on lazily: importing this package loads no database library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autospec.telemetry.recorder import Recorder
    from autospec.telemetry.report import Report, SegmentRow, build_report, to_dict, to_html, to_text
    from autospec.telemetry.store import Store

__all__ = ["Recorder", "Report", "SegmentRow", "Store", "build_report", "to_dict", "to_html", "to_text"]

_HOMES = {
    "Recorder": "recorder",
    "Report": "report",
    "SegmentRow": "report",
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
