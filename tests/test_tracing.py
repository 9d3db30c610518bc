"""Spans: one per request, in the terms of OpenTelemetry's conventions, and nothing of prompts or answers in it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import tiny
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import SpanKind, StatusCode

import autospec
from autospec.telemetry import Spans
from autospec.telemetry.tracing import error_class
from autospec.types import Deployment, PhaseSeconds, RequestRecord

DEPLOYMENT = Deployment("host", "cpu: x, 2 threads", "smollm2-135m", "float32", ("ngram",), {"autospec": "0"})


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": "ab" * 16,
        "started_at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "segment": "code",
        "policy": "auto",
        "is_control": False,
        "do_sample": True,
        "decoding": "sample temperature=0.8 top_k=40 top_p=0.95 repetition_penalty=1.1 logits_processor",
        "prompt_tokens": 10,
        "output_tokens": 18,
        "seconds": PhaseSeconds(prefill=0.5, draft=0.25, verify=1.0, correction=0.125, emission=0.0625, other=0.0625),
        "blocks": 7,
        "num_draft_tokens": 15,
        "num_judged_tokens": 12,
        "num_accepted_tokens": 9,
        "actions": {"ngram:4": 5, "none": 2},
        "deployment": DEPLOYMENT,
        **changes,
    }
    return RequestRecord(**values)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


def one(exporter: InMemorySpanExporter) -> Any:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_is_a_span(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    Spans(provider.get_tracer("t")).observe(record())
    span = one(exporter)
    assert span.name == "text_completion smollm2-135m"
    assert span.kind is SpanKind.INTERNAL
    assert span.start_time == 1_767_323_045_678_901_000
    assert span.end_time - span.start_time == 2_000_000_000
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "autospec",
        "gen_ai.request.model": "smollm2-135m",
        "gen_ai.request.temperature": 0.8,
        "gen_ai.request.top_p": 0.95,
        "gen_ai.request.top_k": 40,
        "gen_ai.response.id": "ab" * 16,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 18,
        "autospec.segment": "code",
        "autospec.policy": "auto",
        "autospec.is_control": False,
        "autospec.decoding": "sample temperature=0.8 top_k=40 top_p=0.95 repetition_penalty=1.1 logits_processor",
        "autospec.usual_action": "ngram:4",
        "autospec.device": "cpu: x, 2 threads",
        "autospec.dtype": "float32",
        "autospec.blocks": 7,
        "autospec.num_draft_tokens": 15,
        "autospec.num_judged_tokens": 12,
        "autospec.num_accepted_tokens": 9,
        "autospec.prefill_seconds": 0.5,
        "autospec.draft_seconds": 0.25,
        "autospec.verify_seconds": 1.0,
        "autospec.correction_seconds": 0.125,
        "autospec.emission_seconds": 0.0625,
        "autospec.other_seconds": 0.0625,
    }


def test_names_are_those_of_the_conventions(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    Spans(provider.get_tracer("t")).observe(record(error="ValueError: no"))
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    known |= {error_attributes.ERROR_TYPE}
    used = {name for name in one(exporter).attributes if not name.startswith("autospec.")}
    assert "error.type" in used
    assert used - known == set()
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert one(exporter).attributes["gen_ai.operation.name"] in operations


def test_greedy_requests_have_no_temperature(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    Spans(provider.get_tracer("t")).observe(record(do_sample=False, decoding="greedy temperature=0.7"))
    assert not [name for name in one(exporter).attributes if name.startswith("gen_ai.request.t")]


def test_an_error_gives_its_class_and_keeps_its_message(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    Spans(provider.get_tracer("t")).observe(record(error="ValueError: my prompt is secret", deployment=None))
    span = one(exporter)
    assert span.name == "text_completion"
    assert span.attributes["error.type"] == "ValueError"
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, None),
        ("KeyError: 'x'", "KeyError"),
        ("torch.OutOfMemoryError: no room", "torch.OutOfMemoryError"),
        ("KeyboardInterrupt: ", "KeyboardInterrupt"),
        ("", "_OTHER"),
        ("what is this", "_OTHER"),
        ("x" * 500 + ": y", "_OTHER"),
    ],
)
def test_classes_of_errors(error: str | None, expected: str | None) -> None:
    assert error_class(error) == expected


def test_hostile_names_are_spelled_out(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    name = "a\x1b[31m\ud800" + "x" * 2_000
    Spans(provider.get_tracer("t")).observe(record(segment=name, fallback_reason=name, run=name))
    for attribute in ("autospec.segment", "autospec.fallback_reason", "autospec.run"):
        shown = one(exporter).attributes[attribute]
        assert len(shown) == 500
        assert shown.startswith("a\\x1b[31m\\ud800x")
    one(exporter).to_json().encode("utf-8")


def test_spans_of_a_wrapped_model_are_children_of_the_callers(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    model = tiny.llama()
    tracer = provider.get_tracer("t")
    with autospec.wrap(model, policy="fixed:ngram:4", metrics=Spans(tracer)) as speculator:
        with tracer.start_as_current_span("handle request") as outer:
            model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False, segment="copy")
        last = speculator.last_request
    assert last is not None
    inner, parent = exporter.get_finished_spans()
    assert parent.name == "handle request"
    assert inner.parent is not None
    assert inner.parent.span_id == outer.get_span_context().span_id
    assert inner.attributes is not None
    assert inner.attributes["gen_ai.response.id"] == last.request_id
    assert inner.attributes["autospec.num_draft_tokens"] == last.num_draft_tokens > 0
    assert parent.start_time <= inner.start_time <= inner.end_time
    assert inner.end_time <= parent.end_time + 50_000_000  # two clocks


def test_without_a_tracer_the_global_one_is_used() -> None:
    Spans().observe(record())  # no provider is set: nothing happens
