"""What the first page shows: every segment, the worst first, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select

from autospec.errors import ConfigurationError
from autospec.telemetry.dashboard.buckets import Times, Traffic, load_traffic
from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.reports import LoadReport, load_segments
from autospec.telemetry.labels import visible
from autospec.telemetry.rows import Report, SegmentRow
from autospec.telemetry.schema import DeploymentRow, HourlyRequests, PolicyVersionRow
from autospec.telemetry.store import Store

TREND = timedelta(days=14)
"""How much of the end of the time range trends are of."""

MOST_OPTIONS = 200
"""Values that a filter offers at most; others can still be written into the address."""

_LAST = math.inf


@dataclass(frozen=True, slots=True)
class Options:
    """What the filters offer."""

    targets: tuple[str, ...]
    devices: tuple[str, ...]
    policies: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]  # version and name of the policy, the newest first


@dataclass(frozen=True, slots=True)
class Line:
    """One segment."""

    row: SegmentRow
    times: Times | None

    @property
    def name(self) -> str:
        return self.row.group["segment"]


@dataclass(frozen=True, slots=True)
class Overview:
    report: Report
    traffic: Traffic  # of the last TREND

    @property
    def lines(self) -> list[Line]:
        return [Line(row, self.traffic.by_segment.get(row.group["segment"])) for row in self.report.segments]


SORTS: dict[str, Callable[[SegmentRow], float | str]] = {
    "segment": lambda row: row.group["segment"].casefold(),
    "speed-up": lambda row: _or_last(row.speed_up),
    "requests": lambda row: -row.requests,
    "acceptance": lambda row: -(row.mean_acceptance_length or -_LAST),
    "saved": lambda row: -row.prediction.saved_seconds if row.prediction.requests else _LAST,
    "lost": lambda row: -row.prediction.lost_seconds if row.prediction.requests else _LAST,
}
"""By its name in the address; segments without a value come last. `speed-up` has the worst first."""


@dataclass(frozen=True, slots=True)
class Sorting:
    """How the table is sorted, and where its headings lead."""

    by: str  # a key of SORTS, perhaps with a minus in front
    address: Callable[[str], str]  # of the page sorted by a key; the other way round if it is so already


def load_overview(store: Store, filters: Filters, load: LoadReport = load_segments) -> Overview:
    """The report by segment and its trends, from sums by the hour where there are many requests.

    Args:
        store: the database.
        filters: which requests.
        load: reads the report.

    Raises:
        ConfigurationError: the filters ask for too many requests one by one.
        StoreError: the database cannot be read.
    """
    with ThreadPoolExecutor(2) as threads:  # each reads for itself, and databases do that side by side
        report = threads.submit(load, store, filters)
        traffic = threads.submit(load_traffic, store, filters, latest=TREND)
    return Overview(report.result(), traffic.result())


def load_options(store: Store) -> Options:
    """Targets, devices and policies that there are."""
    with store.reading() as connection:
        places = connection.execute(select(DeploymentRow.target, DeploymentRow.device)).all()
        used = select(HourlyRequests.policy).where(~HourlyRequests.is_control).distinct().limit(MOST_OPTIONS)
        policies = sorted(connection.scalars(used))
        newest = select(PolicyVersionRow.version, PolicyVersionRow.name).order_by(PolicyVersionRow.made_at.desc())
        versions = connection.execute(newest.limit(MOST_OPTIONS)).all()
    targets = sorted({row.target for row in places})[:MOST_OPTIONS]
    devices = sorted({row.device for row in places})[:MOST_OPTIONS]
    return Options(tuple(targets), tuple(devices), tuple(policies), tuple((row.version, row.name) for row in versions))


def ordered(lines: Sequence[Line], sort: str, search: str = "") -> list[Line]:
    """The lines whose names hold the text, sorted.

    Args:
        lines: of the overview.
        sort: a key of SORTS, with a minus in front to turn it round; segments without a value stay last.
        search: letters count alike in either case.

    Raises:
        ConfigurationError: the sort is unknown.
    """
    name = sort.removeprefix("-")
    if name not in SORTS:
        raise ConfigurationError(f"sort={visible(sort, 40)!r}: known are {', '.join(SORTS)}, each also with - in front")
    wanted = search.casefold()
    found = sorted((line for line in lines if wanted in line.name.casefold()), key=lambda line: line.name)
    valued = [line for line in found if SORTS[name](line.row) != _LAST]
    rest = [line for line in found if SORTS[name](line.row) == _LAST]
    return [*sorted(valued, key=lambda line: SORTS[name](line.row), reverse=sort.startswith("-")), *rest]


def _or_last(value: float | None) -> float:
    return _LAST if value is None else value
