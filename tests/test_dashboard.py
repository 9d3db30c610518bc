"""The dashboard's pages: what they show, to whom, and that names from outside cannot act on them."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.types import Message

from autospec.errors import ConfigurationError, StoreError
from autospec.telemetry.codec import clean_text
from autospec.telemetry.dashboard import create_app, reports
from autospec.telemetry.dashboard.chart import Chart
from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.remembered import Remembered
from autospec.telemetry.dashboard.rendering import inline_json
from autospec.telemetry.dashboard.reports import load_segments
from autospec.telemetry.dashboard.security import is_allowed, is_same
from autospec.telemetry.labels import visible
from autospec.telemetry.pages.definitions import DEFINITIONS
from autospec.telemetry.report import build_report, to_dict
from autospec.telemetry.rows import Report
from autospec.telemetry.store import Store
from tests.dashboard_stores import HOSTILE, file_url, fill, fill_hostile, pairs, record

HERE = "http://127.0.0.1"
DOCS = Path(__file__).parents[1] / "docs" / "dashboard.md"
TOKEN = "a token that is long enough"
NAMES = frozenset(
    ["action", "from", "kind", "note", "policy", "reason", "request", "saved", "segment", "side", "source", "started"]
)
"""Headings of columns without numbers."""
PAGES = ("/", "/segment?segment=fast", "/request?id=last", "/decisions", "/definitions")


class Page(HTMLParser):
    """Elements, texts and inline data of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.data if self._inside == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def values(self, tag: str, name: str) -> list[str]:
        return [attributes.get(name) or "" for found, attributes in self.tags if found == tag and name in attributes]

    @property
    def figures(self) -> list[dict[str, object]]:
        return [json.loads(text) for text in self.data if text.strip()]


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = file_url(tmp_path)
    with Store(url) as store:
        fill(store)
    return url


@pytest.fixture
def client(url: str) -> Iterator[TestClient]:
    with TestClient(create_app(url), base_url=HERE) as found:
        yield found


def empty_client(tmp_path: Path) -> TestClient:
    url = file_url(tmp_path)
    Store(url).close()
    return TestClient(create_app(url), base_url=HERE)


def rows(page: str) -> list[str]:
    """Names of the segments in the order of the table."""
    body = page[page.index('<table class="segments"') :]
    return re.findall(r'<th scope="row".*?<bdi class="outside"[^>]*>(.*?)</bdi>', body)


