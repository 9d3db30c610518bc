"""vLLM's Prometheus counters, as its /metrics gives them: what each engine has counted so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autospec.errors import AutospecError, ConfigurationError
from autospec.integrations.vllm.ingest import Origin
from autospec.types import EngineCounters

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

COUNTS = {
    "requests": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "request_tokens": "vllm:request_generation_tokens_sum",
    "request_seconds": "vllm:request_inference_time_seconds_sum",
    "steps": "vllm:iteration_tokens_total_count",
    "num_drafts": "vllm:spec_decode_num_drafts_total",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
"""By field of `EngineCounters`; of series that differ in other labels than engine and model the sum."""
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
BEGAN = "vllm:generation_tokens_created"
PROCESS_BEGAN = "process_start_time_seconds"
RUNNING = "vllm:num_requests_running"
_FRACTIONS = frozenset(["request_seconds"])
_FIELDS = {name: field for field, name in COUNTS.items()}
_WANTED = (*COUNTS.values(), POSITIONS, BEGAN, PROCESS_BEGAN, RUNNING)
_FAMILIES = tuple(name.removesuffix("_total").removesuffix("_count").removesuffix("_sum") for name in _WANTED)
_MOST = 1 << 53  # a float tells no larger counts apart
_MOST_POSITIONS = 1024

Identity = tuple[str, str, str, float | None]  # instance, engine, model, seconds since 1970


def samples_in(text: str) -> Iterator[Sample]:
    """Samples of the families that are read here, by the field's own parser.

    Raises:
        ConfigurationError: prometheus-client is not installed.
        AutospecError: a line of theirs cannot be read.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigurationError(
            "vLLM's metrics are read by prometheus-client: pip install 'autospec-decoding[metrics]'"
        ) from error
    prefixes = (*_FAMILIES, *(f"# {kind} {name}" for kind in ("TYPE", "HELP") for name in _FAMILIES))
    lines = [line for line in text.split("\n") if line.startswith(prefixes)]
    if lines and not text.endswith("\n"):
        raise AutospecError("it is cut off in the middle of a line")
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except (ValueError, LookupError) as error:
        raise AutospecError(f"it holds what is no Prometheus text: {error}") from error
    return (sample for family in families for sample in family.samples if sample.name in _WANTED)


def counters_in(text: str, origin: Origin, name: str, at: datetime) -> list[EngineCounters]:
    """What each engine has counted.

    Args:
        text: an exposition, in Prometheus' text format.
        origin: what it does not say.
        name: of the engine, where neither the origin nor a label `instance` names it.
        at: when it was read, where samples bear no time of their own.

    Raises:
        ConfigurationError: prometheus-client is not installed.
        AutospecError: it is not vLLM's, or a value cannot be.
    """
    fields: dict[Identity, dict[str, Any]] = defaultdict(dict)
    positions: dict[Identity, dict[int, int]] = defaultdict(dict)
    began: dict[Identity, float] = {}
    processes: dict[str, float] = {}
    seen: set[tuple[Any, ...]] = set()
    for sample in samples_in(text):
        series = (sample.name, *sorted(sample.labels.items()), sample.timestamp)
        if series in seen:
            raise AutospecError(f"{sample.name} comes twice: one exposition at a time, or with timestamps")
        seen.add(series)
        instance = sample.labels.get("instance", "")
        if sample.name == PROCESS_BEGAN:
            processes[instance] = sample.value
            continue
        engine, model = sample.labels.get("engine", "0"), sample.labels.get("model_name", "unknown")
        identity = (instance, engine, model, None if sample.timestamp is None else float(sample.timestamp))
        if sample.name == BEGAN:
            began[identity] = min(sample.value, began.get(identity, sample.value))
        elif sample.name == POSITIONS:
            place = _position(sample)
            positions[identity][place] = positions[identity].get(place, 0) + _count(sample)
        elif (field := _FIELDS.get(sample.name)) is not None:
            value = _number(sample) if field in _FRACTIONS else _count(sample)
            fields[identity][field] = fields[identity].get(field, 0) + value
    if not any("output_tokens" in found for found in fields.values()):
        raise AutospecError(f"there is no {COUNTS['output_tokens']} in it: is that the /metrics of a vLLM server?")
    return [
        EngineCounters(
            engine=_name(identity, origin.host or name),
            target=_target(identity[2]),
            device=origin.device,
            source=origin.source,
            scraped_at=scraped_at,
            began_at=_beginning(began.get(identity, processes.get(identity[0])), scraped_at),
            accepted=tuple(positions[identity].get(j, 0) for j in range(max(positions[identity], default=-1) + 1)),
            **found,
        )
        for identity, found in fields.items()
        for scraped_at in [at if identity[3] is None else datetime.fromtimestamp(identity[3], UTC)]
    ]


def _name(identity: Identity, name: str) -> str:
    instance, engine, _, _ = identity
    return (instance or name) + ("" if engine == "0" else f"/{engine}")


def _target(model: str) -> str:
    return Path(model).name if Path(model).is_absolute() else model


def _beginning(seconds: float | None, scraped_at: datetime) -> datetime | None:
    """None: not said, or it cannot be."""
    latest = (scraped_at + timedelta(days=1)).timestamp()
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None and 0.0 < seconds < latest else None


def _position(sample: Sample) -> int:
    text = sample.labels.get("position", "")
    if not text.isascii() or not text.isdigit() or int(text) >= _MOST_POSITIONS:
        raise AutospecError(f"{sample.name} has the position {text[:20]!r}, where a number from 0 on is needed")
    return int(text)


def _number(sample: Sample) -> float:
    if not 0.0 <= sample.value < _MOST:  # NaN is not, either
        raise AutospecError(f"{sample.name} is {sample.value}, where a count below 2^53 is needed")
    return sample.value


def _count(sample: Sample) -> int:
    if (value := _number(sample)) != int(value):
        raise AutospecError(f"{sample.name} is {sample.value}, where a whole count is needed")
    return int(value)
