"""What an extra lacks here, and the line that a user pastes to install it."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from autospec.cli import demo, extras

ASKED = [
    "click>=8.2",
    'plotly>=6.0; extra == "dashboard"',
    'uvicorn>=0.34; extra == "dashboard"',
    'prometheus-client>=0.22; extra == "metrics"',
    'tomli; python_version < "3"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions by name, for the test to fill."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(extras, "requires", lambda name: ASKED)
    monkeypatch.setattr(extras, "version", version)
    return found


def test_what_is_missing_is_asked_for_and_nothing_else(installed: dict[str, str]) -> None:
    assert extras.missing("dashboard") == ["plotly>=6.0", "uvicorn>=0.34"]
    installed |= {"plotly": "5.9", "uvicorn": "0.54.0"}
    assert extras.missing("dashboard") == ["plotly>=6.0"]
    installed["plotly"] = "7.1.0"
    assert extras.missing("dashboard") == []
    assert extras.install_command("dashboard") is None


def test_the_line_can_be_pasted(installed: dict[str, str]) -> None:
    installed["pip"] = "26.0"
    command = [sys.executable, "-m", "pip", "install", "plotly>=6.0", "uvicorn>=0.34"]
    assert shlex.split(extras.install_command("dashboard") or "") == command
    del installed["pip"]
    assert (extras.install_command("dashboard") or "").startswith("uv pip install --python ")


def test_a_bare_tree_knows_of_nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", requires)
    assert extras.missing("dashboard") == []


def test_the_demonstration_says_how_to_open_the_dashboard(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/autospec", "demo"])
    shown = ".venv/bin/autospec dashboard --store 'sqlite:///a b.db' --open"
    assert demo.dashboard_command("sqlite:///a b.db") == f"{extras.install_command('dashboard')} && {shown}"
    installed |= {"plotly": "7.1.0", "uvicorn": "0.54.0"}
    assert demo.dashboard_command("sqlite:///a b.db") == shown
