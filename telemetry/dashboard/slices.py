"""The part of the sums by the hour that the filters ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, false, or_, select

from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.schema import DeploymentRow, HourlyActions, HourlyPositions, HourlyRequests
from autospec.telemetry.store import Store


class Slice:
    """Narrows queries over sums by the hour.

    Args:
        store: the database.
        filters: which requests.
        segment: only this one.
        with_positions: whether acceptance by draft position is seen. It is by far the most to read.
    """

    def __init__(
        self, store: Store, filters: Filters, segment: str | None = None, *, with_positions: bool = True
    ) -> None:
        self.store = store
        self.filters = filters
        self._segment = segment
        self._requests = conditions(HourlyRequests, filters, deployments(store, filters))
        self._hidden: set[type[Any]] = set() if with_positions else {HourlyPositions}
        if filters.picks_requests:  # blocks are summed by hour and segment alone
            self._hidden = {HourlyActions, HourlyPositions}

    def narrow(self, query: Select[Any], table: type[Any]) -> Select[Any]:
        """The query over this table, one of sums by the hour, restricted to the slice."""
        query = between(query, table.hour, self.filters)
        if self._segment is not None:
            query = query.where(table.segment == self._segment)
        if table in self._hidden:
            return query.where(false())
        return query.where(*self._requests) if table is HourlyRequests else query

    def rows(self, query: Any, table: type[Any]) -> Sequence[Any]:
        """What the narrowed query finds."""
        with self.store.reading() as connection:
            return connection.execute(self.narrow(query, table)).all()


def deployments(store: Store, filters: Filters) -> list[int] | None:
    """Row ids of the deployments that the filters ask for; None: any."""
    if filters.target is None and filters.device is None:
        return None
    query = select(DeploymentRow.id)
    if filters.target is not None:
        query = query.where(DeploymentRow.target == filters.target)
    if filters.device is not None:
        query = query.where(DeploymentRow.device == filters.device)
    with store.reading() as connection:
        return list(connection.scalars(query))


def between(query: Any, time: Any, filters: Filters) -> Any:
    """The query over rows whose time lies between those of the filters."""
    if filters.since is not None:
        query = query.where(time >= filters.since)
    return query if filters.until is None else query.where(time < filters.until)


def conditions(table: Any, filters: Filters, places: Sequence[int] | None) -> list[Any]:
    """What rows of a table of requests must meet, times apart. A control belongs to every policy."""
    found: list[Any] = [] if places is None else [table.deployment_id.in_(places)]
    if filters.policy is not None:
        found.append(or_(table.is_control, table.policy == filters.policy))
    if filters.decoding is not None:
        found.append(table.do_sample == filters.do_sample)
    return found
