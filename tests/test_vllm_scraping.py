"""`autospec ingest vllm URL`: scrapes of servers and of files, once and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autospec.cli.main import group
from autospec.integrations.vllm.scraping import metrics_address, name_of
from autospec.telemetry import Store
from autospec.telemetry.engines import EngineSums, engine_sums
from tests.test_telemetry_spool import Locked
from tests.vllm_metrics import Counted, serving

MAIN = "from autospec.cli.main import main; main()"


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPEC_SPOOL", str(tmp_path / "spool"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 't.db'}"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(group, ["ingest", "vllm", *arguments], prog_name="autospec")


def stored(url: str) -> tuple[EngineSums, ...]:
    with Store(url, readonly=True) as store:
        assert store.count() == 0
        return engine_sums(store)


def busy() -> Counted:
    counted = Counted()
    counted.request(40, 2.0)
    counted.draft(3, 2)
    return counted


def metrics(counted: Counted) -> Any:
    def answer(path: str, body: Any) -> tuple[int, str, str]:
        return (200, "text/plain", counted.text()) if path == "/metrics" else (404, "text/plain", "no such page")

    return answer


def test_a_server_is_scraped_once_and_again_without_counting_twice(url: str) -> None:
    counted = busy()
    with serving(metrics(counted)) as address:
        done = run(address, "--store", url, "--source", "ngram", "--name", "engine-1", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout) == {
            "entries": 0, "requests": 0, "broken": 0, "scrapes": 1, "failed_scrapes": 0, "engines": 1,
        }  # fmt: skip
        assert "engine-1 org/model: 40 tokens generated, 1 drafts, 2 of 3 draft tokens accepted" in done.stderr
        run(f"{address}/metrics", "--store", url, "--source", "ngram", "--name", "engine-1")
        (found,) = stored(url)
        assert (found.output_tokens, found.num_accepted_tokens, found.accepted) == (40, 2, (1, 1, 0))
        counted.request(60, 3.0)
        said = run(address, "--store", url, "--source", "ngram", "--name", "engine-1").stdout
        assert said == "1 scrapes of 1 engines\n"
    (found,) = stored(url)
    assert (found.engine, found.source, found.output_tokens, found.requests) == ("engine-1", "ngram", 100, 2)


def test_it_asks_the_server_and_no_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(metrics(busy())) as address:
        assert run(address, "--store", url).exit_code == 0


def test_a_scrape_waits_for_a_database_that_is_away(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autospec.telemetry.sqlite.BUSY_SECONDS", 0.02)
    monkeypatch.setattr("autospec.telemetry.store.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("autospec.cli.scraping.FLUSH_SECONDS", 0.3)
    monkeypatch.setattr("autospec.telemetry.endings.CLOSE_SECONDS", 0.3)
    Store(url).close()
    with serving(metrics(busy())) as address, Locked(tmp_path / "t.db"):
        done = run(address, "--store", url)
    assert (done.exit_code, "waits for the database" in done.stderr) == (0, True)
    assert stored(url) == ()
    replayed = CliRunner().invoke(group, ["db", "replay", "--store", url])
    assert replayed.stdout == "1 records written\n"
    (found,) = stored(url)
    assert found.output_tokens == 40


def test_what_reads_metrics_is_asked_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with serving(metrics(busy())) as address:
        done = run(address, "--store", url, "--every", "60")
    assert done.exit_code == 2
    assert "pip install 'autospec-decoding[metrics]'" in " ".join(done.stderr.split())


def test_names_and_addresses() -> None:
    import socket

    assert metrics_address("http://h:8000") == metrics_address("http://h:8000/") == "http://h:8000/metrics"
    assert metrics_address("https://h/prefix/metrics") == "https://h/prefix/metrics"
    assert name_of("http://h:8000/metrics") == "h:8000"
    assert name_of("https://h/metrics") == "h:443"
    assert {name_of(f"http://{each}:8000/metrics") for each in ("localhost", "127.0.0.1", "[::1]")} == {
        f"{socket.gethostname()}:8000"
    }


def test_a_file_counts_as_of_its_last_change(url: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.prom"
    file.write_text(busy().text(), encoding="utf-8")
    os.utime(file, (1_790_000_000, 1_790_000_000))
    done = run(str(file), "--store", url)
    assert done.exit_code == 0, done.output
    assert "1 scrapes of 1 engines; 0 requests from 1 files" in done.stdout
    (found,) = stored(url)
    assert found.last == datetime.fromtimestamp(1_790_000_000, UTC)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, "text/html", "<html>It works!</html>\n"), "is that the /metrics of a vLLM server"),
        ((200, "text/plain", "\x80"), "is that the /metrics of a vLLM server"),
        ((401, "text/plain", "no"), "answers 401 Unauthorized: it asks for a key"),
        ((500, "application/json", '{"error": {"message": "out of order"}}'), "answers 500"),
        ((302, "text/plain", ""), "answers 302 Found"),
        ((200, "text/plain", "#" * (17 << 20)), "more than 16 MiB"),
    ],
)
def test_what_is_no_vllm_ends_it_in_one_line(url: str, answer: tuple[int, str, str], reason: str) -> None:
    with serving(lambda path, body: answer) as address:
        done = run(address, "--store", url)
    assert done.exit_code == 1
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert stored(url) == ()


def test_a_server_that_is_away_or_slow(url: str) -> None:
    def slow(path: str, body: Any) -> tuple[int, str, str]:
        time.sleep(1.0)
        return 200, "text/plain", ""

    done = run("http://127.0.0.1:9", "--store", url)
    assert (done.exit_code, "127.0.0.1:9/metrics cannot be reached: " in done.stderr) == (1, True)
    with serving(slow) as address:
        done = run(address, "--store", url, "--timeout", "0.2")
    assert (done.exit_code, "took" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["http://"], "is no address"),
        (["http://h:port"], "is no address"),
        (["http://user:secret@h:1"], "a user's name"),
        (["ftp://h"], "does not exist"),
        (["nowhere.prom"], "does not exist"),
        (["http://h:1", "--every", "0"], "0.1<=x<=86400"),
        (["FILE", "--every", "5"], "--every is for addresses alone"),
    ],
)
def test_what_cannot_be_asked_for(url: str, tmp_path: Path, arguments: list[str], reason: str) -> None:
    file = tmp_path / "metrics.prom"
    file.write_text(busy().text(), encoding="utf-8")
    done = run(*(str(file) if each == "FILE" else each for each in arguments), "--store", url)
    assert done.exit_code == 2
    assert reason in " ".join(done.stderr.split())
    assert "secret" not in done.output


class Running:
    """`autospec ingest vllm --every` as a process of its own."""

    def __init__(self, address: str, url: str) -> None:
        command = [sys.executable, "-c", MAIN, "ingest", "vllm", address, "--store", url, "--every", "0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.lines = self.process.stderr

    def until(self, word: str) -> str:
        for line in self.lines:
            if word in line:
                return line
        raise AssertionError(f"it ended and never said {word}")

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=30)
        return self.process.returncode, out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_again_and_again_until_a_signal_and_nothing_is_lost(url: str, number: int) -> None:
    counted = busy()
    with serving(metrics(counted)) as address:
        running = Running(address, url)
        try:
            running.until(": 40 tokens")
            counted.request(60, 3.0)
            running.until(": 100 tokens")
            code, out = running.end(number)
        finally:
            running.process.kill()
            running.process.communicate()
    assert code == (-number if number == signal.SIGKILL else 0)
    assert number == signal.SIGKILL or " scrapes of 1 engines" in out
    (found,) = stored(url)
    assert found.output_tokens == 100


def test_an_engine_that_is_away_for_a_while_is_waited_for(url: str) -> None:
    counted, is_away = busy(), False

    def answer(path: str, body: Any) -> tuple[int, str, str]:
        return (503, "text/plain", "starting") if is_away else (200, "text/plain", counted.text())

    with serving(answer) as address:
        running = Running(address, url)
        try:
            running.until(": 40 tokens")
            is_away = True
            running.until("answers 503")
            counted = Counted()  # another life
            counted.request(7, 1.0)
            is_away = False
            running.until(": 7 tokens")
            code, out = running.end(signal.SIGTERM)
        finally:
            running.process.kill()
            running.process.communicate()
    assert code == 0
    assert " failed" in out
    (found,) = stored(url)
    assert found.output_tokens == 47
