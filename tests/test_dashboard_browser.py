"""The dashboard in Chromium: no errors, nothing asked elsewhere, sorting, filters, updates, dark, small windows."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from autospec.telemetry.store import Store
from tests.dashboard_stores import HOSTILE, file_url, fill, pairs, record, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
PAGES = {
    "overview": "",
    "segment": "segment?segment=fast",
    "request": f"request?id={9_001:032x}",
    "decisions": "decisions",
    "definitions": "definitions",
}
SIZES = {"phone": (360, 740), "tablet": (820, 1_100), "wide": (1_400, 900), "4k": (3_840, 2_000)}
SECONDS = 30.0

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium here: make browser installs it")


class Browser:
    """A headless window, and what it saw."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)
        self.until(lambda: self.run("return document.readyState") == "complete")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.1)

    def errors(self) -> list[str]:
        """What the console said since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def hosts(self) -> set[str]:
        """Where requests went since this was asked last."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = urlsplit(message["params"]["request"]["url"])
                if address.scheme != "data":
                    found.add(address.netloc)
        return found

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, is_dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def save(self, folder: Path, name: str) -> None:
        """A picture of the whole page."""
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        (folder / f"{name}.png").write_bytes(base64.b64decode(found["data"]))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are left for a person to look at: $AUTOSPEC_SCREENSHOTS, else a temporary folder."""
    folder = Path(os.environ.get("AUTOSPEC_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


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
    if page in ("segment", "decisions"):
        browser.until(lambda: browser.run("return document.querySelectorAll('.plot .main-svg').length"))
    browser.save(pictures, f"{page}-{size}-{'dark' if is_dark else 'light'}")
    assert browser.errors() == []
    assert browser.hosts() == {urlsplit(address).netloc}
    assert browser.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")


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
