"""What a page is asked to show: read strictly from its address, and written back into addresses."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from autospec.errors import ConfigurationError
from autospec.telemetry.codec import clean_text
from autospec.telemetry.labels import visible
from autospec.telemetry.rollups import hour_of

PERIODS: Mapping[str, timedelta] = {
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
    "90d": timedelta(days=90),
}
DECODINGS = ("greedy", "sampled")
BASES = ("auto", "requests", "hours")
NAMES = ("period", "since", "until", "target", "device", "policy", "version", "decoding", "basis")
_TIME = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:T(\d{2})(?::00)?Z?)?")

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Filters:
    """Which requests are shown. None: all of them. Times are full hours, in UTC."""

    since: datetime | None = None
    until: datetime | None = None
    period: str | None = None  # a key of PERIODS, which `since` then follows from
    target: str | None = None
    device: str | None = None
    policy: str | None = None
    version: str | None = None
    decoding: str | None = None
    basis: str = "auto"

    @property
    def do_sample(self) -> bool | None:
        return None if self.decoding is None else self.decoding == "sampled"

    @property
    def picks_requests(self) -> bool:
        """Whether it asks for more than a time range: blocks are summed by hour and segment alone."""
        return any((self.target, self.device, self.policy, self.version, self.decoding))

    @property
    def is_narrowed(self) -> bool:
        return self.picks_requests or self.since is not None or self.until is not None

    def query(self, **changes: str | None) -> str:
        """The part of an address after `?`, with these values changed or added; None and empty ones are left out."""
        times = {"since": None, "until": None} if self.period else {"since": self.since, "until": self.until}
        values: dict[str, Any] = {
            "period": self.period,
            **{name: None if time is None else f"{time:%Y-%m-%dT%HZ}" for name, time in times.items()},
            **{name: getattr(self, name) for name in ("target", "device", "policy", "version", "decoding")},
            "basis": None if self.basis == "auto" else self.basis,
            **changes,
        }
        return urlencode({name: value for name, value in values.items() if value}, errors="replace")


def parse(pairs: Pairs, now: datetime, others: Collection[str] = ()) -> tuple[Filters, dict[str, str]]:
    """The filters of an address.

    Args:
        pairs: names and values as they are in it; empty values say nothing.
        now: where `period` ends; an aware datetime.
        others: names that mean something else to the page.

    Returns:
        The filters, and the values of `others` that are there.

    Raises:
        ConfigurationError: a name is unknown or repeated, or a value is not one that it can have.
    """
    values: dict[str, str] = {}
    for name, value in pairs:
        if name not in NAMES and name not in others:
            known = ", ".join((*NAMES, *others))
            raise ConfigurationError(f"the address asks for {visible(name, 40)!r}: known are {known}")
        if name in values:
            raise ConfigurationError(f"the address gives {name!r} twice: give it once")
        values[name] = value
    values = {name: clean_text(value) for name, value in values.items() if value}
    _check(values, "period", list(PERIODS))
    _check(values, "decoding", DECODINGS)
    _check(values, "basis", BASES)
    given: dict[str, Any] = {name: value for name, value in values.items() if name in NAMES}
    filters = Filters(**given | {name: _time(name, values[name]) for name in _TIMES if name in values})
    if filters.period is not None:
        if filters.since is not None or filters.until is not None:
            raise ConfigurationError("the address gives a period and also since or until: give one of the two")
        filters = replace(filters, since=hour_of(now.astimezone(UTC)) - PERIODS[filters.period])
    if filters.since is not None and filters.until is not None and filters.until <= filters.since:
        raise ConfigurationError(f"until={values['until']!r} is not after since={values['since']!r}")
    if filters.version is not None and filters.basis == "hours":
        raise ConfigurationError("sums by the hour know no policy versions: leave basis=hours out, or the version")
    return filters, {name: value for name, value in values.items() if name in others}


_TIMES = ("since", "until")


def _check(values: Mapping[str, str], name: str, allowed: Collection[str]) -> None:
    if name in values and values[name] not in allowed:
        raise ConfigurationError(f"{name}={visible(values[name], 40)!r}: known are {', '.join(allowed)}")


def _time(name: str, value: str) -> datetime:
    found = _TIME.fullmatch(value)
    try:
        if found is None:
            raise ValueError
        return datetime(*(int(part or 0) for part in found.groups()), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        raise ConfigurationError(
            f"{name}={visible(value, 40)!r}: give a day or a full hour in UTC, as in 2026-03-01 or 2026-03-01T12Z"
        ) from None
