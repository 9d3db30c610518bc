"""Every page can be used without seeing it or a mouse, as far as axe-core can tell: light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from autospec.telemetry.report import build_report, to_html
from autospec.telemetry.store import Store
from tests.browsing import HAS_BROWSER, SIZES, Browser, window
from tests.dashboard_stores import HOSTILE, POLICY, fill, fill_hostile, make_study, served

AXE = Path(__file__).parent / "axe" / "node_modules" / "axe-core" / "axe.min.js"
TOKEN = "a token that is long enough"
PAGES = {
    "overview": "",
    "segment": "segment?segment=fast",
    "hostile segment": f"segment?segment={quote(HOSTILE[0])}",
    "request": f"request?id={9_001:032x}",
    "newest request": "request",
    "decisions": "decisions",
    "tuning": "tuning",
    "definitions": "definitions",
    "nothing found": "?target=nowhere",
    "no such page": "nothing",
}
LOOKS = [(size, is_dark) for size in ("wide", "phone") for is_dark in (False, True)]
LOOK_NAMES = [f"{size}-{'dark' if is_dark else 'light'}" for size, is_dark in LOOKS]
CHECK = """
const done = arguments[arguments.length - 1];
document.querySelectorAll("details").forEach((each) => each.setAttribute("open", ""));
axe.run(document, { resultTypes: ["violations"] }).then(
  (found) => done(found.violations.map((each) => {
    const where = each.nodes.slice(0, 3).map((node) => `${node.html} ${node.failureSummary}`);
    return `${each.id}: ${each.help}: ${where.join(" / ")}`;
  })),
  (error) => done([String(error)]),
);
"""

pytestmark = [
    pytest.mark.skipif(not HAS_BROWSER, reason="no Chromium here: make browser installs it"),
    pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make axe installs it"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with window() as found:
        yield found


@pytest.fixture(scope="module", params=["empty", "small", "hostile"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """URL of a database, and the folder in which it is."""
    folder = tmp_path_factory.mktemp(request.param)
    url = f"sqlite:///{folder / 'dashboard.db'}"
    with Store(url) as opened:
        if request.param != "empty":
            fill(opened)
        if request.param == "hostile":
            fill_hostile(opened)
    return url, folder


@pytest.fixture(scope="module")
def address(store: tuple[str, Path]) -> Iterator[str]:
    url, folder = store
    policy = folder / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    with served(url, "--policy", str(policy), "--study-storage", make_study(folder)) as found:
        yield found


def violations(browser: Browser) -> list[str]:
    browser.run(AXE.read_text(encoding="utf-8"))
    found: list[str] = browser.driver.execute_async_script(CHECK)
    return found


@pytest.mark.parametrize(("size", "is_dark"), LOOKS, ids=LOOK_NAMES)
@pytest.mark.parametrize("page", PAGES)
def test_pages(browser: Browser, address: str, page: str, size: str, is_dark: bool) -> None:
    browser.resize(*SIZES[size])
    browser.dark(is_dark)
    browser.open(address + PAGES[page])
    browser.until_drawn()
    assert violations(browser) == []


@pytest.mark.parametrize(("size", "is_dark"), LOOKS, ids=LOOK_NAMES)
def test_the_report(browser: Browser, store: tuple[str, Path], size: str, is_dark: bool) -> None:
    url, folder = store
    with Store(url, readonly=True) as opened:
        text = to_html(build_report(opened.requests(), opened.comparisons()))
    (folder / "report.html").write_text(text, encoding="utf-8")
    browser.resize(*SIZES[size])
    browser.dark(is_dark)
    browser.open((folder / "report.html").as_uri())
    assert browser.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    assert violations(browser) == []


def test_the_page_that_asks_for_a_token(browser: Browser, store: tuple[str, Path]) -> None:
    with served(store[0], "--token", TOKEN) as address:
        for size, is_dark in LOOKS:
            browser.resize(*SIZES[size])
            browser.dark(is_dark)
            browser.open(address)
            assert "/login" in browser.driver.current_url
            assert violations(browser) == []


def test_faults_are_found(browser: Browser, address: str) -> None:
    """Or else all the others would pass whatever the pages were."""
    browser.open(address)
    browser.run(
        "document.querySelector('main').append(document.createElement('button'));"
        "document.documentElement.removeAttribute('lang');"
        "document.querySelector('h1').style.color = '#eee';"
    )
    found = {line.partition(":")[0] for line in violations(browser)}
    assert {"button-name", "html-has-lang"} <= found
