"""The dashboard in Chromium: no errors, nothing asked elsewhere, sorting, filters, updates, dark, small windows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from autospec.telemetry.store import Store
from tests.browsing import HAS_BROWSER, SIZES, Browser, window
from tests.dashboard_stores import HOSTILE, POLICY, file_url, fill, fill_large, make_study, pairs, record, served

PAGES = {
    "overview": "",
    "segment": "segment?segment=fast",
    "request": f"request?id={9_001:032x}",
    "decisions": "decisions",
    "definitions": "definitions",
}

pytestmark = pytest.mark.skipif(not HAS_BROWSER, reason="no Chromium here: make browser installs it")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are left for a person to look at: $AUTOSPEC_SCREENSHOTS, else a temporary folder."""
    folder = Path(os.environ.get("AUTOSPEC_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with window() as found:
        yield found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = file_url(tmp_path_factory.mktemp("browser"))
    with Store(url) as store:
        fill(store)
        for place, name in enumerate(HOSTILE):
            store.add(*pairs(name, 4, 1.1 + place / 20, first=1_000 + 100 * place))
    return url


@pytest.fixture(scope="module")
def address(url: str) -> Iterator[str]:
    with served(url) as found:
        yield found


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_pages(browser: Browser, address: str, pictures: Path, page: str, size: str, is_dark: bool) -> None:
    browser.resize(*SIZES[size])
    browser.dark(is_dark)
    browser.open(address + PAGES[page])
    browser.until_drawn()
    browser.save(pictures, f"{page}-{size}-{'dark' if is_dark else 'light'}")
    assert browser.errors() == []
    assert browser.hosts() == {urlsplit(address).netloc}
    assert browser.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")


@pytest.fixture(scope="module", params=["empty", "large"])
def other(
    browser: Browser, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A database without requests, and one of five million; the kind, and the address."""
    folder = tmp_path_factory.mktemp(request.param)
    url = file_url(folder)
    with Store(url) as store:
        if request.param == "large":
            fill_large(store)
    policy = folder / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    with served(url, "--policy", str(policy), "--study-storage", make_study(folder)) as found:
        browser.open("about:blank")  # the page before this waits for updates of a server that has ended
        browser.errors()
        browser.hosts()
        yield request.param, found


@pytest.mark.parametrize("size", ["phone", "wide"])
@pytest.mark.parametrize("page", ["", "segment?segment=segment 07", "request", "decisions", "tuning"])
def test_pages_of_nothing_and_of_five_million_requests(
    browser: Browser, other: tuple[str, str], pictures: Path, page: str, size: str
) -> None:
    kind, address = other
    browser.resize(*SIZES[size])
    browser.dark(False)
    browser.open(address + page)
    browser.until_drawn()
    browser.save(pictures, f"{kind}-{page.partition('?')[0] or 'overview'}-{size}")
    assert browser.errors() == []
    assert browser.hosts() == {urlsplit(address).netloc}
    assert browser.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    shown = browser.run("return document.querySelector('main').innerText")
    if page in ("", "request", "decisions"):
        assert ("No requests are recorded here yet" in shown) == (kind == "empty")
    if kind == "large" and page == "":
        assert "sums by the hour" in shown
        assert browser.run("return document.querySelectorAll('.segments tbody tr').length") == 44


def test_the_keyboard_is_enough(browser: Browser, address: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(key: str) -> str:
        ActionChains(browser.driver).send_keys(key).perform()
        return str(browser.run("return document.activeElement.id || document.activeElement.className"))

    browser.resize(*SIZES["wide"])
    browser.open(address)
    assert press(Keys.TAB) == "skip"
    assert press(Keys.ENTER) == "main"
    passed = []
    while not passed or passed[-1] != "sort-segment":
        passed.append(press(Keys.TAB))
        assert len(passed) < 60, passed
    assert "search" in passed
    press(Keys.ENTER)
    browser.until(lambda: "sort=segment" in browser.driver.current_url)


def test_charts_and_their_tables_say_the_readers_own_time(browser: Browser, address: str) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Kolkata"})
    browser.open(address + "segment?segment=fast")
    browser.until_drawn()
    trace, time_, title = browser.run(
        "const chart = document.querySelector('#chart-over-time'); const time = chart.querySelector('time');"
        "return [chart.querySelector('.plot').data[0], time.textContent, time.title]"
    )
    assert trace["customdata"][0].startswith("Oct 24, 2026, 05:30")
    assert trace["x"][0] == "2026-10-24T12:00:00Z"
    assert "UTC" in trace["hovertemplate"]
    assert (time_, title) == (trace["customdata"][0], "2026-10-24 12:00 UTC")
    browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_names_from_outside_do_nothing(browser: Browser, address: str) -> None:
    browser.resize(*SIZES["wide"])
    for place in range(len(HOSTILE)):
        browser.open(address)
        links = browser.run("return [...document.querySelectorAll('tbody th.name a')].map(each => each.href)")
        assert len(links) == 4 + len(HOSTILE)
        browser.open(links[place])
        assert browser.errors() == []
        assert browser.run("return document.images.length") == 0


def test_sorting_searching_and_filters(browser: Browser, address: str) -> None:
    names = "return [...document.querySelectorAll('tbody th.name')].map(each => each.innerText.trim())"
    browser.open(address)
    assert browser.run(names)[0] == "slow"
    browser.run("document.getElementById('sort-segment').click()")
    browser.until(lambda: "sort=segment" in browser.driver.current_url)
    browser.run("document.getElementById('search').value = 'LO'; document.querySelector('.search').submit()")
    browser.until(lambda: browser.run(names) == ["slow"])
    assert "sort=segment" in browser.driver.current_url
    browser.open(address)
    browser.run(
        "document.querySelector('select[name=decoding]').value = 'sampled'; document.querySelector('.filters').submit()"
    )
    browser.until(lambda: browser.run(names) == ["kept"])


def test_definitions_on_hover_and_focus(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.run("document.querySelector('.term').focus()")
    tip = "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
    assert "below 1 is a slow-down" in browser.run(tip)
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.run(tip) == ""


def test_times_are_the_readers_own(browser: Browser, address: str) -> None:
    for zone, shown in (("America/New_York", "Oct 24, 2026, 08:"), ("Asia/Kolkata", "Oct 24, 2026, 05:")):
        browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": zone})
        browser.open(address + "segment?segment=fast")
        time_, title = browser.run(
            "const it = document.querySelector('.changes time'); return [it.innerText, it.title]"
        )
        assert time_.startswith(shown)
        assert title == "2026-10-24 12:00 UTC"
    browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_updates_come_without_a_reload_and_leave_the_reader_in_place(browser: Browser, address: str, url: str) -> None:
    browser.resize(*SIZES["phone"])
    browser.open(address)
    browser.run(
        "window.same = true; window.scrollTo(0, 900); document.getElementById('sort-lost').focus({preventScroll: true})"
    )
    browser.until(lambda: browser.run("return document.getElementById('live-status').textContent") == "live")
    with Store(url) as store:
        store.add(*pairs("brand new", 6, 0.5, first=50_000))
    browser.until(lambda: "brand new" in browser.run("return document.querySelector('.segments').innerText"))
    assert browser.run("return [window.same, window.scrollY, document.activeElement.id]") == [True, 900, "sort-lost"]

    browser.open(address + "segment?segment=fast")
    browser.until(lambda: browser.run("return document.querySelectorAll('.plot .main-svg').length"))
    browser.run("window.same = true; document.getElementById('table-lengths').open = true")
    rows = "return document.querySelector('#table-over-time tbody').rows.length"
    before = browser.run(rows)
    with Store(url) as store:
        store.add([record(70_001, "fast"), record(70_000, "fast", is_control=True)])
    browser.until(lambda: browser.run(rows) != before)
    assert browser.run("return [window.same, document.getElementById('table-lengths').open]") == [True, True]
    assert browser.errors() == []


def test_a_page_that_was_given_out_once_more_is_asked_for_again(browser: Browser, address: str, url: str) -> None:
    """The server may answer with an older page where one takes long to make; no further event comes then."""
    browser.open(address)
    browser.run(
        "const ask = window.fetch, old = document.documentElement.outerHTML; window.asked = 0;"
        "window.fetch = (...all) => ++window.asked > 2 ? ask(...all) : Promise.resolve("
        "  window.asked === 1 ? new Response(old) : new Response('', { status: 503 }))"
    )
    with Store(url) as store:
        store.add(*pairs("after all", 6, 0.5, first=60_000))
    browser.until(lambda: "after all" in browser.run("return document.querySelector('.segments').innerText"))
    assert browser.run("return window.asked") == 3
    browser.until(lambda: browser.run("return document.getElementById('live-status').textContent") == "live")
