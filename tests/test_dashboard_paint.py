"""The experiment on the dashboard's first paint measures what it says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from autospec.telemetry.store import Store
from tests.browsing import HAS_BROWSER
from tests.dashboard_stores import file_url, fill

EXPERIMENT = "19_dashboard_paint"

pytestmark = pytest.mark.skipif(not HAS_BROWSER, reason="no Chromium here: make browser installs it")


def test_one_round(experiment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = file_url(tmp_path)
    with Store(url) as store:
        fill(store)
    monkeypatch.setattr(experiment, "PAGES", {"overview": "", "segment": "segment?segment={segment}"})
    found = experiment.measure(url, 1)
    assert set(found) == {"overview", "segment"}
    for page in found.values():
        for visit in (page["cold"], page["warm"]):
            assert 0 < visit["server_seconds"] <= visit["whole_seconds"]
            assert visit["server_seconds"] < visit["paint_seconds"] < 30
            assert visit["slowest_paint_seconds"] == visit["paint_seconds"]
            assert visit["processor_seconds"] >= 0
    assert experiment.sizes(url)["rows_requests"] == 74
