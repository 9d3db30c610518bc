"""A store of which only a slice is seen in its sums by the hour, so that every report can be made of a slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import Connection, Select, event, false, or_, select

from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.schema import DeploymentRow, HourlyActions, HourlyPositions, HourlyRequests
from autospec.telemetry.store import Store


class Slice:
    """Reads like the store that it is made of, but sums by the hour are those of the slice alone.

    Args:
        store: the database.
        filters: which requests; their times are left to the queries.
        segment: only this one.
        with_positions: whether acceptance by draft position is seen. It is by far the most to read.
    """

    def __init__(
        self, store: Store, filters: Filters, segment: str | None = None, *, with_positions: bool = True
    ) -> None:
        self._store = store
        self._segment = segment
        self._requests = conditions(HourlyRequests, filters, deployments(store, filters))
        self._hidden = {HourlyPositions.__tablename__} if not with_positions else set[str]()
        if filters.picks_requests:
            self._hidden = {HourlyActions.__tablename__, HourlyPositions.__tablename__}

    @property
    def as_store(self) -> Store:
        """For functions that do nothing with a store but `reading()`."""
        return cast(Store, self)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._store.reading() as connection:
            event.listen(connection, "before_execute", self._narrow, retval=True)
            yield connection

    def _narrow(
        self, connection: Connection, query: Any, several: Any, values: Any, options: Any
    ) -> tuple[Any, Any, Any]:
        if isinstance(query, Select):
            names = {str(getattr(each, "name", "")) for each in query.get_final_froms()}
            for table in (HourlyRequests, HourlyActions, HourlyPositions):
                if table.__tablename__ not in names:
                    continue
                if table.__tablename__ in self._hidden:
                    query = query.where(false())
                if self._segment is not None:
                    query = query.where(table.segment == self._segment)
                if table is HourlyRequests:
                    query = query.where(*self._requests)
        return query, several, values


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
