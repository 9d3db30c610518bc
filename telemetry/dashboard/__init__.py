"""The dashboard: pages over the telemetry database, served by Starlette (extra `[dashboard]`).

Names are handed on lazily: importing this package loads no web library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autospec.telemetry.dashboard.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autospec.telemetry.dashboard.app import create_app

    return create_app