class TestPages:
    def test_the_overview_says_what_the_report_says(self, client: TestClient, url: str) -> None:
        page = Page(client.get("/").text)
        with Store(url, readonly=True) as store:
            report = build_report(store.requests(), store.comparisons())
        assert rows(client.get("/").text) == ["slow", "even", "fast", "kept"]
        for row in report.segments:
            if row.speed_up is not None and row.speed_up_low is not None and row.speed_up_high is not None:
                assert f"{row.speed_up:.2f} {row.speed_up_low:.2f} to {row.speed_up_high:.2f}" in page.text
        for words in ("\u25b2 faster", "\u25bc slower", "\u25c6 unclear", "too little data", "ngram:2"):
            assert words in page.text
        assert page.values("svg", "aria-label")[1].startswith("speed-up 0.")

    def test_sorting_searching_and_links(self, client: TestClient) -> None:
        assert rows(client.get("/?sort=segment").text) == ["even", "fast", "kept", "slow"]
        assert rows(client.get("/?sort=-segment&search=E").text) == ["kept", "even"]
        page = client.get("/?decoding=greedy&sort=-saved&search=s").text
        assert rows(page) == ["slow", "fast"]
        links = Page(page).values("a", "href")
        assert "/segment?decoding=greedy&segment=slow" in links
        assert "/?decoding=greedy&search=s&sort=segment" in links
        for link in links:
            if link.startswith("/"):
                assert client.get(link).status_code == 200, link
        assert 'aria-sort="descending"' in page

    def test_a_segment(self, client: TestClient) -> None:
        page = Page(client.get("/segment?segment=fast").text)
        names = {str(attributes["id"]) for tag, attributes in page.tags if tag == "figure"}
        assert names == {"chart-over-time", "chart-split", "chart-survival", "chart-goodput", "chart-lengths"}
        assert len(page.figures) == 5
        assert "policy auto is used from this hour on" in page.text
        assert "new settings of auto , version v1" in page.text
        assert len([link for link in page.values("a", "href") if "/request?id=" in link]) == 11

    def test_a_request(self, client: TestClient) -> None:
        page = Page(client.get(f"/request?id={9_001:032x}").text)
        assert "3 drafted, 1 accepted, 1 rejected, recovered;" in page.text
        assert "best: <b>1.30x</b>" in page.text
        assert "off: nothing pays" in page.text
        assert "77001 77002" in page.text
        plain = Page(client.get(f"/request?id={1:032x}").text).text
        assert "Its blocks were not kept one by one" in plain
        assert "Prompt and answer were not recorded" in plain
        assert "its control took" in plain

    def test_decisions(self, client: TestClient) -> None:
        page = Page(client.get("/decisions").text)
        names = [str(attributes["id"]) for tag, attributes in page.tags if tag == "figure"]
        assert names == ["chart-actions", "chart-control-share", "chart-calibration", "chart-plain-step"]
        for words in ("explore", "beams: num_beams=4", "1.25", "49 %"):
            assert words in page.text.replace("\u00a0", " ")

    def test_every_chart_is_also_a_table(self, client: TestClient) -> None:
        for path in ("/segment?segment=fast", "/decisions"):
            text = client.get(path).text
            for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
                assert figure.count("<tr>") > 1
                assert 'role="img" aria-label="' in figure

    @pytest.mark.parametrize("path", PAGES)
    def test_every_number_has_its_definition(self, client: TestClient, path: str) -> None:
        page = Page(client.get(path).text)
        shown = page.values("span", "data-definition")
        assert set(shown) <= set(DEFINITIONS.values())
        facts = re.findall(r'<div class="fact"><dt>(.*?)</dt>', client.get(path).text)
        assert all("data-definition" in fact for fact in facts)
        assert shown or path == "/definitions"
        heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', client.get(path).text)
        assert {head for head in heads if "data-definition" not in head and "sort-segment" not in head} <= NAMES

    @pytest.mark.parametrize("path", PAGES)
    def test_a_page_can_be_read_without_seeing_it(self, client: TestClient, path: str) -> None:
        page = Page(client.get(path).text)
        assert [tag for tag, _ in page.tags].count("h1") == 1
        assert ("html", {"lang": "en"}) in page.tags
        assert ("a", {"class": "skip", "href": "#main"}) in page.tags
        identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
        assert len(identities) == len(set(identities))
        for tag, attributes in page.tags:
            if tag == "svg":
                assert attributes.get("role") == "img"
                assert attributes.get("aria-label")
            if tag == "th":
                assert attributes.get("scope") in ("col", "row")

    def test_times_are_sent_in_utc(self, client: TestClient) -> None:
        times = Page(client.get("/segment?segment=fast").text).values("time", "datetime")
        assert times
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time) for time in times)

    def test_the_docs_hold_the_same_definitions(self) -> None:
        found = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
        assert {name: found.get(name) for name in DEFINITIONS} == dict(DEFINITIONS)


