"""`autospec ingest vllm URL`: scrapes, once or until it is told to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from autospec.integrations.vllm.ingest import Origin
    from autospec.telemetry.recorder import Recorder
    from autospec.types import EngineCounters

FLUSH_SECONDS = 10.0


class Scrapes:
    """Writes scrapes through a recorder, whose spool outlives a database that is away.

    Counters only grow, so that a scrape that was missed is in the next one.
    """

    def __init__(self, recorder: Recorder, origin: Origin, timeout: float) -> None:
        self._recorder, self._origin, self._timeout = recorder, origin, timeout
        self.done = self.failed = 0
        self.engines: dict[tuple[str, str], EngineCounters] = {}

    def take(self, counters: Sequence[EngineCounters]) -> None:
        """Record a scrape, and say so. Raises: AutospecError: the database refuses it."""
        from autospec.errors import AutospecError
        from autospec.integrations.vllm.scraping import in_words

        dropped = self._recorder.dropped
        for each in counters:
            self._recorder.note(each)
            self.engines[each.engine, each.target] = each
        if not self._recorder.flush(FLUSH_SECONDS):
            if self._recorder.dropped > dropped:
                raise AutospecError(f"it is not recorded: {self._recorder.last_error}")
            click.echo(f"waits for the database: {self._recorder.last_error}", err=True)
        self.done += 1
        for each in counters:
            click.echo(f"{datetime.now():%H:%M:%S} {in_words(each)}", err=True)  # noqa: DTZ005  # the reader's own time

    def visit(self, addresses: Sequence[str], every: float | None) -> None:
        """Scrape each address, once or again and again until a signal comes.

        Raises:
            AutospecError: an address does not answer as vLLM does. With `every` it is said, and tried again.
        """
        from autospec.errors import AutospecError, ConfigurationError
        from autospec.integrations.vllm.scraping import scrape

        with _until_signalled() as stop:
            while not stop.is_set():
                for address in addresses:
                    try:
                        self.take(scrape(address, self._origin, self._timeout))
                    except ConfigurationError:
                        raise
                    except AutospecError as error:
                        if every is None:
                            raise
                        self.failed += 1
                        click.echo(f"{datetime.now():%H:%M:%S} {error}", err=True)  # noqa: DTZ005
                    if stop.is_set():
                        break
                if every is None:
                    return
                stop.wait(every)


@contextmanager
def _until_signalled() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, so that what is under way is done first. A second Ctrl-C ends it at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def end(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
