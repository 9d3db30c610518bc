"""Prometheus metrics of wrapped models. What each of them means: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from autospec.errors import ConfigurationError
from autospec.telemetry.metric_labels import BoundedLabel, at_least_one, bounded_number, fallback_kind
from autospec.types import NONE, ActionTally, RequestRecord, split_label

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigurationError("metrics need prometheus-client: pip install 'autospec-decoding[metrics]'") from error

from autospec.telemetry.recorder_metrics import RecorderMetrics

if TYPE_CHECKING:
    from autospec.telemetry.recorder import Recorder

CONTROL = "control"
POLICY = "policy"
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds in seconds."""

PHASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)
"""Upper bounds in seconds."""

_MAX_SOURCES = 20


class Metrics(Collector):
    """Counts requests for Prometheus: `autospec.wrap(model, metrics=Metrics())`. One object may serve several models.

    Names of segments, draft sources and reasons come from outside. So that the number of time series stays bounded,
    the first few of each keep their names and the rest are counted as `other`.

    Args:
        registry: where the metrics are exported; None: prometheus-client's own, which most exporters serve.
        max_segments: segments that are told apart.
        max_reasons: kinds of reasons of decisions that are told apart.
        max_positions: draft positions, and block lengths, that are told apart.

    Raises:
        ConfigurationError: a bound is below 1, or the registry has such metrics already.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        max_segments: int = 50,
        max_reasons: int = 20,
        max_positions: int = 16,
    ) -> None:
        self._segments = BoundedLabel(at_least_one("max_segments", max_segments))
        self._reasons = BoundedLabel(at_least_one("max_reasons", max_reasons))
        self._max_positions = at_least_one("max_positions", max_positions)
        self._sources = BoundedLabel(_MAX_SOURCES)
        self._families: list[Counter | Histogram] = []
        self._make()
        self._recorders = RecorderMetrics()
        self.registry = REGISTRY if registry is None else registry
        try:
            self.registry.register(self)
        except ValueError as error:
            raise ConfigurationError(
                "this registry has autospec's metrics already: pass the same Metrics object to every wrap, "
                "or another registry"
            ) from error

    def _make(self) -> None:
        by_arm, by_source = ["segment", "arm"], ["segment", "source"]
        self._request_seconds = self._histogram(
            "autospec_request_seconds", "Seconds of a request, prefill included.", by_arm, REQUEST_BUCKETS
        )
        self._output_tokens = self._counter("autospec_output_tokens", "Tokens of answers.", by_arm)
        self._draft_seconds = self._histogram(
            "autospec_request_draft_seconds",
            "Seconds of drafting in a request that was decoded by blocks, summed over them, catch-up included.",
            ["segment"],
            PHASE_BUCKETS,
        )
        self._verify_seconds = self._histogram(
            "autospec_request_verify_seconds",
            "Seconds of target forwards in a request that was decoded by blocks, summed over them, without prefill.",
            ["segment"],
            PHASE_BUCKETS,
        )
        self._drafts = self._counter(
            "autospec_spec_decode_num_drafts", "Blocks in which at least one draft token was proposed.", by_source
        )
        self._draft_tokens = self._counter("autospec_spec_decode_num_draft_tokens", "Draft tokens proposed.", by_source)
        self._accepted_tokens = self._counter(
            "autospec_spec_decode_num_accepted_tokens", "Draft tokens accepted, bonus tokens not counted.", by_source
        )
        self._accepted_at = self._counter(
            "autospec_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the block, the first being 0.",
            [*by_source, "position"],
        )
        self._judged_at = self._counter(
            "autospec_spec_decode_num_judged_tokens_per_pos",
            "Draft tokens accepted or rejected, by position in the block, the first being 0.",
            [*by_source, "position"],
        )
        self._decisions = self._counter(
            "autospec_decisions",
            "Blocks by what was asked for: draft source, block length (0: a plain step) and kind of reason.",
            ["source", "block_length", "reason"],
        )
        self._fallbacks = self._counter(
            "autospec_fallbacks", "Calls left to the original generate, by kind of reason.", ["reason"]
        )

    def observe(self, record: RequestRecord) -> None:
        """Counts one request. Takes a fraction of a millisecond; may be called from several threads."""
        segment = self._segments.value(record.segment)
        arm = CONTROL if record.is_control else POLICY
        self._request_seconds.labels(segment, arm).observe(record.total_seconds)
        self._output_tokens.labels(segment, arm).inc(record.output_tokens)
        if record.fallback_reason is not None:
            self._fallbacks.labels(fallback_kind(record.fallback_reason)).inc()
        if record.blocks:
            self._draft_seconds.labels(segment).observe(record.seconds.draft)
            self._verify_seconds.labels(segment).observe(record.seconds.verify)
        for label, tally in record.by_action.items():
            source, _ = split_label(label)
            if source != NONE:
                self._count_drafts(segment, self._sources.value(source), tally)
        for decision, blocks in record.decisions.items():
            label, _, reason = decision.rpartition(" ")
            source, block_length = split_label(label)
            shown_length = bounded_number(block_length, self._max_positions)
            self._decisions.labels(self._sources.value(source), shown_length, self._reasons.value(reason)).inc(blocks)

    def watch(self, recorder: Recorder) -> None:
        """Exports what this recorder counts, too. `autospec.wrap` calls it."""
        self._recorders.watch(recorder)

    def forget(self, recorder: Recorder) -> None:
        """Keeps what a closed recorder has counted, and lets go of it."""
        self._recorders.forget(recorder)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus is told."""
        for family in self._families:
            yield from family.collect()
        yield from self._recorders.collect()

    def describe(self) -> Iterator[Metric]:
        """Names, types and help texts."""
        for family in self._families:
            yield from family.describe()
        yield from self._recorders.collect()

    def _count_drafts(self, segment: str, source: str, tally: ActionTally) -> None:
        """A block with a proposal judges its first position, whatever ends it, and one without judges none."""
        self._drafts.labels(segment, source).inc(tally.at_risk[0] if tally.at_risk else 0)
        self._draft_tokens.labels(segment, source).inc(tally.num_draft_tokens)
        self._accepted_tokens.labels(segment, source).inc(tally.num_accepted_tokens)
        for counter, counts in ((self._judged_at, tally.at_risk), (self._accepted_at, tally.accepted)):
            for position, count in enumerate(counts):
                counter.labels(segment, source, bounded_number(position, self._max_positions - 1)).inc(count)

    def _counter(self, name: str, description: str, labels: list[str]) -> Counter:
        counter = Counter(name, description, labels, registry=None)
        self._families.append(counter)
        return counter

    def _histogram(self, name: str, description: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, description, labels, buckets=buckets, registry=None)
        self._families.append(histogram)
        return histogram


def serve(metrics: Metrics, port: int, host: str = "127.0.0.1") -> WSGIServer:
    """Serves the metrics at `http://host:port/metrics` from a background thread, without any authentication.

    Args:
        metrics: whose registry is served.
        port: 0 takes a free one, which the result's `server_port` tells.
        host: the loopback address lets this machine alone read them.

    Returns:
        The server; `shutdown()` and `server_close()` end it.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        server, _ = start_http_server(port, addr=host, registry=metrics.registry)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"metrics cannot be served at {host}:{port}: {error}") from error
    return server
