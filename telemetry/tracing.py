"""One OpenTelemetry span for each request, named by the conventions for generative AI where they have a name.

Source: OpenTelemetry's semantic conventions for GenAI client spans, in development as of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from autospec.errors import ConfigurationError
from autospec.telemetry.labels import visible
from autospec.types import RequestRecord

try:
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
except ImportError as error:
    raise ConfigurationError("spans need opentelemetry-api: pip install 'autospec-decoding[otel]'") from error

OPERATION = "text_completion"
PROVIDER = "autospec"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = 500
_ERROR_CLASS = re.compile(r"([A-Za-z_][A-Za-z0-9_.]{0,99})(?::|$)")
_SETTINGS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", lambda text: int(float(text))),
}

Value = str | bool | int | float


class Spans:
    """Makes a span of each request: `autospec.wrap(model, metrics=Spans())`.

    It is a child of the span that is current where `generate` is called, begins and ends when the request did, and is
    of kind INTERNAL, since the model runs in this process. Neither prompts and answers nor error messages are in it.

    Args:
        tracer: what makes the spans; None: the tracer `autospec` of the global provider.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("autospec") if tracer is None else tracer

    def observe(self, record: RequestRecord) -> None:
        """Makes the span of one request that has ended, in the thread that made the request."""
        started = (record.started_at - _EPOCH) // timedelta(microseconds=1) * 1_000
        span = self._tracer.start_span(
            span_name(record), kind=SpanKind.INTERNAL, attributes=attributes(record), start_time=started
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=started + round(record.total_seconds * 1e9))


def span_name(record: RequestRecord) -> str:
    """The operation and, where it is known, the target."""
    return OPERATION if record.deployment is None else f"{OPERATION} {visible(record.deployment.target, _COLUMNS)}"


def attributes(record: RequestRecord) -> dict[str, Value]:
    """What the span says: `gen_ai.*` and `error.type` as the conventions define them, `autospec.*` for the rest."""
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.deployment.target if record.deployment else None,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "error.type": error_class(record.error),
        "autospec.segment": record.segment,
        "autospec.policy": record.policy,
        "autospec.policy_version": record.policy_version,
        "autospec.is_control": record.is_control,
        "autospec.decoding": record.decoding,
        "autospec.usual_action": record.usual_action,
        "autospec.fallback_reason": record.fallback_reason,
        "autospec.run": record.run,
        "autospec.device": record.deployment.device if record.deployment else None,
        "autospec.dtype": record.deployment.dtype if record.deployment else None,
        "autospec.blocks": record.blocks,
        "autospec.num_draft_tokens": record.num_draft_tokens,
        "autospec.num_judged_tokens": record.num_judged_tokens,
        "autospec.num_accepted_tokens": record.num_accepted_tokens,
        "autospec.prefill_seconds": record.seconds.prefill,
        "autospec.draft_seconds": record.seconds.draft,
        "autospec.verify_seconds": record.seconds.verify,
        "autospec.correction_seconds": record.seconds.correction,
        "autospec.emission_seconds": record.seconds.emission,
        "autospec.other_seconds": record.seconds.other,
        **_settings(record),
    }
    return {
        name: visible(value, _COLUMNS) if isinstance(value, str) else value
        for name, value in found.items()
        if value is not None
    }


def error_class(error: str | None) -> str | None:
    """The exception's class in `ValueError: what was wrong`, `_OTHER` when it cannot be told, None without an error."""
    if error is None:
        return None
    match = _ERROR_CLASS.match(error)
    return match[1] if match else "_OTHER"


def _settings(record: RequestRecord) -> dict[str, Value]:
    """How a sampled request was sampled, as far as `decoding` says; neutral values are not in it."""
    if not record.do_sample:
        return {}
    pairs = (word.partition("=") for word in record.decoding.split())
    known = ((_SETTINGS[name], value) for name, _, value in pairs if name in _SETTINGS)
    return {name: convert(value) for (name, convert), value in known}
