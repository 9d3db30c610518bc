"""`autospec calibrate --vllm`: a stand-in server, and an engine of a stand-in vLLM, by the steps they really made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autospec.cli.main import group
from autospec.integrations.vllm.load import steady_gaps
from autospec.integrations.vllm.steps import points_of, sizes_up_to
from autospec.telemetry import Store
from autospec.telemetry.calibrations import newest_steps
from tests.vllm_metrics import OpenAI, serving

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 't.db'}"


def run(where: str, url: str, *arguments: str) -> Result:
    return CliRunner().invoke(group, ["calibrate", "--vllm", where, "--store", url, *arguments], prog_name="autospec")


def steps(url: str) -> dict[int, float]:
    with Store(url, readonly=True) as store:
        return dict(newest_steps(store, "target", device="vllm:%"))


def cost(num_requests: int) -> float:
    return 0.004 + 0.004 * num_requests


def test_a_server_is_measured_by_how_many_are_asked_at_once(url: str) -> None:
    server = OpenAI(cost)
    with serving(server) as address:
        done = run(address, url, "--most-requests", "4", "--tokens", "24", "--device", "cuda: H200")
    assert done.exit_code == 0, done.output
    assert "gets 7 requests of 24 tokens each, at most 4 at once: 168 tokens" in done.stderr
    found = steps(url)
    assert sorted(found) == [1, 2, 4]
    for size, seconds in found.items():
        assert cost(size) <= seconds < 10 * cost(size)
    assert found[4] > found[1]
    assert len(server.asked) == 8  # the first warms up
    assert {(each["ignore_eos"], each["temperature"], each["model"]) for each in server.asked} == {
        (True, 0, "org/model")
    }
    with Store(url, readonly=True) as store, store.reading() as connection:
        (place,) = connection.exec_driver_sql("SELECT device, target, dtype, versions FROM deployments").all()
    assert place[:3] == ("vllm: cuda: H200", "tiny", "unknown")
    assert json.loads(place[3])["vllm"] == "0.32.0"


def test_tokens_of_drafts_are_tokens_verified(url: str) -> None:
    with serving(OpenAI(cost, drafts=3)) as address:
        done = run(address, url, "--most-requests", "2", "--tokens", "24", "--json")
    assert done.exit_code == 0, done.output
    assert sorted(steps(url)) == [4, 8]
    found = json.loads(done.stdout)
    assert [each["tokens"] for each in found["points"]] == [4, 8]


@pytest.mark.parametrize(
    ("changes", "arguments", "reason"),
    [
        ({"models": []}, [], "serves nothing: name one with --target"),
        ({"models": [{"id": "a"}, {"id": "b"}]}, [], "serves a, b: name one with --target"),
        ({}, ["--target", "other"], "serves no 'other', but org/model (--target)"),
        ({"breaks": lambda place: 'data: {"error": {"message": "out of memory"}}\n\n' if place == 3 else None}, [],
         "out of memory"),
        ({"breaks": lambda place: "data: <html>\n\n" if place == 3 else None}, [], "streams what is no JSON"),
        ({"breaks": lambda place: "\n" if place == 3 else None}, [], "broke off, or does not say"),
    ],
)  # fmt: skip
def test_a_server_that_is_not_as_it_should_be(
    url: str, changes: dict[str, Any], arguments: list[str], reason: str
) -> None:
    server = OpenAI(lambda size: 0.001)
    for name, value in changes.items():
        setattr(server, name, value)
    with serving(server) as address:
        done = run(address, url, "--most-requests", "2", "--tokens", "16", *arguments)
    assert done.exit_code == 1
    assert reason in " ".join(done.stderr.split())
    assert steps(url) == {}


def test_a_server_with_others_is_not_measured(url: str) -> None:
    server = OpenAI(lambda size: 0.001)
    server.counted.of("num_requests_running").set(3)
    with serving(server) as address:
        done = run(address, url)
    assert (done.exit_code, "is at 3 requests of others" in done.stderr) == (1, True)
    assert server.asked == []
    server.counted.of("num_requests_running").set(0)

    def others(place: int) -> None:
        server.counted.of("generation_tokens").inc()

    server.breaks = others  # type: ignore[assignment]
    with serving(server) as address:
        done = run(address, url, "--most-requests", "2", "--tokens", "16")
    assert (done.exit_code, "were generated for others meanwhile" in done.stderr) == (1, True)
    assert steps(url) == {}


def test_a_server_that_sends_several_tokens_at_a_time(url: str) -> None:
    with serving(OpenAI(lambda size: 0.001, together=4)) as address:
        done = run(address, url, "--most-requests", "2", "--tokens", "16")
    assert (done.exit_code, "--stream-interval 1" in done.stderr) == (1, True)


def test_a_server_that_decodes_fewer_at_once_is_measured_as_far_as_it_does(url: str) -> None:
    with serving(OpenAI(cost, most=2)) as address:
        done = run(address, url, "--most-requests", "4", "--tokens", "16")
    assert done.exit_code == 0, done.output
    assert "4 requests: left out, since they were not decoded at once" in done.stderr
    assert sorted(steps(url)) == [1, 2]


def test_it_is_no_longer_than_asked_for(url: str) -> None:
    with serving(OpenAI(lambda size: 0.05)) as address:
        done = run(address, url, "--most-requests", "16", "--tokens", "16", "--seconds", "0.5")
    assert done.exit_code == 0, done.output
    assert "0.5 s are over (--seconds)" in done.stderr
    assert max(steps(url)) < 16


@pytest.mark.parametrize(
    ("where", "arguments", "reason"),
    [
        ("http://127.0.0.1:9", [], "cannot be reached"),
        ("http://", [], "is no address"),
        ("/nowhere/at/all", [], "/nowhere/at/all"),
        ("http://127.0.0.1:9", ["--engine", "{}"], "--engine is for an engine that is started here"),
        ("http://127.0.0.1:9", ["--plot", "x.html"], "--plot is not for --vllm"),
        ("FOLDER", ["--device", "cuda"], "--device is for a server"),
        ("FOLDER", ["--engine", "[1]"], "a JSON object is needed"),
        ("FOLDER", ["--engine", "{"], "a JSON object is needed"),
        ("FOLDER", [], "vLLM is not installed in this environment"),
    ],
)
def test_what_cannot_be_asked_for(url: str, tmp_path: Path, where: str, arguments: list[str], reason: str) -> None:
    done = run(str(tmp_path) if where == "FOLDER" else where, url, *arguments)
    assert done.exit_code in (1, 2)
    assert reason in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_store_is_needed_and_options_are_not_mixed() -> None:
    for arguments, reason in (
        (["--vllm", "http://127.0.0.1:9"], "--vllm needs --store"),
        (["--most-requests", "4"], "--most-requests is for --vllm"),
    ):
        done = CliRunner().invoke(group, ["calibrate", *arguments], prog_name="autospec")
        assert (done.exit_code, reason in done.stderr) == (2, True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `vllm` that drives proposers as vLLM does, for this process and for those it starts."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    root = str(STAND_IN.parent.parent)
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}:{root}")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


@pytest.mark.usefixtures("stand_in")
def test_an_engine_is_started_and_measured_by_what_it_was_made_to_draft(url: str, tmp_path: Path) -> None:
    done = run(str(tmp_path), url, "--most-requests", "4", "--tokens", "96", "--engine", '{"enforce_eager": true}')
    assert done.exit_code == 0, done.output
    assert "4 requests: " in done.stderr
    found = steps(url)
    assert {1, 2, 3, 5, 9} <= set(found)  # one request with 0, 1, 2, 4 and 8 drafts
    assert {4, 8, 12, 20, 36} <= set(found)  # four
    assert all(0.0 < seconds < 1.0 for seconds in found.values())
    with Store(url, readonly=True) as store, store.reading() as connection:
        (place,) = connection.exec_driver_sql("SELECT device, target, dtype FROM deployments").all()
        assert store.count() == 0
    assert place[0].startswith("vllm: cpu")
    assert place[1:] == (tmp_path.name, "float32")


@pytest.mark.usefixtures("stand_in")
def test_an_engine_that_fails_says_why(url: str, tmp_path: Path) -> None:
    done = run(str(tmp_path), url, "--engine", '{"fails": "no room for the weights"}')
    assert done.exit_code == 1
    assert "the engine ended with code 1: RuntimeError: no room for the weights" in done.stderr
    assert steps(url) == {}


def test_points_are_medians_of_widths_seen_often_enough() -> None:
    seen = [(4, 0.1)] * 4 + [(2, 0.02), (2, 0.01), (2, 9.0), (2, 0.03), (2, 0.02)]
    assert [(point.tokens, point.seconds, point.num_steps) for point in points_of(seen)] == [(2, 0.02, 5)]


def test_gaps_count_while_all_are_being_decoded() -> None:
    assert steady_gaps([[0.0, 1.0, 2.0, 3.0], [1.5, 2.5, 3.5]]) == [1.0, 1.0]
    assert steady_gaps([[0.0, 1.0], []]) == []
    assert steady_gaps([[0.0, 1.0], [2.0, 3.0]]) == []


@pytest.mark.parametrize(("most", "sizes"), [(2, [1, 2]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 16])])
def test_sizes(most: int, sizes: list[int]) -> None:
    assert list(sizes_up_to(most)) == sizes
