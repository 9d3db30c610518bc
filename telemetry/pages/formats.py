"""Numbers and times as they stand on a page."""

from __future__ import annotations

from datetime import UTC, datetime

from autospec.telemetry.tables import ABSENT

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
_SECONDS = (
    (86_400.0, "d", 86_400.0),
    (3_600.0, "h", 3_600.0),
    (120.0, "min", 60.0),
    (1.0, "s", 1.0),
    (1e-3, "ms", 1e-3),
)


def count(value: int | None) -> str:
    """As in `9,999`, `12.3 k` or `4.56 M`."""
    if value is None:
        return ABSENT
    for size, letter in _LARGE:
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{_three(value / unit)}\u00a0{letter}"
    return f"{value:,}"


def duration(value: float | None) -> str:
    """Seconds with a unit that suits them, as in `850 ms`, `12.3 s` or `4.5 h`."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0\u00a0s"
    for least, unit, size in _SECONDS:
        if abs(value) >= least:
            return f"{_three(value / size)}\u00a0{unit}"
    return f"{_three(value / 1e-6)}\u00a0\u00b5s"


def percent(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{100 * value:.1f}\u00a0%" if 0 < abs(value) < 0.0995 else f"{100 * value:.0f}\u00a0%"


def iso(time: datetime) -> str:
    """UTC, with the Z that browsers need to take it for that."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%S}Z"


def shown(time: datetime) -> str:
    """UTC for the eye; pages put the reader's own time in its place."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _three(value: float) -> str:
    """Three significant digits, or all digits of the whole part."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
