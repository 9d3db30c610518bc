"""Whoever wants to know of each request beside the database: metrics, traces, a user's own object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from autospec.errors import ConfigurationError
from autospec.notices import warn
from autospec.types import RequestRecord


class Observer(Protocol):
    """Is told of requests that have ended. One with `watch` and `forget` is told of the recorder, too."""

    def observe(self, record: RequestRecord) -> None:
        """Called once for each request, in its thread, before `generate` returns: be quick."""


class Observers:
    """Tells each of several observers; what one of them raises costs a warning, once, and no request.

    Args:
        given: none, one, or several.

    Raises:
        ConfigurationError: one of them has no `observe`.
    """

    def __init__(self, given: Observer | Iterable[Observer] | None) -> None:
        found: Any = given
        if found is None:
            found = ()
        elif callable(getattr(found, "observe", None)) or not isinstance(found, Iterable):
            found = (found,)
        self._observers: tuple[Any, ...] = tuple(found)
        self._failed: set[int] = set()
        for each in self._observers:
            if isinstance(each, type) or not callable(getattr(each, "observe", None)):
                raise ConfigurationError(
                    f"metrics={given!r}: objects with observe(record) are needed, as in autospec.telemetry.Metrics()"
                )

    def observe(self, record: RequestRecord) -> None:
        self._tell("observe", record)

    def watch(self, recorder: Any) -> None:
        """Tell of a recorder that has begun."""
        self._tell("watch", recorder)

    def forget(self, recorder: Any) -> None:
        """Tell of a recorder that is closed."""
        self._tell("forget", recorder)

    def _tell(self, name: str, what: Any) -> None:
        for index, each in enumerate(self._observers):
            tell: Callable[[Any], None] | None = getattr(each, name, None)
            if tell is None:
                continue
            try:
                tell(what)
            except Exception as error:  # noqa: BLE001  # the answer is there, whatever is made of its record
                if index not in self._failed:
                    self._failed.add(index)
                    warn(f"{type(each).__name__}.{name} failed, requests go on: {type(error).__name__}: {error}")
