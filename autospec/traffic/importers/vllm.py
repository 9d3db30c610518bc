"""vLLM's per-request metrics: a response with `metrics.speculative_decoding`, logged with its request.

`vllm serve --per-request-spec-decode-metrics summary` adds an `acceptance_histogram` (index j: steps that accepted j
draft tokens) and `num_draft_tokens` to the response, `--enable-per-request-metrics` times in milliseconds. Neither
holds a token: without the request's messages, prompt or `prompt_token_ids`, there is nothing to replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autospec.traffic.importers.base import BrokenEntryError, ImportedRequest, number_of, shown
from autospec.traffic.importers.openai import answered, flattened, prompt_of
from autospec.types import PhaseSeconds


class Vllm:
    name = "vllm"
    keys = "metrics.speculative_decoding"

    def matches(self, entry: Mapping[str, Any]) -> bool:
        return _counts(flattened(entry)) is not None

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]:
        flat = flattened(entry)
        if not any(flat.get(name) is not None for name in ("messages", "prompt", "prompt_token_ids")):
            raise BrokenEntryError(
                "it has counts of speculative decoding, but no messages, prompt or prompt_token_ids: nothing of it can "
                "be replayed; log requests beside responses"
            )
        asked = replace(prompt_of(flat), **_measured(flat))
        choices = flat.get("choices")
        if choices is None:
            return [asked]
        if not isinstance(choices, list) or len(choices) != 1:
            raise BrokenEntryError(f"choices is {shown(choices)}, one answer is needed beside its counts")
        return [answered(asked, choices[0], "choices[0]")]


def _counts(flat: Mapping[str, Any]) -> Mapping[str, Any] | None:
    metrics = flat.get("metrics")
    for place in (metrics if isinstance(metrics, dict) else {}, flat):
        found = place.get("speculative_decoding")
        if isinstance(found, dict):
            return found
    return None


def _measured(flat: Mapping[str, Any]) -> dict[str, Any]:
    counts = _counts(flat) or {}
    histogram = counts.get("acceptance_histogram")
    if histogram is not None and not (
        isinstance(histogram, list) and all(type(count) is int and count >= 0 for count in histogram)
    ):
        raise BrokenEntryError(f"acceptance_histogram is {shown(histogram)}, a list of counts is needed")
    drafted = counts.get("num_draft_tokens")
    found: dict[str, Any] = {
        "acceptance_lengths": {index + 1: count for index, count in enumerate(histogram or ()) if count},
        "num_draft_tokens": drafted if type(drafted) is int and drafted >= 0 else 0,
    }
    metrics = flat.get("metrics")
    times = metrics if isinstance(metrics, dict) else {}
    first, rest = (number_of(times.get(name)) for name in ("time_to_first_token_ms", "generation_time_ms"))
    if first is not None and rest is not None:
        found["seconds"] = PhaseSeconds(prefill=first / 1000, other=rest / 1000)
        found["total_seconds"] = found["seconds"].total
    return found
