"""How soon the dashboard's pages can be seen in a browser, on a store of five million requests.

    python experiments/19_dashboard_paint/run.py [--store FILE] [--requests 5000000] [--repeats 7] [--out DIR]

Without --store the database of experiments/11_telemetry_scale is made first, SQLite alone (--work DIR keeps it). Needs
Chromium with its driver, and an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "experiments"))

from common import script  # noqa: E402

from autospec.telemetry.store import Store  # noqa: E402
from tests.browsing import HAS_BROWSER, SIZES, Browser, window  # noqa: E402

FOLDER = Path(__file__).parent
PAGES = {
    "overview": "",
    "overview of a week": "?period=7d",
    "segment": "segment?segment={segment}",
    "request": "request?id=last",
    "decisions": "decisions",
}
BAR_SECONDS = 1.0
TIMES = """
const [page] = performance.getEntriesByType("navigation");
const paint = performance.getEntriesByName("first-contentful-paint")[0];
return paint && { paint: paint.startTime / 1000, server: (page.responseStart - page.requestStart) / 1000,
  whole: (page.responseEnd - page.requestStart) / 1000 };
"""


def main() -> int:
    options = parse_options()
    if not HAS_BROWSER:
        raise SystemExit("no Chromium with its driver here: make browser installs it")
    results: dict[str, Any] = {
        "is_smoke_run": options.smoke,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "repeats": options.repeats,
    }
    with ExitStack() as stack:
        file = options.store
        if file is None:
            work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            work.mkdir(parents=True, exist_ok=True)
            file = work / "scale.db"
            if not file.exists():
                script("11_telemetry_scale").fill([f"sqlite:///{file.absolute()}"], options.requests)
        url = f"sqlite:///{file.absolute()}"
        results |= sizes(url) | {"pages": measure(url, options.repeats)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    missed = [
        f"{page}: {found['cold']['paint_seconds']} s until the first paint, the server cold"
        for page, found in results["pages"].items()
        if found["cold"]["paint_seconds"] > BAR_SECONDS
    ]
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=None, help="SQLite file of experiments/11_telemetry_scale")
    parser.add_argument("--work", type=Path, default=None, help="folder for the file that is made; kept")
    parser.add_argument("--requests", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser.parse_args()


def sizes(url: str) -> dict[str, int]:
    tables = ("requests", "hourly_requests", "hourly_actions", "hourly_positions")
    with Store(url, readonly=True) as store, store.reading() as connection:
        counts = {name: connection.exec_driver_sql(f"SELECT COUNT(*) FROM {name}").scalar() for name in tables}
    return {f"rows_{name}": int(count or 0) for name, count in counts.items()}


def measure(url: str, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by page: the server's first page after its start, in a new browser, and the same page once more."""
    with Store(url, readonly=True) as store, store.reading() as connection:
        segment = connection.exec_driver_sql("SELECT segment FROM requests ORDER BY id DESC LIMIT 1").scalar()
    found = {}
    for name, path in PAGES.items():
        rounds = [one_round(url, path.format(segment=segment)) for _ in range(repeats)]
        found[name] = {state: summary([each[place] for each in rounds]) for place, state in enumerate(("cold", "warm"))}
        print(json.dumps({name: found[name]}), flush=True)
    return found


def one_round(url: str, path: str) -> tuple[dict[str, float], dict[str, float]]:
    """A server and a browser of their own, which meet twice."""
    with serving(url) as (address, process), window() as browser:
        browser.resize(*SIZES["wide"])
        cold = visit(browser, address + path, process)
        browser.open("about:blank")
        return cold, visit(browser, address + path, process)


def visit(browser: Browser, address: str, process: psutil.Process) -> dict[str, float]:
    """Seconds of one page: from its address to the first paint, of the server, and of its processor time."""
    before = process.cpu_times()
    browser.open(address)
    browser.until(lambda: browser.run(TIMES))
    browser.until_drawn()
    after = process.cpu_times()
    busy = after.user + after.system - before.user - before.system
    return {**browser.run(TIMES), "processor": busy}


def summary(visits: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for name in ("paint", "server", "whole", "processor"):
        values = [each[name] for each in visits]
        found[f"{name}_seconds"] = round(statistics.median(values), 3)
        found[f"slowest_{name}_seconds"] = round(max(values), 3)
    return found


@contextmanager
def serving(url: str) -> Iterator[tuple[str, psutil.Process]]:
    """`autospec dashboard` as a process that has just begun to answer."""
    command = [
        sys.executable,
        "-c",
        "from autospec.cli import main; main()",
        "dashboard",
        "--store",
        url,
        "--port",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            address = next(word for line in process.stderr for word in line.split() if word.startswith("http://"))
            with urlopen(f"{address}static/icon.svg", timeout=60) as answer:
                answer.read()
            yield address, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
