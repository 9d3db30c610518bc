"""Requests of engines without the proposer: vLLM's per-request metrics, as responses hold them, as records.

Counts are below `metrics.speculative_decoding` of a response (`--per-request-spec-decode-metrics detailed`), or
`spec_decode_metrics` of an offline output. They are of steps that had drafts: the steps that had none follow from the
length of the answer.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autospec.decoding.tally import Tally
from autospec.deployment import package_version
from autospec.errors import ConfigurationError
from autospec.segments import clean
from autospec.traffic.importers.base import BrokenEntryError, label_of, number_of, options_of, shown, time_of
from autospec.traffic.importers.openai import flattened
from autospec.traffic.importers.vllm import counts_of, part_of, seconds_of
from autospec.traffic.importing import Entry, read_entries
from autospec.types import NONE, Action, BlockOutcome, Deployment, PhaseSeconds, RequestRecord

_MOST_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class Origin:
    """What responses do not say."""

    source: str  # that drafted, as in `ngram`
    host: str | None = None
    device: str = "vllm"
    segment: str = "default"  # of those that name none
    run: str | None = None


@dataclass(slots=True)
class Ingested:
    """What a file came to."""

    entries: int = 0
    requests: int = 0
    broken: list[str] = field(default_factory=list)  # as in `line 3: no counts`


def records_in(path: Path, origin: Origin, ingested: Ingested) -> Iterator[RequestRecord]:
    """The requests of a file of JSON Lines, or of one JSON array. The same file again gives the same records.

    Args:
        path: of responses, each as it is or beside its request (`{"request": ..., "response": ...}`).
        origin: what they do not say.
        ingested: is filled as the file is read.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    now = datetime.now(UTC)
    for entry in read_entries(path):
        ingested.entries += 1
        try:
            record = _record(entry, origin, now)
        except BrokenEntryError as error:
            ingested.broken.append(f"line {entry.number}: {error}")
            continue
        ingested.requests += 1
        yield record


def check_share(path: Path, ingested: Ingested, tolerate: float) -> None:
    """Raises: ConfigurationError: more of the file is broken than may be, or there is nothing in it."""
    if not ingested.requests or len(ingested.broken) > tolerate * ingested.entries:
        shown_lines = "; ".join(ingested.broken[:5]) or "nothing in it"
        raise ConfigurationError(
            f"{path}: {len(ingested.broken)} of {ingested.entries} lines are broken, at most a share of {tolerate:g} "
            f"is tolerated (--tolerate); nothing is written; {shown_lines}"
        )


def _record(entry: Entry, origin: Origin, now: datetime) -> RequestRecord:
    if entry.content is None:
        raise BrokenEntryError(entry.reason)
    flat = flattened(entry.content)
    prompt_tokens, output_tokens = _lengths(flat)
    counts = counts_of(flat) or part_of(_first(flat, "outputs"), "spec_decode_metrics")
    if not counts:
        raise BrokenEntryError(
            "no metrics.speculative_decoding: start vLLM with --per-request-spec-decode-metrics detailed, and ask for "
            "one answer (n=1)"
        )
    tally = _tally(counts, origin, prompt_tokens, output_tokens)
    options = options_of(flat)
    sampled = bool(options.get("do_sample", True))  # vLLM samples unless it is told not to
    words = [f"{name}={options[name]:g}" for name in ("temperature", "top_p", "top_k", "min_p") if name in options]
    metrics = part_of(flat, "metrics")
    started = time_of(flat.get("created")) or time_of(number_of(metrics.get("arrival_time")) or None) or now
    return RequestRecord(
        request_id=hashlib.blake2b(b"%d " % entry.number + entry.raw, digest_size=16).hexdigest(),
        started_at=started,
        segment=clean(label_of(flat, "segment") or origin.segment),
        policy=f"vllm:{origin.source}",
        is_control=False,
        do_sample=sampled,
        decoding=" ".join(["sample" if sampled else "greedy", *words]),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds_of(metrics) or PhaseSeconds(),
        run=origin.run,
        deployment=_deployment(flat, origin),
        **tally.counts(),
    )


def _deployment(flat: Mapping[str, Any], origin: Origin) -> Deployment:
    model = flat.get("model")
    name = model if isinstance(model, str) and model else "unknown"
    return Deployment(
        host=origin.host or socket.gethostname(),
        device=origin.device,
        target=Path(name).name if Path(name).is_absolute() else name,
        dtype="unknown",
        drafts=(origin.source,),
        versions={"autospec": package_version(), "vllm": "unknown"},
    )


def _lengths(flat: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of prompt and answer."""
    usage = part_of(flat, "usage")
    if usage:
        return _count(usage.get("prompt_tokens"), "usage"), _count(usage.get("completion_tokens"), "usage")
    ids, answer = flat.get("prompt_token_ids"), _first(flat, "outputs").get("token_ids")
    if not isinstance(ids, list) or not isinstance(answer, list):
        raise BrokenEntryError("neither usage nor token ids say how long prompt and answer are")
    return len(ids), len(answer)


def _first(flat: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = flat.get(name)
    return found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise BrokenEntryError(f"{name} has {shown(value)}, where a count is needed")
    return value


def _counts(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise BrokenEntryError(f"{name} is {shown(value)}, a list of counts is needed")
    return [_count(each, name) for each in value]


def _tally(counts: Mapping[str, Any], origin: Origin, prompt_tokens: int, output_tokens: int) -> Tally:
    """Each step as a block: those with drafts as they are listed, and those without."""
    steps = _steps(counts)
    block_length = _count(counts.get("num_spec_tokens", max((drafted for drafted, _ in steps), default=1)), "counts")
    tally = Tally()

    def add(action: Action, drafted: int, accepted: int) -> None:
        judged = min(accepted + 1, drafted)
        tally.add(BlockOutcome(origin.segment, action, prompt_tokens, drafted, judged, accepted, accepted + 1))

    drafting = Action(origin.source, block_length, "vllm")
    for drafted, accepted in steps:
        if drafted > block_length:
            raise BrokenEntryError(f"a step with {drafted} drafts, where {block_length} is the most")
        add(drafting, drafted, accepted)
    committed = sum(accepted + 1 for _, accepted in steps)
    for _ in range(max(0, output_tokens - 1 - committed)):  # the first token comes from the prompt
        add(Action(NONE, 0, "vllm"), 0, 0)
    return tally


def _steps(counts: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Draft tokens proposed and accepted, of each step that had any."""
    if counts.get("per_step_drafted") is not None or counts.get("per_step_accepted") is not None:
        drafted, accepted = (_counts(counts.get(name), name) for name in ("per_step_drafted", "per_step_accepted"))
        if len(drafted) != len(accepted):
            raise BrokenEntryError("per_step_drafted and per_step_accepted are of different lengths")
        pairs = list(zip(drafted, accepted, strict=True))
        if any(a > d for d, a in pairs):
            raise BrokenEntryError("a step that accepted more than was drafted")
        return pairs
    histogram = _counts(counts.get("acceptance_histogram"), "acceptance_histogram")
    longest, total = (_count(counts.get(name), name) for name in ("num_spec_tokens", "num_draft_tokens"))
    if total != sum(histogram) * longest or len(histogram) > longest + 1:
        raise BrokenEntryError(
            "drafts of different lengths, and nothing says which: --per-request-spec-decode-metrics detailed is needed"
        )
    return [(longest, accepted) for accepted, count in enumerate(histogram) for _ in range(count)]
