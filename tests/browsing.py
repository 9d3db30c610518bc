"""Chromium without a window, for tests and pictures of the dashboard."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
HAS_BROWSER = CHROMIUM is not None and DRIVER is not None
SIZES = {"phone": (360, 740), "tablet": (820, 1_100), "wide": (1_400, 900), "4k": (3_840, 2_000)}
SECONDS = 30.0


class Browser:
    """A window, and what it saw."""

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

    def until_drawn(self) -> None:
        """Waits for every chart of the page, if there are any."""
        drawn = "[...document.querySelectorAll('.plot')].every(each => each.querySelector('.main-svg'))"
        self.until(lambda: self.run(f"return {drawn}"))

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

    def picture(self, *, whole: bool = True) -> bytes:
        """PNG of the whole page, or of what is in the window."""
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
        return base64.b64decode(found["data"])

    def save(self, folder: Path, name: str) -> None:
        (folder / f"{name}.png").write_bytes(self.picture())


@contextmanager
def window() -> Iterator[Browser]:
    """A browser of its own, with nothing in its cache."""
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
