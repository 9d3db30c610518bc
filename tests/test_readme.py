"""The README's code runs, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autospec
from autospec import models

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


@pytest.mark.model
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert (tmp_path / "autospec.db").exists()
    record = names["record"]
    assert isinstance(record, autospec.RequestRecord)
    assert record.segment == "sort"
    assert record.fallback_reason is None
    assert "sort" in capsys.readouterr().out
    assert models.cache_folder().exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_module_is_on_the_map() -> None:
    """A reader finds each part of the tree from the README's table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in (
        "autospec/decoding",
        "autospec/drafts",
        "autospec/costs",
        "policies",
        "telemetry",
        "experiments",
        "docs",
    ):
        assert f"]({folder})" in text
    for experiment in (ROOT / "experiments").iterdir():
        if (experiment / "run.py").exists():
            assert f"](experiments/{experiment.name})" in text
            assert (experiment / "results.json").exists()
            assert "RESULT" not in (experiment / "README.md").read_text(encoding="utf-8")


def test_names_that_users_import() -> None:
    for name in autospec.__all__:
        assert getattr(autospec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        autospec.nothing  # noqa: B018
