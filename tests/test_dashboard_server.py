"""`autospec dashboard` as a process, and updates while traffic runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from autospec.cli.dashboard import address_of, is_loopback, listen
from autospec.cli.main import group
from autospec.errors import AutospecError
from autospec.telemetry.dashboard.live import changes
from autospec.telemetry.store import Store
from tests.dashboard_stores import SECONDS, file_url, fill, record, served

TOKEN = "a token that is long enough"


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = file_url(tmp_path)
    with Store(url) as store:
        fill(store)
    return url


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(group, ["dashboard", *arguments])
    return result.exit_code, result.stderr


class TestCommand:
    def test_it_serves_until_it_is_ended(self, url: str) -> None:
        with served(url) as address:
            assert address.startswith("http://127.0.0.1:")
            answer = httpx2.get(address, timeout=SECONDS)
            assert answer.status_code == 200
            assert "Speed-up by segment" in answer.text
            assert "uvicorn" not in answer.headers.get("server", "")

    def test_a_token(self, url: str) -> None:
        with served(url, "--token", TOKEN, "--host", "localhost") as address:
            assert httpx2.get(address, timeout=SECONDS).status_code == 401
            assert httpx2.get(address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=SECONDS).status_code == 200

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
    def test_other_addresses_need_a_token_or_a_word(self, url: str, host: str) -> None:
        code, err = run("--store", url, "--host", host)
        assert code == 2
        assert "--token" in err
        assert "--insecure" in err

    def test_usage_errors_are_one_line(self, url: str, tmp_path: Path) -> None:
        code, err = run("--store", f"sqlite:///{tmp_path / 'none.db'}")
        assert (code, err.count("\n")) == (1, 1)
        assert "no telemetry database" in err
        code, err = run("--store", url, "--token", "short")
        assert code == 2
        assert "at least 16" in err
        with listen("127.0.0.1", 0) as taken:
            code, err = run("--store", url, "--port", str(taken.getsockname()[1]))
        assert code == 1
        assert "cannot listen on" in err

    def test_addresses(self) -> None:
        assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
        assert [is_loopback(host) for host in ("0.0.0.0", "::", "example.org", "")] == [False] * 4
        assert address_of("0.0.0.0", 1) == "http://127.0.0.1:1/"
        assert address_of("::1", 1) == "http://[::1]:1/"
        with pytest.raises(AutospecError, match="--host"):
            listen("no such host.invalid", 0)

    def test_a_missing_extra_is_named(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "uvicorn", None)
        code, err = run("--store", url)
        assert code == 2
        assert "pip install 'autospec-decoding[dashboard]'" in err


class TestLive:
    def test_a_reader_is_told_of_each_change(self, url: str) -> None:
        with served(url) as address, Store(url) as store:
            events: list[str] = []
            with httpx2.stream("GET", f"{address}events", timeout=SECONDS) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events.append(line)
                        if len(events) == 2:
                            break
                        store.add([record(30_001, "new")])
            assert events[0] != events[1]
            assert "new" in httpx2.get(address, timeout=SECONDS).text

    def test_an_open_page_does_not_hold_up_the_end(self, url: str) -> None:
        with httpx2.Client(timeout=SECONDS) as client:
            with served(url) as address:
                request = client.build_request("GET", f"{address}events")
                answer = client.send(request, stream=True)
                lines = answer.iter_lines()
                assert next(lines) == "retry: 3000"
                assert "event: stamp" in lines  # it is being followed
            assert [line for line in lines if line.startswith("event: trouble")] == []
            answer.close()

    def test_events(self, url: str) -> None:
        async def collect() -> list[str]:
            left = 12

            async def is_gone() -> bool:
                nonlocal left
                left -= 1
                if left == 5:
                    store.close()
                return left < 0

            return [event async for event in changes(store, is_gone, poll_seconds=0.0)]

        store = Store(url, readonly=True)
        found = asyncio.run(collect())
        assert found[0] == "retry: 3000\n\n"
        assert [event.partition("\n")[0] for event in found[1:]] == ["event: stamp", *["event: trouble"] * 6]
        assert all(event.endswith("\n\n") for event in found)