class TestStates:
    def test_empty(self, tmp_path: Path) -> None:
        client = empty_client(tmp_path)
        for path in ("/", "/segment?segment=x", "/decisions", "/request?id=last", "/request?period=7d"):
            assert client.get(path).status_code == 200
            assert "No requests are recorded here yet" in Page(client.get(path).text).text
            assert "store=" in client.get(path).text
        assert client.get("/request?id=ffff").status_code == 400
        assert client.get("/export.json").json()["segments"] == []
        assert len(client.get("/export.csv").text.splitlines()) == 2

    def test_one_request(self, tmp_path: Path) -> None:
        url = file_url(tmp_path)
        with Store(url) as store:
            store.add([record(1, "alone")])
        client = TestClient(create_app(url), base_url=HERE)
        page = Page(client.get("/").text)
        assert "Too little data for a verdict" in page.text
        assert "1 request and 0 control requests" in page.text
        assert "speculator.control()" in page.text
        for path in ("/segment?segment=alone", "/request", "/decisions"):
            assert client.get(path).status_code == 200

    def test_only_failed_requests_and_only_controls(self, tmp_path: Path) -> None:
        url = file_url(tmp_path)
        nothing: dict[str, object] = {"by_action": {}, "actions": {}, "acceptance_lengths": {}}
        failed = record(1, "failed", blocks=0, error="RuntimeError: <b>", **nothing)
        with Store(url) as store:
            store.add([failed, record(2, "plain", is_control=True)])
        client = TestClient(create_app(url), base_url=HERE)
        for path in ("/", "/segment?segment=failed", "/segment?segment=plain", "/request", "/decisions"):
            assert client.get(path).status_code == 200

    def test_filters_that_nothing_matches(self, client: TestClient) -> None:
        for path in ("/", "/decisions", "/segment?segment=fast"):
            text = client.get(f"{path}{'&' if '?' in path else '?'}target=other").text
            assert "No request matches these filters" in text
            assert "show everything" in text

    def test_sums_by_the_hour(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "MOST_REQUESTS", 1)
        for path in PAGES:
            assert client.get(path).status_code == 200
        assert "autospec report --basis hours" in client.get("/").text
        assert "not known behind these filters" in client.get("/?policy=auto").text

    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("/?since=yesterday", "full hour in UTC"),
            ("/?sort=name", "known are segment"),
            ("/?nothing=1", "known are period"),
            ("/segment", "names no segment"),
            ("/request?id=zz", "hexadecimal"),
            ("/request?id=ffffffff", "no request begins"),
        ],
    )
    def test_what_cannot_be_understood(self, client: TestClient, path: str, words: str) -> None:
        answer = client.get(path)
        assert answer.status_code == 400
        assert words in Page(answer.text).text

    def test_no_such_page(self, client: TestClient) -> None:
        assert client.get("/nothing").status_code == 404
        assert client.get("/static/../app.py").status_code == 404
        assert client.get("/static/%2e%2e/app.py").status_code == 404
        assert client.get("/static/%00").status_code == 404
        assert client.post("/").status_code == 405

    def test_a_newer_database_and_a_missing_one(self, tmp_path: Path, url: str) -> None:
        with pytest.raises(StoreError, match="no telemetry database"):
            create_app(f"sqlite:///{tmp_path / 'none.db'}")
        with Store(url) as store, store.writing() as connection:
            connection.exec_driver_sql("UPDATE autospec_version SET version_num = '9999'")
        with pytest.raises(StoreError, match="newer"):
            create_app(url)

    def test_a_database_that_goes_away(self, url: str, tmp_path: Path) -> None:
        store = Store(url, readonly=True)
        client = TestClient(create_app(store), base_url=HERE)
        assert client.get("/").status_code == 200
        store.close()
        answer = client.get("/decisions")
        assert answer.status_code == 503
        assert "was closed" in answer.text

    def test_a_store_that_may_write_is_opened_anew(self, url: str) -> None:
        with Store(url) as store:
            with TestClient(create_app(store), base_url=HERE) as client:
                assert client.get("/").status_code == 200
            store.add([record(20_001, "later")])  # it is still the application's own, and open
            app = create_app(store)
        assert TestClient(app, base_url=HERE).get("/segment?segment=later").status_code == 200

    def test_a_store_is_only_ever_read(self, url: str) -> None:
        with Store(url) as store:
            opened = store.reopened()
            assert (opened.readonly, opened.url) == (True, store.url)
            with pytest.raises(StoreError, match="reading only"):
                opened.add([record(20_001, "later")])
            with opened.reading() as connection, pytest.raises(OperationalError, match="readonly"):
                connection.exec_driver_sql("DELETE FROM requests")
            opened.close()

    def test_a_database_in_memory_cannot_be_written_by_its_readers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody else can open it: it is read through the store itself."""
        monkeypatch.setattr(Remembered, "_may_be_older", lambda *_: False)  # on a busy machine any page takes long
        with Store("sqlite://") as store:
            fill(store)
            client = TestClient(create_app(store), base_url=HERE)
            assert rows(client.get("/").text) == ["slow", "even", "fast", "kept"]
            with store.reading() as connection, pytest.raises(OperationalError, match="readonly"):
                connection.exec_driver_sql("DELETE FROM requests")
            with pytest.raises(StoreError, match="in memory"):
                store.reopened()
            store.add([record(20_001, "while open")])
            store.execute_alone(["VACUUM"])
            assert "while open" in client.get("/").text

    def test_it_writes_nothing_and_holds_no_lock(
        self, client: TestClient, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Remembered, "_may_be_older", lambda *_: False)  # on a busy machine any page takes long
        with Store(url) as store:
            for number in range(20_001, 20_021, 2):
                store.add([record(number, "while open")])
                assert "while open" in client.get("/").text
        assert client.get("/export.json").json()["all"]["requests"] == 48

    def test_the_first_page_is_read_when_the_server_starts(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[Filters] = []

        def load(store: Store, filters: Filters) -> Report:
            read.append(filters)
            return load_segments(store, filters)

        monkeypatch.setattr("autospec.telemetry.dashboard.app.load_segments", load)
        with TestClient(create_app(url), base_url=HERE) as client:
            for path in ("/", "/?sort=segment", "/decisions"):  # all of one report
                assert client.get(path).status_code == 200
        assert read == [Filters()]

    def test_a_page_is_never_older_than_it_says(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Though all takes long and is given out for long: what another page was made of is older by then."""
        remembered = Remembered(slow_seconds=-1.0, share=1e12)
        monkeypatch.setattr("autospec.telemetry.dashboard.app.Remembered", lambda: remembered)
        client = TestClient(create_app(url), base_url=HERE)
        first = Page(client.get("/").text).values("body", "data-stamp")
        with Store(url) as store:
            store.add([record(20_001, "later", error="out of memory")])
        assert Page(client.get("/").text).values("body", "data-stamp") == first
        decisions = client.get("/decisions").text
        assert Page(decisions).values("body", "data-stamp") != first
        assert re.search(r">failed</span></dt><dd>1<", decisions), decisions

    def test_what_goes_wrong_before_the_first_page_is_told_and_closes_the_store(
        self, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*arguments: object) -> None:
            raise RuntimeError("no luck")

        closed: list[Store] = []
        monkeypatch.setattr(Store, "close", lambda store: closed.append(store))
        monkeypatch.setattr("autospec.telemetry.dashboard.app.load_overview", fail)
        with TestClient(create_app(url), base_url=HERE) as client:
            assert client.get("/definitions").status_code == 200
            assert closed == []
        assert len(closed) == 1
        assert "could not be read ahead" in caplog.text
        assert "no luck" in caplog.text
        monkeypatch.undo()
        closed[0].close()

    def test_a_read_only_store_is_used_as_it_is_and_left_open(self, url: str) -> None:
        with Store(url, readonly=True) as store:
            with TestClient(create_app(store), base_url=HERE) as client:
                assert client.get("/").status_code == 200
            assert store.count() > 0

    def test_a_database_that_another_takes_the_place_of(self, url: str, tmp_path: Path) -> None:
        """As when a demonstration is deleted and made again."""
        file = Path(url.removeprefix("sqlite:///"))
        client = TestClient(create_app(url), base_url=HERE)
        assert "slow" in rows(client.get("/").text)
        for path in tmp_path.glob(f"{file.name}*"):
            path.unlink()
        answer = client.get("/")
        assert answer.status_code == 503
        assert "check that it can be reached" in answer.text
        with Store(url) as store:
            store.add(*pairs("another", 12, 1.5))
        assert rows(client.get("/").text) == ["another"]
        other = tmp_path / "other.db"
        with Store(f"sqlite:///{other}") as store:
            store.add(*pairs("moved", 12, 1.5, first=1_000))
        for path in tmp_path.glob(f"{file.name}-*"):
            path.unlink()
        other.replace(file)
        assert rows(client.get("/").text) == ["moved"]

    def test_a_server_starts_though_the_database_cannot_be_read(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = Store(url, readonly=True)
        app = create_app(store)
        store.close()
        with TestClient(app, base_url=HERE) as client:
            assert client.get("/").status_code == 503
        assert "the database cannot be read" in caplog.text


class TestExport:
    def test_json_and_csv_are_the_report(self, client: TestClient, url: str) -> None:
        with Store(url, readonly=True) as store:
            wanted = to_dict(build_report(store.requests(), store.comparisons()))
        assert client.get("/export.json").json() == json.loads(json.dumps(wanted))
        lines = list(csv.DictReader(io.StringIO(client.get("/export.csv").text)))
        assert [line["segment"] for line in lines] == ["even", "fast", "kept", "slow", "all"]
        assert float(lines[1]["speed_up"]) == wanted["segments"][1]["speed_up"]

    def test_filters_hold_for_exports(self, client: TestClient) -> None:
        assert client.get("/export.json?decoding=sampled").json()["all"]["requests"] == 1


class TestHostile:
    @pytest.fixture
    def client(self, tmp_path: Path) -> TestClient:
        url = file_url(tmp_path)
        with Store(url) as store:
            fill_hostile(store)
        return TestClient(create_app(url), base_url=HERE)

    def paths(self, client: TestClient) -> list[str]:
        links = [link for link in Page(client.get("/").text).values("a", "href") if link.startswith("/segment")]
        assert len(links) == len(HOSTILE)
        asked = [f"/request?id={first + place:032x}" for first in (30_000, 31_000) for place in range(len(HOSTILE))]
        return ["/", "/decisions", *links, *asked]

    def test_names_are_shown_as_text_and_break_nothing(self, client: TestClient) -> None:
        for path in self.paths(client):
            answer = client.get(path)
            assert answer.status_code == 200, path
            page = Page(answer.text)
            assert not {tag for tag, _ in page.tags} & {"img", "b", "iframe", "object", "embed"}
            names = {name for _, attributes in page.tags for name in attributes}
            assert not [name for name in names if name.startswith("on") or name == "style"]
            scripts = [attributes for tag, attributes in page.tags if tag == "script"]
            assert all(attributes.get("src") or attributes.get("type") == "application/json" for attributes in scripts)
            shown = [
                *page.texts,
                *(value or "" for _, each in page.tags for name, value in each.items() if name != "value"),
            ]
            assert not [text for text in shown if set("\u202e\u2066\u200f") & set(text)]
            assert "y" * 601 not in page.text
            assert "<footer>" in answer.text
            assert page.tags.count(("footer", {})) == 1, path
            assert all(page.figures)
        overview = Page(client.get("/").text).text
        for name in HOSTILE:
            assert visible(clean_text(name), 48).strip() in overview

    def test_each_name_can_be_opened_and_filtered_by(self, client: TestClient) -> None:
        for name in HOSTILE:
            value = quote(name.encode("utf-8", "surrogatepass"))
            assert client.get(f"/segment?segment={value}").status_code == 200
            for key in ("target", "device", "policy", "version"):
                assert client.get(f"/?{key}={value}").status_code == 200
            assert client.get(f"/?search={value}").status_code == 200
        assert client.get("/export.json").json()["all"]["requests"] == 6 * len(HOSTILE)

    def test_an_unknown_name_in_an_address_is_answered_in_words(self, client: TestClient) -> None:
        for name in HOSTILE:
            query = urlencode({name.encode("utf-8", "surrogatepass"): "1"})
            answer = client.get(f"/?{query}")
            assert answer.status_code == 400
            assert not {tag for tag, _ in Page(answer.text).tags} & {"img", "script"}

    def test_inline_json(self) -> None:
        value = {"name": "</script><!--<script>\u2028\u2029&\"' \ud800"}
        text = inline_json(value)
        assert not set("<>&\u2028\u2029") & set(text)
        assert json.loads(text) == value
        with pytest.raises(ValueError, match="not JSON compliant"):
            inline_json(float("nan"))

    def test_names_in_charts_are_no_markup(self, client: TestClient) -> None:
        found = [
            text
            for path in self.paths(client)
            for figure in Page(client.get(path).text).figures
            for trace in figure["data"]  # type: ignore[attr-defined]
            for text in [trace.get("name", ""), *(trace.get("text") or [])]
        ]
        assert any("&lt;img" in text for text in found)
        assert not [text for text in found if "<" in text.replace("<br>", "")]


class TestSecurity:
    def test_headers(self, client: TestClient) -> None:
        for path in (*PAGES, "/nothing", "/?since=x", "/static/page.js", "/static/plotly.min.js", "/export.csv"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"]

    @pytest.mark.parametrize("path", PAGES)
    def test_a_page_asks_for_nothing_elsewhere_and_has_no_code_in_it(self, client: TestClient, path: str) -> None:
        page = Page(client.get(path).text)
        for tag, attributes in page.tags:
            assert "style" not in attributes
            for name in ("src", "href", "action"):
                assert (attributes.get(name) or "/").startswith(("/", "#")), (tag, attributes)
            if tag == "script":
                assert "src" in attributes or attributes.get("type") == "application/json"

    def test_a_failure_of_ours_is_told_with_the_same_headers(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object) -> None:
            raise RuntimeError("secret words")

        monkeypatch.setattr("autospec.telemetry.dashboard.app.load_decisions", fail)
        client = TestClient(create_app(url), base_url=HERE, raise_server_exceptions=False)
        answer = client.get("/decisions")
        assert answer.status_code == 500
        assert "secret words" not in answer.text
        assert answer.headers["x-frame-options"] == "DENY"

    @pytest.mark.parametrize(
        ("host", "allowed"),
        [
            ("127.0.0.1:8765", True),
            ("localhost", True),
            ("[::1]:8765", True),
            ("192.168.0.7:80", True),
            ("box.internal:8765", True),
            ("evil.example", False),
            ("evil.example:8765", False),
            ("localhost.evil.example", False),
            ("127.0.0.1.evil.example", False),
            ("localhost@evil.example", False),
            ("[::1", False),
            ("", False),
        ],
    )
    def test_hosts(self, url: str, host: str, allowed: bool) -> None:
        assert is_allowed(host, {"box.internal"}) == allowed
        if host:
            client = TestClient(create_app(url, allowed_hosts=["box.internal"]), base_url=HERE)
            assert client.get("/definitions", headers={"host": host}).status_code == (200 if allowed else 400)

    def test_any_host(self, url: str) -> None:
        client = TestClient(create_app(url, allowed_hosts=["*"]), base_url="http://anything.example")
        assert client.get("/").status_code == 200

    def test_a_token_in_the_header(self, url: str) -> None:
        client = TestClient(create_app(url, token=TOKEN), base_url=HERE)
        for path in (*PAGES, "/export.json", "/events"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
        for value in ("", "Bearer", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", "Bearer \u00e4".encode()):
            assert client.get("/", headers={"authorization": value}).status_code == 401
        assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/static/style.css").status_code == 200

    def test_a_token_in_a_cookie(self, url: str) -> None:
        client = TestClient(create_app(url, token=TOKEN), base_url=HERE)
        answer = client.get("/", headers={"accept": "text/html"})
        assert answer.url.path == "/login"
        assert client.post("/login", data={"token": "wrong"}).status_code == 403
        assert client.post("/login", content=b"x" * 5_000).status_code == 413
        assert not client.cookies
        answer = client.post("/login", data={"token": TOKEN}, follow_redirects=False)
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert client.get("/").status_code == 200
        forged = TestClient(create_app(url, token=TOKEN), base_url=HERE, cookies={"autospec_dashboard": "0" * 64})
        assert forged.get("/").status_code == 401

    def test_a_form_that_breaks_off(self, url: str) -> None:
        """It is no fault of ours, and leaves no traceback in the log."""
        begun = {"type": "http.request", "body": b"token=", "more_body": True}
        parts: list[Message] = [begun, {"type": "http.disconnect"}]
        sent: list[Message] = []

        async def receive() -> Message:
            return parts.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": headers}
        asyncio.run(create_app(url, token=TOKEN)(scope, receive, send))
        assert sent[0]["status"] == 400

    def test_tokens_are_compared_in_constant_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[bytes, bytes]] = []

        def compare(left: bytes, right: bytes) -> bool:
            asked.append((left, right))
            return left == right

        monkeypatch.setattr("autospec.telemetry.dashboard.security.hmac.compare_digest", compare)
        assert is_same("a", "a")
        assert not is_same("\ud800", "a")
        assert asked == [(b"a", b"a"), (b"?", b"a")]

    def test_a_short_token(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="at least 16"):
            create_app(url, token="short")

    @pytest.mark.parametrize("token", [f"{TOKEN}\n", f" {TOKEN}", " " * 16, f"{TOKEN}\u00e4", "a\nb" * 8])
    def test_a_token_that_no_header_could_hold(self, url: str, token: str) -> None:
        """As from a file that ends in a line break: nobody could ever get in with it."""
        with pytest.raises(ConfigurationError, match="leave them out"):
            create_app(url, token=token)

    def test_mounted_into_another_application(self, url: str) -> None:
        app = Starlette(routes=[Mount("/speculation", create_app(url, token=TOKEN))])
        client = TestClient(app, base_url=HERE)
        assert client.get("/speculation/static/style.css").status_code == 200
        assert client.get("/speculation/").status_code == 401
        assert client.get("/speculation/", headers={"accept": "text/html"}).url.path == "/speculation/login"
        client.post("/speculation/login", data={"token": TOKEN})
        page = Page(client.get("/speculation/?decoding=greedy").text)
        links = [*page.values("a", "href"), *page.values("script", "src"), *page.values("link", "href")]
        assert all(link.startswith(("/speculation/", "#")) for link in links)
        for link in links:
            if link.startswith("/"):
                assert client.get(link).status_code == 200, link


def test_a_chart_has_finite_numbers_only(client: TestClient) -> None:
    for path in ("/segment?segment=kept", "/segment?segment=slow", "/decisions"):
        for figure in Page(client.get(path).text).figures:
            json.dumps(figure, allow_nan=False)
    assert Chart("a", "b", (), "c", (), {}, ()).figure == {"data": [], "layout": {}}
