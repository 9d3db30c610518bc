"""What a dashboard asks, again and again: the last hours, from sums by the hour alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select

from autospec.errors import ConfigurationError
from autospec.telemetry.codec import clean_text
from autospec.telemetry.rows import ratio
from autospec.telemetry.schema import HourlyRequests
from autospec.telemetry.store import Store


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour of one segment, requests under a policy and control apart."""

    hour: datetime
    segment: str
    requests: int
    output_tokens: int
    seconds: float
    control_requests: int
    control_output_tokens: int
    control_seconds: float
    blocks: int
    block_tokens: int

    @property
    def speed_up(self) -> float | None:
        """Against the control of the same hour; None where either side has no tokens."""
        control = ratio(self.control_seconds, self.control_output_tokens)
        treated = ratio(self.seconds, self.output_tokens)
        return None if control is None or treated is None else ratio(control, treated)


def recent_hours(store: Store, *, since: datetime, segment: str | None = None) -> list[Hour]:
    """The hours from a time on, oldest first, by segment.

    Args:
        store: the database.
        since: an aware datetime; from its hour on.
        segment: only this one.

    Raises:
        ConfigurationError: the time has no zone.
        StoreError: the database cannot be read.
    """
    if since.tzinfo is None:
        raise ConfigurationError(f"since={since!r} has no time zone: give an aware datetime")
    table = HourlyRequests
    numbers = ("requests", "output_tokens", "total_seconds", "blocks", "block_tokens")
    query = (
        select(
            table.hour,
            table.segment,
            table.is_control,
            *(func.sum(getattr(table, name)).label(name) for name in numbers),
        )
        .where(table.hour >= since.astimezone(UTC).replace(minute=0, second=0, microsecond=0))
        .group_by(table.hour, table.segment, table.is_control)
        .order_by(table.hour, table.segment)
    )
    if segment is not None:
        query = query.where(table.segment == clean_text(segment))
    sides: dict[tuple[datetime, str], dict[bool, Any]] = {}
    with store.reading() as connection:
        for row in connection.execute(query):
            sides.setdefault((row.hour, row.segment), {})[row.is_control] = row
    return [_hour(hour, name, found.get(False), found.get(True)) for (hour, name), found in sides.items()]


def _hour(hour: datetime, segment: str, treated: Any, control: Any) -> Hour:
    def of(row: Any, name: str) -> Any:
        return 0 if row is None else getattr(row, name)

    return Hour(
        hour=hour,
        segment=segment,
        requests=int(of(treated, "requests")),
        output_tokens=int(of(treated, "output_tokens")),
        seconds=float(of(treated, "total_seconds")),
        control_requests=int(of(control, "requests")),
        control_output_tokens=int(of(control, "output_tokens")),
        control_seconds=float(of(control, "total_seconds")),
        blocks=int(of(treated, "blocks")),
        block_tokens=int(of(treated, "block_tokens")),
    )
