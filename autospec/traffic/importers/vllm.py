"""What vLLM says of its requests: responses of its server, and `RequestOutput`s of `LLM.generate`.

A response is OpenAI's, perhaps with `metrics`: times (`vllm serve --enable-per-request-metrics`) and, below
`speculative_decoding`, counts (`--per-request-spec-decode-metrics summary`), of which `acceptance_histogram[j]` is how
many steps accepted j draft tokens; steps without a draft are in none of them. For a request with `return_token_ids` it
has token ids: each choice `token_ids`, the response of a chat `prompt_token_ids`, and of a completion each choice.
Without the request's messages or prompt beside it, or `prompt_token_ids`, there is nothing to replay.

A `RequestOutput` is read by its attributes as JSON: `prompt`, `prompt_token_ids`, `outputs` (each with `text`,
`token_ids`, `finish_reason`, `stop_reason`, perhaps `spec_decode_metrics` as its `to_dict` gives them) and `metrics`.

Only where `finish_reason` is `stop` and `stop_reason` is null did the model end the answer with EOS. Where a stop
string or token ended it, or `reasoning` stands apart, the text is less than what was said; token ids hold all of it.

Source: vLLM 0.32.0, docs/features/speculative_decoding/acceptance_metrics.md and docs/features/per_request_metrics.md;
    vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py at commit 002032ee, vllm/outputs.py,
    RequestStateStats in vllm/v1/metrics/stats.py, vllm/benchmarks/serve.py; pull request 2976 for `stop_reason`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from autospec.traffic.importers.base import (
    BrokenEntryError,
    ImportedRequest,
    ids_of,
    label_of,
    number_of,
    options_of,
    shown,
    text_of,
    time_of,
)
from autospec.traffic.importers.openai import answered, flattened, prompt_of
from autospec.types import PhaseSeconds

_BENCHMARK = {"generated_texts", "input_lens"}
"""Of a result of `vllm bench serve --save-detailed`, which holds no prompt."""
_TIMES = ("time_to_first_token_ms", "generation_time_ms")


class Vllm:
    """`{"messages": ..., "choices": [{"token_ids": ...}], "metrics": {"speculative_decoding": ...}}` and the like."""

    name = "vllm"
    keys = "metrics.speculative_decoding, choices with token_ids or stop_reason, outputs"

    def matches(self, entry: Mapping[str, Any]) -> bool:
        flat = flattened(entry)
        metrics = part_of(flat, "metrics")
        return (
            counts_of(flat) is not None
            or any(name in metrics for name in _TIMES)
            or any(choice.keys() & {"token_ids", "stop_reason"} for choice in _objects(flat.get("choices")))
            or any("token_ids" in output for output in _objects(flat.get("outputs")))
            or flat.keys() >= _BENCHMARK
        )

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]:
        flat = flattened(entry)
        if flat.keys() >= _BENCHMARK:
            raise BrokenEntryError("a result of `vllm bench serve` has answers and times, but no prompts to replay")
        is_offline = flat.get("outputs") is not None and "choices" not in flat
        asked = _asked_offline(flat) if is_offline else _asked(flat)
        name = "outputs" if is_offline else "choices"
        choices = flat.get(name)
        if choices is None:
            return [replace(asked, **_measured(flat, {}))]
        if not isinstance(choices, list) or not choices:
            raise BrokenEntryError(f"{name} is {shown(choices)}, a list with an answer is needed")
        measured = _measured(flat, choices[0] if isinstance(choices[0], dict) else {})
        if len(choices) > 1 and measured:
            if not is_offline:
                raise BrokenEntryError(f"{name} has {len(choices)} answers, one is needed beside its metrics")
            measured = {}  # times of one of them
        return [replace(_answer(asked, choice, f"{name}[{i}]"), **measured) for i, choice in enumerate(choices)]


def part_of(flat: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = flat.get(name)
    return found if isinstance(found, dict) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _asked(flat: Mapping[str, Any]) -> ImportedRequest:
    """Of a request to the server and its response."""
    ids, prompt = flat.get("prompt_token_ids"), flat.get("prompt")
    own = [choice.get("prompt_token_ids") for choice in _objects(flat.get("choices"))]  # of completions
    if ids is None and own:
        ids = own[0]
    if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:  # a list of prompts
        prompt = prompt[0]
    if isinstance(prompt, list):
        is_ids = all(type(token) is int for token in prompt)
        if not is_ids and (not own or None in own):
            raise BrokenEntryError(f"prompt is {shown(prompt)}: whose answer is which is not said (return_token_ids)")
        ids, prompt = (prompt if ids is None else ids), None
    known = {"prompt_token_ids": ids, "prompt": prompt}
    if flat.get("messages") is None and all(value is None for value in known.values()):
        raise BrokenEntryError(
            "it has no messages, prompt or prompt_token_ids: nothing of it can be replayed; log requests beside "
            "responses, or ask for return_token_ids"
        )
    return prompt_of({name: value for name, value in {**flat, **known}.items() if value is not None})


def _asked_offline(flat: Mapping[str, Any]) -> ImportedRequest:
    """Of a `RequestOutput`."""
    ids, prompt = flat.get("prompt_token_ids"), flat.get("prompt")
    if ids is None and prompt is None:
        raise BrokenEntryError("outputs without a prompt or prompt_token_ids: nothing of it can be replayed")
    return ImportedRequest(
        prompt=None if prompt is None else text_of(prompt, "prompt"),
        prompt_ids=None if ids is None else ids_of(ids, "prompt_token_ids"),
        segment=label_of(flat, "segment"),
        options=options_of(flat),
        started_at=_arrival(flat),
        conversation=label_of(flat, "conversation_id", "session_id"),
    )


def _arrival(flat: Mapping[str, Any]) -> datetime | None:
    arrival = number_of(part_of(flat, "metrics").get("arrival_time"))
    return time_of(arrival) if arrival else None


def _answer(asked: ImportedRequest, choice: Any, name: str) -> ImportedRequest:
    """One of the answers, its token ids before its text."""
    found = answered(asked, choice, name)
    if (own := choice.get("prompt_token_ids")) is not None:
        found = replace(found, prompt_ids=ids_of(own, f"{name}.prompt_token_ids"))
    message = part_of(choice, "message")
    reasoning = next((message[key] for key in ("reasoning", "reasoning_content") if message.get(key)), None)
    stopped_by = choice.get("stop_reason")
    if found.output_ids is not None and (reasoning is not None or stopped_by is not None):
        found = replace(found, completion=None)  # the ids spell more than the text
    elif reasoning is not None:
        raise BrokenEntryError(f"{name} has reasoning apart from its text, token_ids are needed (return_token_ids)")
    return replace(found, is_ended=found.is_ended and stopped_by is None)


def counts_of(flat: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for place in (part_of(flat, "metrics"), flat):
        found = place.get("speculative_decoding")
        if isinstance(found, dict):
            return found
    return None


def _measured(flat: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and times, as far as there are any."""
    found: dict[str, Any] = {}
    counts = counts_of(flat) or part_of(choice, "spec_decode_metrics")
    histogram = counts.get("acceptance_histogram")
    if histogram is not None and not (
        isinstance(histogram, list) and all(type(count) is int and count >= 0 for count in histogram)
    ):
        raise BrokenEntryError(f"acceptance_histogram is {shown(histogram)}, a list of counts is needed")
    if lengths := {index + 1: count for index, count in enumerate(histogram or ()) if count}:
        found["acceptance_lengths"] = lengths
    drafted = counts.get("num_draft_tokens")
    if type(drafted) is int and drafted > 0:
        found["num_draft_tokens"] = drafted
    if (seconds := seconds_of(part_of(flat, "metrics"))) is not None:
        found["seconds"], found["total_seconds"] = seconds, seconds.total
    return found


def seconds_of(metrics: Mapping[str, Any]) -> PhaseSeconds | None:
    """From being scheduled to the last token; waiting in the queue is none of it."""
    first, rest = (number_of(metrics.get(name)) for name in _TIMES)
    if first is not None and rest is not None:
        return PhaseSeconds(prefill=first / 1000, other=rest / 1000)
    names = ("scheduled_ts", "first_token_ts", "last_token_ts")
    scheduled, first, last = (number_of(metrics.get(name)) for name in names)
    if scheduled and first and last and scheduled <= first <= last:
        return PhaseSeconds(prefill=first - scheduled, other=last - first)
    return None
