"""What vLLM's /metrics says, read as counts of engines, or refused."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autospec.errors import AutospecError
from autospec.integrations.vllm.exposition import counters_in
from autospec.integrations.vllm.ingest import Origin
from autospec.types import EngineCounters
from tests.vllm_metrics import Counted

NOW = datetime(2026, 12, 1, 12, 30, tzinfo=UTC)
ORIGIN = Origin("ngram", None, "cuda: H200")


def read(text: str, origin: Origin = ORIGIN) -> list[EngineCounters]:
    return counters_in(text, origin, "host:8000", NOW)


def busy(**named: object) -> Counted:
    counted = Counted(**named)  # type: ignore[arg-type]
    counted.request(40, 2.0)
    counted.request(20, 1.5, "length")
    return counted


def test_every_count_is_read() -> None:
    counted = busy()
    for drafted, accepted in ((3, 3), (3, 1), (2, 0)):
        counted.draft(drafted, accepted)
    (found,) = read(counted.text())
    assert (found.engine, found.target, found.device, found.source) == ("host:8000", "org/model", "cuda: H200", "ngram")
    assert found.scraped_at == NOW
    assert found.began_at is not None
    assert abs(found.began_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert (found.requests, found.prompt_tokens, found.output_tokens, found.steps) == (2, 20, 60, 60)
    assert (found.request_tokens, found.request_seconds) == (60, 3.5)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 8, 4)
    assert found.accepted == (2, 1, 1)


def test_an_engine_that_does_not_speculate_says_nothing_of_drafts() -> None:
    (found,) = read(busy(speculates=False).text())
    assert found.output_tokens == 60
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens, found.accepted) == (None,) * 3 + ((),)


def test_several_engines_and_models_are_told_apart() -> None:
    text = busy().text() + busy(engine="1").text() + busy(model="/models/tiny").text()
    found = read(text, Origin("ngram", "night"))
    assert [(each.engine, each.target, each.output_tokens) for each in found] == [
        ("night", "org/model", 60),
        ("night/1", "org/model", 60),
        ("night", "tiny", 60),
    ]


def test_a_process_says_when_it_began_where_the_counters_do_not() -> None:
    lines = [line for line in busy().text().splitlines() if "_created" not in line]
    (found,) = read("\n".join(lines) + "\n")
    assert found.began_at is None
    (found,) = read("\n".join([*lines, "process_start_time_seconds 1.79e9"]) + "\n")
    assert found.began_at == datetime.fromtimestamp(1.79e9, UTC)
    for wrong in ("NaN", "-5", "0", "1e300"):
        assert read("\n".join([*lines, f"process_start_time_seconds {wrong}"]) + "\n")[0].began_at is None


def test_times_and_names_that_prometheus_adds_are_taken() -> None:
    lines = [
        f'vllm:generation_tokens_total{{engine="0",instance="{host}:8000",job="{job}",model_name="m"}} {value} {time}'
        for host, job, value, time in (
            ("a", "x", 10, 1790000000000),
            ("a", "x", 30, 1790000060000),
            ("b", "x", 5, 1790000000000),
            ("b", "y", 2, 1790000000000),
        )
    ]
    found = read("\n".join(lines) + "\n")
    assert [(each.engine, each.output_tokens, each.scraped_at.timestamp()) for each in found] == [
        ("a:8000", 10, 1_790_000_000.0),
        ("a:8000", 30, 1_790_000_060.0),
        ("b:8000", 7, 1_790_000_000.0),
    ]


LINE = 'vllm:generation_tokens_total{engine="0",model_name="m"} 5\n'
POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="%s"} 1\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is that the /metrics of a vLLM server"),
        ("<html><body>It works!</body></html>\n", "is that the /metrics of a vLLM server"),
        ("go_goroutines 12\nprocess_start_time_seconds 1\n", "is that the /metrics of a vLLM server"),
        (LINE.replace("5", "NaN"), "is nan, where a count"),
        (LINE.replace("5", "+Inf"), "is inf, where a count"),
        (LINE.replace("5", "-1"), "is -1, where a count"),
        (LINE.replace("5", "1e300"), "where a count below 2^53"),
        (LINE.replace("5", "9007199254740993"), "where a count below 2^53"),
        (LINE.replace("5", "0.5"), "where a whole count"),
        (LINE + LINE, "comes twice"),
        (LINE[:-1], "cut off"),
        ('vllm:generation_tokens_total{engine="0 5\n', "no Prometheus text"),
        ("vllm:generation_tokens_total five\n", "no Prometheus text"),
        (LINE + POSITION % "-1", "has the position '-1'"),
        (LINE + POSITION % "99999", "has the position '99999'"),
        (LINE + POSITION % "", "has the position ''"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(AutospecError) as caught:
        read(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(st.sampled_from('vlm:generation_tokens_total{}="\\,. #TYPE counter\n0123456789eNaN+-_'), max_size=200))
def test_no_text_is_more_than_refused(text: str) -> None:
    for content in (text, LINE + text + "\n", f"vllm:generation_tokens_total{text}\n"):
        with suppress(AutospecError):
            read(content)
