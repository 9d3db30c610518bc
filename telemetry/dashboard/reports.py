"""The report of a slice: the same numbers as `autospec report`, from requests where they are few, else from sums."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from autospec.errors import ConfigurationError
from autospec.telemetry import codec, hourly
from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.slices import Slice, between, conditions, deployments
from autospec.telemetry.engines import engine_sums
from autospec.telemetry.report import build_report
from autospec.telemetry.rows import Report
from autospec.telemetry.schema import (
    ComparisonRow,
    DeploymentRow,
    EngineRow,
    HorizonRow,
    HourlyRequests,
    RequestRow,
    to_microseconds,
)
from autospec.telemetry.store import Store
from autospec.types import Comparison, RequestRecord

MOST_REQUESTS = 2_000
"""Beyond this many, sums by the hour are read unless requests are asked for."""

MOST_ASKED = 20_000
"""Beyond this many, requests are not read even where they are asked for."""

NEWEST = 1_000
"""Requests that are looked at one by one where sums do not say enough."""

CHUNK = 500


def load_report(
    store: Store,
    filters: Filters,
    *,
    group_by: Sequence[str] = ("segment",),
    segment: str | None = None,
    with_positions: bool = True,
) -> Report:
    """The report of the requests and engines that the filters ask for.

    Args:
        store: the database.
        filters: which requests, and what the report is made of.
        group_by: any of `hourly.KEYS`.
        segment: only this one.
        with_positions: whether acceptance by draft position is needed.

    Raises:
        ConfigurationError: requests are asked for one by one, and there are too many.
        StoreError: the database cannot be read.
    """
    report = _of_requests(store, filters, group_by, segment, with_positions=with_positions)
    has_engines = segment is None and not (filters.policy or filters.version or filters.decoding)  # counters know none
    if not has_engines:
        return report
    engines = engine_sums(store, filters.since, filters.until, target=filters.target, device=filters.device)
    return replace(report, engines=engines)


def _of_requests(
    store: Store, filters: Filters, group_by: Sequence[str], segment: str | None, *, with_positions: bool
) -> Report:
    part = Slice(store, filters, segment, with_positions=with_positions)
    asked = filters.basis == "requests" or filters.version is not None
    if filters.basis != "hours":
        count = hourly.num_requests(store, narrow=part.narrow, enough=None if asked else MOST_REQUESTS)
        if asked and count > MOST_ASKED:
            raise ConfigurationError(
                f"{count:,} requests cannot be read one by one, as a policy version or basis=requests asks for: "
                f"choose a time range with at most {MOST_ASKED:,}, or filter by policy instead of version"
            )
        if asked or count <= MOST_REQUESTS:
            records = read_requests(store, filters, segment)
            if asked or len(records) == count:  # fewer where old requests were pruned; their sums stay
                return build_report(records, _comparisons(store, records), group_by=group_by)
    return hourly.build_hourly_report(store, group_by=group_by, narrow=part.narrow)


def load_segments(store: Store, filters: Filters) -> Report:
    """The report by segment, without acceptance by position: with the same errors."""
    return load_report(store, filters, with_positions=False)


LoadReport = Callable[[Store, Filters], Report]


def read_requests(store: Store, filters: Filters, segment: str | None = None) -> list[RequestRecord]:
    """All requests that the filters ask for; the caller has made sure that they are few."""
    if segment is None:
        known = select(HourlyRequests.segment).distinct()
        known = between(known, HourlyRequests.hour, filters)
        with store.reading() as connection:
            names = list(connection.scalars(known))
    else:
        names = [segment]
    found: list[RequestRecord] = []
    for start in range(0, len(names), CHUNK):
        query = _matching(store, filters).where(RequestRow.segment.in_(names[start : start + CHUNK]))
        found += _records(store, query)
    return found


def newest_requests(store: Store, filters: Filters, segment: str) -> list[RequestRecord]:
    """The newest requests of a segment that the filters ask for, at most NEWEST."""
    return _records(store, newest(store, filters, segment))


def newest(store: Store, filters: Filters, segment: str | None = None) -> Any:
    """A query for the newest of the requests that the filters ask for, at most NEWEST.

    Without a segment they are looked for among the newest NEWEST of the whole database.
    """
    query = _matching(store, filters)
    if segment is None:
        latest = select(RequestRow.id).order_by(RequestRow.id.desc()).limit(NEWEST)
        query = query.where(RequestRow.id.in_(latest)).order_by(RequestRow.id.desc())
    else:
        query = query.where(RequestRow.segment == segment).order_by(RequestRow.started_at.desc())
    return query.limit(NEWEST)


def stamp(store: Store) -> str:
    """Changes whenever something was written that a page may show, or another database took the place of this one."""
    last = select(RequestRow.request_id).order_by(RequestRow.id.desc()).limit(1)
    query = select(
        select(func.max(RequestRow.id)).scalar_subquery(),
        last.scalar_subquery(),
        select(func.max(ComparisonRow.id)).scalar_subquery(),
        select(HorizonRow.pruned_before).scalar_subquery(),
        select(func.max(EngineRow.scraped_at)).scalar_subquery(),
    )
    with store.reading() as connection:
        requests, name, comparisons, *times = connection.execute(query).one()
    name = re.sub(r"[^0-9a-f]", "", name or "")[-12:]
    said = "-".join("0" if time is None else f"{to_microseconds(time)}" for time in times)
    return f"{requests or 0}-{name}-{comparisons or 0}-{said}"


def _matching(store: Store, filters: Filters) -> Any:
    query = select(RequestRow, DeploymentRow).join(DeploymentRow, isouter=True)
    query = query.where(*conditions(RequestRow, filters, deployments(store, filters)))
    if filters.version is not None:
        query = query.where(or_(RequestRow.is_control, RequestRow.policy_version == filters.version))
    return between(query, RequestRow.started_at, filters)


def _records(store: Store, query: Any) -> list[RequestRecord]:
    with store.reading() as connection, Session(connection) as session:
        return [
            codec.row_to_request(row, None if place is None else codec.row_to_deployment(place))
            for row, place in session.execute(query)
        ]


def _comparisons(store: Store, records: Iterable[RequestRecord]) -> list[Comparison]:
    names = [record.request_id for record in records if not record.is_control]
    found: list[Comparison] = []
    for start in range(0, len(names), CHUNK):
        query = select(ComparisonRow).where(ComparisonRow.request_id.in_(names[start : start + CHUNK]))
        with store.reading() as connection, Session(connection) as session:
            found += [codec.row_to_comparison(row) for row in session.scalars(query)]
    return found
