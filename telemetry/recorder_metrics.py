"""What recorders count, as Prometheus metrics: read when they are asked for, so that recording costs nothing more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from autospec.telemetry.recorder import Recorder

# attribute of a recorder -> name and help of its metric
_COUNTERS = {
    "recorded": ("autospec_records", "Records handed to the telemetry recorder: requests, comparisons and the like."),
    "written": ("autospec_records_written", "Records known to be in the telemetry database."),
    "dropped": ("autospec_records_dropped", "Records lost: memory was full, or one could not be stored."),
    "spooled": (
        "autospec_records_spooled",
        "Records that waited in the spool: the database did not take them at once.",
    ),
    "replayed": ("autospec_records_replayed", "Records written for recorders that are gone."),
    "damaged": ("autospec_records_damaged", "Lines of a spool that could not be read."),
    "failed_batches": ("autospec_record_batches_failed", "Attempts to write to the telemetry database that failed."),
}
_WAITING = ("autospec_records_waiting", "Records neither in the telemetry database nor dropped so far.")


class RecorderMetrics(Collector):
    """Sums over the recorders it watches, those that are closed included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[Recorder] = []
        self._gone = dict.fromkeys(_COUNTERS, 0)

    def watch(self, recorder: Recorder) -> None:
        """Counts this one, too. Watching twice is harmless."""
        with self._lock:
            if not any(recorder is each for each in self._watched):
                self._watched.append(recorder)

    def forget(self, recorder: Recorder) -> None:
        """Keeps what a closed recorder has counted, and lets go of it."""
        with self._lock:
            if any(recorder is each for each in self._watched):
                self._watched = [each for each in self._watched if each is not recorder]
                for attribute in _COUNTERS:
                    self._gone[attribute] += getattr(recorder, attribute)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            recorders, totals = list(self._watched), dict(self._gone)
        for attribute, (name, description) in _COUNTERS.items():
            total = totals[attribute] + sum(getattr(recorder, attribute) for recorder in recorders)
            yield CounterMetricFamily(name, description, value=total)
        yield GaugeMetricFamily(*_WAITING, value=sum(recorder.waiting for recorder in recorders))
