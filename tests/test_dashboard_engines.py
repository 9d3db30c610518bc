"""Engines that are known by their counters, on the dashboard's overview."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from autospec.telemetry.codec import to_entry
from autospec.telemetry.dashboard import create_app
from autospec.telemetry.dashboard.reports import stamp
from autospec.telemetry.pages.definitions import DEFINITIONS
from autospec.telemetry.store import Store
from tests.dashboard_stores import NOON, engine, file_url, fill
from tests.test_dashboard import HERE, Page


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = file_url(tmp_path)
    with Store(url) as store:
        store.write(
            [
                to_entry(engine("a:8000")),
                to_entry(engine("b:8000", device="cuda: H200", target="other", num_drafts=None, accepted=())),
            ]
        )
    return url


@pytest.fixture
def client(url: str) -> TestClient:
    return TestClient(create_app(url), base_url=HERE)


def words(client: TestClient, path: str = "/") -> str:
    answer = client.get(path)
    assert answer.status_code == 200
    return Page(answer.text).text.replace("\u00a0", " ")


def test_engines_alone_fill_the_page(client: TestClient) -> None:
    text = words(client)
    assert "Engines by their own counters" in text
    assert "a:8000" in text
    assert "No requests are recorded here yet" not in text
    page = client.get("/").text
    row = re.search(r"<tr><th[^>]*>a:8000.*?</tr>", page)
    assert row is not None
    cells = re.findall(r"<td>(.*?)</td>", row[0])
    assert cells == ["ngram", "12", "1200", "25.0", "4.00", "240", "720", "480", "3.00"]


def test_they_stand_beside_requests(client: TestClient, url: str) -> None:
    with Store(url) as store:
        fill(store)
    text = words(client)
    assert "Speed-up by segment" in text
    assert "a:8000" in text


def test_every_number_has_its_definition(client: TestClient) -> None:
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', client.get("/").text)
    plain = {head for head in heads if "data-definition" not in head}
    assert plain == {"engine", "target", "1", "2", "3"}
    assert set(Page(client.get("/").text).values("span", "data-definition")) <= set(DEFINITIONS.values())


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("target=other", {"b:8000"}),
        ("device=vllm", {"a:8000"}),
        ("policy=auto", set()),
        ("decoding=greedy", set()),
        ("version=x", set()),
        ("since=2026-10-24", {"a:8000", "b:8000"}),
        ("until=2026-10-24", set()),
        ("since=2026-10-25", set()),
    ],
)
def test_filters(client: TestClient, query: str, shown: set[str]) -> None:
    text = words(client, f"/?{query}")
    assert {name for name in ("a:8000", "b:8000") if name in text} == shown


def test_exports_hold_them_and_a_scrape_is_told_to_readers(client: TestClient, url: str) -> None:
    found = client.get("/export.json").json()["engines"]
    assert [each["engine"] for each in found] == ["a:8000", "b:8000"]
    with Store(url) as store:
        before = stamp(store)
        store.write([to_entry(engine("a:8000", scraped_at=NOON + timedelta(minutes=1), output_tokens=1_300))])
        assert stamp(store) != before
    assert client.get("/export.json").json()["engines"][0]["output_tokens"] == 1_300
