"""Metrics: what is counted, how many time series there can be, and that dashboard, alerts and docs name what exists."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

import autospec
from autospec.cli.main import group
from autospec.drafts import NGram
from autospec.errors import ConfigurationError
from autospec.telemetry import Metrics
from autospec.telemetry.metric_labels import bounded_number, fallback_kind
from autospec.telemetry.metrics import serve
from autospec.telemetry.recorder import Recorder
from autospec.types import ActionTally, PhaseSeconds, RequestRecord

ROOT = Path(__file__).parents[1]
IDENTIFIER = re.compile(r"autospec_[a-z_]+")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def record(segment: str = "code", **changes: Any) -> RequestRecord:
    """Seven blocks: four asked ngram for 4 tokens (one got none), two an assistant for 2, one was plain."""
    values: dict[str, Any] = {
        "request_id": "0" * 32,
        "started_at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "segment": segment,
        "policy": "auto",
        "is_control": False,
        "do_sample": False,
        "decoding": "greedy",
        "prompt_tokens": 10,
        "output_tokens": 18,
        "seconds": PhaseSeconds(prefill=0.5, draft=0.25, verify=1.0, correction=0.125, emission=0.0625, other=0.0625),
        "blocks": 7,
        "by_action": {
            "ngram:4": ActionTally(
                4, 11, 9, 7, 11, at_risk=(3, 3, 2, 1), accepted=(3, 2, 1, 1), draft_seconds=0.05, verify_seconds=0.6
            ),
            "assistant:2": ActionTally(2, 4, 3, 2, 4, at_risk=(2, 1), accepted=(1, 1)),
            "none": ActionTally(1, 0, 0, 0, 1),
        },
        "decisions": {"ngram:4 best": 3, "ngram:4 probe": 1, "assistant:2 best": 2, "none off": 1},
        **changes,
    }
    return RequestRecord(**values)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def samples(metrics: Metrics, *, with_buckets: bool = False) -> dict[str, float]:
    """The exported text as a mapping from `name{labels}` to value."""
    found = {}
    for line in generate_latest(metrics.registry).decode("utf-8").splitlines():
        name = re.split(r"[{ ]", line)[0]
        if (
            not line.startswith("#")
            and not name.endswith("_created")
            and (with_buckets or not name.endswith("_bucket"))
        ):
            series, _, value = line.rpartition(" ")
            found[series] = float(value)
    return found


def families(metrics: Metrics) -> dict[str, str]:
    """Name as it is exported -> type."""
    return {found.name + ("_total" if found.type == "counter" else ""): found.type for found in metrics.describe()}


def exported_names(metrics: Metrics) -> set[str]:
    endings = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {name + ending for name, kind in families(metrics).items() for ending in endings[kind]}


class TestCounting:
    def test_text_of_one_request(self, metrics: Metrics) -> None:
        metrics.observe(record())
        nothing_recorded = dict.fromkeys([name for name in families(metrics) if "_record" in name], 0.0)
        assert samples(metrics) == {
            'autospec_request_seconds_count{arm="policy",segment="code"}': 1,
            'autospec_request_seconds_sum{arm="policy",segment="code"}': 2,
            'autospec_output_tokens_total{arm="policy",segment="code"}': 18,
            'autospec_request_draft_seconds_count{segment="code"}': 1,
            'autospec_request_draft_seconds_sum{segment="code"}': 0.25,
            'autospec_request_verify_seconds_count{segment="code"}': 1,
            'autospec_request_verify_seconds_sum{segment="code"}': 1,
            'autospec_spec_decode_num_drafts_total{segment="code",source="ngram"}': 3,
            'autospec_spec_decode_num_drafts_total{segment="code",source="assistant"}': 2,
            'autospec_spec_decode_num_draft_tokens_total{segment="code",source="ngram"}': 11,
            'autospec_spec_decode_num_draft_tokens_total{segment="code",source="assistant"}': 4,
            'autospec_spec_decode_num_accepted_tokens_total{segment="code",source="ngram"}': 7,
            'autospec_spec_decode_num_accepted_tokens_total{segment="code",source="assistant"}': 2,
            **_per_position("accepted", "ngram", (3, 2, 1, 1)),
            **_per_position("judged", "ngram", (3, 3, 2, 1)),
            **_per_position("accepted", "assistant", (1, 1)),
            **_per_position("judged", "assistant", (2, 1)),
            'autospec_decisions_total{block_length="4",reason="best",source="ngram"}': 3,
            'autospec_decisions_total{block_length="4",reason="probe",source="ngram"}': 1,
            'autospec_decisions_total{block_length="2",reason="best",source="assistant"}': 2,
            'autospec_decisions_total{block_length="0",reason="off",source="none"}': 1,
            **nothing_recorded,
        }

    def test_text_has_types_and_helps(self, metrics: Metrics) -> None:
        lines = generate_latest(metrics.registry).decode("utf-8").splitlines()
        for name, kind in families(metrics).items():
            assert f"# TYPE {name} {kind}" in lines
            assert any(line.startswith(f"# HELP {name} ") and line.endswith(".") for line in lines)

    def test_buckets(self, metrics: Metrics) -> None:
        for seconds in (0.004, 0.3, 2.0, 1_000.0):
            metrics.observe(record(seconds=PhaseSeconds(other=seconds)))
        found = samples(metrics, with_buckets=True)
        counts = {
            bound: found[f'autospec_request_seconds_bucket{{arm="policy",le="{bound}",segment="code"}}']
            for bound in ("0.01", "0.25", "0.5", "1.0", "2.5", "100.0", "+Inf")
        }
        assert counts == {"0.01": 1, "0.25": 1, "0.5": 2, "1.0": 2, "2.5": 3, "100.0": 3, "+Inf": 4}

    def test_control_and_fallbacks_have_no_blocks(self, metrics: Metrics) -> None:
        plain = {"blocks": 0, "by_action": {}, "decisions": {}, "seconds": PhaseSeconds(other=3.0)}
        metrics.observe(record(is_control=True, policy="off", **plain))
        metrics.observe(record(fallback_reason="batch of 3: speculation here is for one sequence at a time", **plain))
        found = {name: value for name, value in samples(metrics).items() if "_record" not in name}
        assert found == {
            'autospec_request_seconds_count{arm="control",segment="code"}': 1,
            'autospec_request_seconds_sum{arm="control",segment="code"}': 3,
            'autospec_request_seconds_count{arm="policy",segment="code"}': 1,
            'autospec_request_seconds_sum{arm="policy",segment="code"}': 3,
            'autospec_output_tokens_total{arm="control",segment="code"}': 18,
            'autospec_output_tokens_total{arm="policy",segment="code"}': 18,
            'autospec_fallbacks_total{reason="batch"}': 1,
        }

    def test_a_block_that_got_no_drafts_is_no_draft(self, metrics: Metrics) -> None:
        metrics.observe(record(by_action={"ngram:4": ActionTally(blocks=5, num_committed_tokens=5)}))
        assert samples(metrics)['autospec_spec_decode_num_drafts_total{segment="code",source="ngram"}'] == 0

    def test_counts_of_several_threads_are_exact(self, metrics: Metrics) -> None:
        threads, each = 8, 250
        one = record()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: [metrics.observe(one) for _ in range(each)], range(threads)))
        found, total = samples(metrics), threads * each
        assert found['autospec_request_seconds_count{arm="policy",segment="code"}'] == total
        assert found['autospec_spec_decode_num_draft_tokens_total{segment="code",source="ngram"}'] == 11 * total
        assert found['autospec_decisions_total{block_length="2",reason="best",source="assistant"}'] == 2 * total

    def test_one_registry_holds_them_once(self, metrics: Metrics) -> None:
        with pytest.raises(ConfigurationError, match="has autospec's metrics already"):
            Metrics(metrics.registry)
        other = CollectorRegistry()
        Counter("autospec_fallbacks", "Someone else's.", registry=other)
        with pytest.raises(ConfigurationError, match="has autospec's metrics already"):
            Metrics(other)
        assert [each.name for each in other.collect()] == ["autospec_fallbacks"]

    def test_without_a_registry_they_are_in_the_usual_one(self) -> None:
        code = (
            "from prometheus_client import REGISTRY; from autospec.telemetry import Metrics; m = Metrics();"
            "assert m.registry is REGISTRY; print(sum(x.name == 'autospec_fallbacks' for x in REGISTRY.collect()))"
        )
        assert _python(code) == "1\n"


class TestCardinality:
    def test_hostile_names(self) -> None:
        metrics = Metrics(CollectorRegistry(), max_segments=5, max_reasons=3, max_positions=4)
        for number in range(10_000):
            name = f'{number}\n"}}\x1b[31m\u202e\ud800 \\ {"x" * 80}'
            positions = number % 7 + 1
            metrics.observe(
                record(
                    name,
                    by_action={
                        f"{name}:{number}": ActionTally(
                            1, 1, 1, 1, 2, at_risk=(1,) * positions, accepted=(1,) * positions
                        )
                    },
                    decisions={f"{name}:{number} reason{number}": 1},
                    fallback_reason=name,
                )
            )
        text = generate_latest(metrics.registry).decode("utf-8")
        values: dict[str, set[str]] = {}
        for label, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', text):
            values.setdefault(label, set()).add(value)
        assert len(values["segment"]) == 6
        assert len(values["source"]) == 21
        assert len(values["reason"]) == 4
        assert values["position"] == {"0", "1", "2", "3", "4+"}
        assert values["block_length"] == {"0", "1", "2", "3", "4", "5+"}
        assert len(text.splitlines()) < 3_000
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
        total = sum(v for k, v in samples(metrics).items() if k.startswith("autospec_request_seconds_count"))
        assert total == 10_000

    def test_positions_beyond_the_bound_are_summed(self) -> None:
        metrics = Metrics(CollectorRegistry(), max_positions=2)
        tally = ActionTally(2, 8, 8, 6, 8, at_risk=(2, 2, 2, 2), accepted=(2, 2, 1, 1))
        metrics.observe(record(by_action={"ngram:4": tally}, decisions={"ngram:4 best": 2, "ngram:2 best": 1}))
        found = samples(metrics)
        judged, accepted = (
            [
                found[
                    f'autospec_spec_decode_num_{word}_tokens_per_pos_total{{position="{shown}",segment="code",source="ngram"}}'
                ]
                for shown in ("0", "1", "2+")
            ]
            for word in ("judged", "accepted")
        )
        assert (judged, accepted) == ([2, 2, 4], [2, 2, 2])
        assert found['autospec_decisions_total{block_length="3+",reason="best",source="ngram"}'] == 2
        assert found['autospec_decisions_total{block_length="2",reason="best",source="ngram"}'] == 1

    @pytest.mark.parametrize("name", ["max_segments", "max_reasons", "max_positions"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
    def test_bounds_are_checked(self, name: str, value: Any) -> None:
        registry = CollectorRegistry()
        with pytest.raises(ConfigurationError, match=rf"{name}={value!r}: a whole number of at least 1"):
            Metrics(registry, **{name: value})
        assert list(registry.collect()) == []

    def test_small_parts(self) -> None:
        assert [bounded_number(n, 16) for n in (0, 16, 17, 10**9)] == ["0", "16", "17+", "17+"]

    def test_every_reason_for_a_fallback_has_a_kind(self) -> None:
        """Whoever adds a reason gives it a kind, too."""
        found = dict(_reasons())
        assert len(found) > 25
        assert {text: kind for text, kind in found.items() if kind == "other"} == {}
        assert fallback_kind("a reason that nobody has thought of") == "other"
        documented = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        assert all(f"`{kind}`" in documented for kind in {*found.values(), "other"})


class TestRecorder:
    def test_its_counters_are_read_when_asked(self, metrics: Metrics, tmp_path: Path) -> None:
        with Recorder(f"sqlite:///{tmp_path}/a.db") as recorder:
            metrics.watch(recorder)
            metrics.watch(recorder)
            for number in range(3):
                recorder.record(record(request_id=f"{number:032x}"))
            assert recorder.flush()
            assert _of_recorders(metrics) == {"records_total": 3, "records_written_total": 3}
        metrics.forget(recorder)
        metrics.forget(recorder)
        assert _of_recorders(metrics) == {"records_total": 3, "records_written_total": 3}

    def test_counters_never_go_back(self, metrics: Metrics) -> None:
        def recorder(number: int) -> Any:
            return SimpleNamespace(
                recorded=10 * number,
                written=2 * number,
                dropped=3 * number,
                spooled=4 * number,
                replayed=5 * number,
                damaged=6 * number,
                failed_batches=7 * number,
                waiting=8 * number,
            )

        first, second = recorder(1), recorder(10)
        metrics.watch(first)
        metrics.watch(second)
        expected = {
            "records_total": 110,
            "records_written_total": 22,
            "records_dropped_total": 33,
            "records_spooled_total": 44,
            "records_replayed_total": 55,
            "records_damaged_total": 66,
            "record_batches_failed_total": 77,
        }
        assert _of_recorders(metrics) == {**expected, "records_waiting": 88}
        metrics.forget(first)
        assert _of_recorders(metrics) == {**expected, "records_waiting": 80}


class TestWrap:
    def test_requests_of_a_wrapped_model(self, metrics: Metrics, tmp_path: Path) -> None:
        model = tiny.llama()
        told: list[RequestRecord] = []
        other = SimpleNamespace(observe=told.append)
        with autospec.wrap(
            model, policy="fixed:ngram:4", store=f"sqlite:///{tmp_path}/a.db", metrics=[metrics, other]
        ) as speculator:
            model.generate(tiny.prompt(20), segment="copy", **GREEDY)
            last = speculator.last_request
            with speculator.control():
                model.generate(tiny.prompt(20), segment="copy", **GREEDY)
            with pytest.warns(UserWarning, match="beam search"):
                model.generate(tiny.prompt(20), num_beams=2, **GREEDY)
        assert last is not None
        assert told[0] is last
        found = samples(metrics)
        assert found['autospec_request_seconds_sum{arm="policy",segment="copy"}'] == pytest.approx(last.total_seconds)
        assert found['autospec_output_tokens_total{arm="policy",segment="copy"}'] == 12
        assert found['autospec_output_tokens_total{arm="control",segment="copy"}'] == 12
        assert found['autospec_fallbacks_total{reason="generation_mode"}'] == 1
        of_ngram = '{segment="copy",source="ngram"}'
        assert found[f"autospec_spec_decode_num_draft_tokens_total{of_ngram}"] == last.num_draft_tokens > 0
        assert found[f"autospec_spec_decode_num_accepted_tokens_total{of_ngram}"] == last.num_accepted_tokens
        assert found[f"autospec_spec_decode_num_drafts_total{of_ngram}"] == last.at_risk[0]
        decided = sum(value for name, value in found.items() if name.startswith("autospec_decisions"))
        assert decided == last.blocks
        assert found["autospec_records_total"] == found["autospec_records_written_total"] >= 3
        assert found["autospec_records_waiting"] == 0

    def test_drafts_are_blocks_with_a_proposal(self, metrics: Metrics) -> None:
        """Counted from the proposals themselves: a prompt without repetition often has nothing to copy."""
        model = tiny.llama()
        proposed: list[int] = []
        source = NGram()
        with autospec.wrap(model, drafts=[source], policy="fixed:ngram:4", metrics=metrics) as speculator:
            controller: Any = speculator._controller
            inner = controller.observe

            def observe(outcome: Any) -> None:
                proposed.append(outcome.num_draft_tokens)
                inner(outcome)

            controller.observe = observe
            prompt = torch.arange(1, 21)[None]
            model.generate(prompt, max_new_tokens=40, do_sample=False)
        found = samples(metrics)['autospec_spec_decode_num_drafts_total{segment="default",source="ngram"}']
        assert found == sum(number > 0 for number in proposed)
        assert 0 < found < len(proposed)

    def test_an_observer_that_fails_costs_one_warning(self, metrics: Metrics) -> None:
        model = tiny.llama()

        class Broken:
            def observe(self, record: RequestRecord) -> None:
                raise RuntimeError("the disk is full")

        plain = model.generate(tiny.prompt(20), **GREEDY)
        with autospec.wrap(model, policy="fixed:ngram:4", metrics=[Broken(), metrics]) as speculator:
            with pytest.warns(
                UserWarning, match=r"Broken.observe failed, requests go on: RuntimeError: the disk is full"
            ):
                assert torch.equal(model.generate(tiny.prompt(20), **GREEDY), plain)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.equal(model.generate(tiny.prompt(20), **GREEDY), plain)
            assert speculator.last_request is not None
        assert samples(metrics)['autospec_request_seconds_count{arm="policy",segment="default"}'] == 2

    def test_a_request_that_fails_is_counted(self, metrics: Metrics) -> None:
        model = tiny.llama()

        def stop(*_: Any) -> Any:
            raise KeyError("of the user's")

        with autospec.wrap(model, policy="fixed:ngram:4", metrics=metrics), pytest.raises(KeyError):
            model.generate(tiny.prompt(20), logits_processor=[stop], **GREEDY)
        assert samples(metrics)['autospec_request_seconds_count{arm="policy",segment="default"}'] == 1

    @pytest.mark.parametrize("given", ["prometheus", 3, Metrics, [object()], [None]], ids=str)
    def test_what_cannot_observe_is_refused(self, given: Any) -> None:
        model = tiny.llama()
        with pytest.raises(ConfigurationError, match=r"objects with observe\(record\) are needed"):
            autospec.wrap(model, policy="off", metrics=given)
        assert "generate" not in vars(model)


class TestServe:
    def test_loopback_only_by_default(self, metrics: Metrics) -> None:
        metrics.observe(record())
        server = serve(metrics, 0)
        try:
            assert server.server_address[0] == "127.0.0.1"
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode("utf-8")
            assert 'autospec_output_tokens_total{arm="policy",segment="code"} 18.0' in text
            with pytest.raises(ConfigurationError, match=rf"cannot be served at 127.0.0.1:{server.server_port}"):
                serve(metrics, server.server_port)
        finally:
            server.shutdown()
            server.server_close()

    @pytest.mark.parametrize("port", [-1, 70_000])
    def test_impossible_ports(self, metrics: Metrics, port: int) -> None:
        with pytest.raises(ConfigurationError, match="cannot be served"):
            serve(metrics, port)


def shipped(name: str) -> str:
    return files("autospec.telemetry").joinpath("dashboards", name).read_text(encoding="utf-8")


class TestShippedFiles:
    def test_they_name_what_is_exported(self, metrics: Metrics) -> None:
        names = exported_names(metrics)
        for file in ("grafana.json", "alerts.yml"):
            used = set(IDENTIFIER.findall(shipped(file)))
            assert used
            assert sorted(used - names) == []

    def test_every_metric_is_shown_somewhere(self, metrics: Metrics) -> None:
        used = set(IDENTIFIER.findall(shipped("grafana.json") + shipped("alerts.yml")))
        stems = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in used}
        assert sorted(set(families(metrics)) - stems) == []

    def test_labels_in_queries_exist(self, metrics: Metrics) -> None:
        labels = {"job", "instance", "le"}
        for family in metrics._families:
            assert isinstance(family, (Counter, Histogram))
            labels |= set(family._labelnames)
        queries = [*(rule["expr"] for rule in _rules()), *(target["expr"] for target in _targets())]
        for query in queries:
            assert set(re.findall(r'(\w+)(?:=~|!=|=)"', query)) <= labels
            for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
                assert set(re.split(r",\s*", names)) <= labels
            assert query.count("(") == query.count(")")
            assert query.count("{") == query.count("}")

    def test_the_dashboard_can_be_imported(self) -> None:
        dashboard = json.loads(shipped("grafana.json"))
        assert dashboard["title"] == dashboard["uid"] == "autospec"
        assert dashboard["schemaVersion"] >= 36
        variables = {each["name"]: each for each in dashboard["templating"]["list"]}
        assert list(variables) == ["datasource", "job", "segment", "window"]
        assert variables["datasource"]["type"] == "datasource"
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= 24
            taken |= cells
            if panel["type"] != "row":
                assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                assert panel["description"].endswith(".")
                assert [t["refId"] for t in panel["targets"]] == list("ABCDE")[: len(panel["targets"])]
        used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for target in _targets())))
        assert used == {"job", "segment", "window"}

    def test_the_alert_rules_are_rules(self) -> None:
        rules = _rules()
        assert [rule["alert"] for rule in rules] == [
            "AutospecSegmentSlowerThanControl",
            "AutospecRecordsDropped",
            "AutospecSpooling",
        ]
        for rule in rules:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"] == {"severity": "warning"}
            assert set(rule["annotations"]) == {"summary", "description"}
            assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
            named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
            assert named <= set(re.split(r",\s*", re.findall(r"by \(([^)]*)\)", rule["expr"])[0]))

    def test_docs_list_every_metric(self, metrics: Metrics) -> None:
        text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| `(autospec_[a-z_]+)` \| (\w+) \|([\w, ]*)\| ", text, re.MULTILINE)
        assert {name: kind for name, kind, _ in rows} == families(metrics)
        labels = {
            family._name + ("_total" if isinstance(family, Counter) else ""): ", ".join(family._labelnames)
            for family in metrics._families
        }
        assert {name: found.strip() for name, _, found in rows if name in labels} == labels
        for rule in _rules():
            assert f"`{rule['alert']}`" in text


class TestCommandLine:
    @pytest.mark.parametrize(("what", "file"), [("dashboard", "grafana.json"), ("alerts", "alerts.yml")])
    def test_files(self, what: str, file: str) -> None:
        result = CliRunner().invoke(group, ["metrics", what])
        assert (result.exit_code, result.stdout) == (0, shipped(file))

    def test_names(self, metrics: Metrics) -> None:
        result = CliRunner().invoke(group, ["metrics", "names"])
        assert result.exit_code == 0
        lines = [line.partition(":")[0] for line in result.stdout.splitlines()]
        assert lines == [f"{name} ({kind})" for name, kind in families(metrics).items()]


def test_importing_autospec_loads_neither_library() -> None:
    code = "import sys, autospec.speculator, autospec.telemetry; print([m for m in sys.modules if m in {!r}])"
    assert _python(code.format(("prometheus_client", "opentelemetry"))) == "[]\n"


@pytest.mark.parametrize(
    ("package", "name", "extra"), [("prometheus_client", "Metrics", "metrics"), ("opentelemetry", "Spans", "otel")]
)
def test_a_missing_extra_is_named(package: str, name: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from autospec.errors import ConfigurationError\n"
        f"try:\n    from autospec.telemetry import {name}\n"
        "except ConfigurationError as error:\n    print(error)"
    )
    assert f"autospec-decoding[{extra}]" in _python(code)


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _per_position(word: str, source: str, counts: tuple[int, ...]) -> dict[str, float]:
    name = f"autospec_spec_decode_num_{word}_tokens_per_pos_total"
    return {
        f'{name}{{position="{position}",segment="code",source="{source}"}}': count
        for position, count in enumerate(counts)
    }


def _of_recorders(metrics: Metrics) -> dict[str, float]:
    """What is not zero, without the prefix."""
    return {
        name.removeprefix("autospec_"): value
        for name, value in samples(metrics).items()
        if name.startswith("autospec_record") and value
    }


def _rules() -> list[dict[str, Any]]:
    found = yaml.safe_load(shipped("alerts.yml"))
    (only,) = found["groups"]
    assert set(found) == {"groups"}
    assert only["name"] == "autospec"
    rules: list[dict[str, Any]] = only["rules"]
    return rules


def _targets() -> list[dict[str, Any]]:
    return [target for panel in json.loads(shipped("grafana.json"))["panels"] for target in panel.get("targets", [])]


def _reasons() -> Iterator[tuple[str, str]]:
    """The texts that the functions which explain a fallback return, each with its kind."""
    places = {
        "autospec/speculator.py": {"_why_not", "_why_never"},
        "autospec/decoding/support.py": {"why_not"},
        "autospec/decoding/probe.py": {"probe"},
        "autospec/caches.py": {"why_not_rollback"},
    }
    for path, functions in places.items():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
        assert len(nodes) == len(functions), path
        for node in (found for function in nodes for found in ast.walk(function) if isinstance(found, ast.Return)):
            parts = [
                part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if isinstance(node.value, (ast.Constant, ast.JoinedStr)) and parts:
                text = "X".join(parts)
                yield text, fallback_kind(text)
