"""The dashboard's page on tuning: studies read without writing, and a policy file beside what was measured since."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from html import unescape
from pathlib import Path

import optuna
import pytest
from sqlalchemy import make_url
from starlette.testclient import TestClient

from autospec.errors import AutospecError, ConfigurationError
from autospec.telemetry.dashboard.app import create_app
from autospec.telemetry.dashboard.tuning import DEFAULT, OPTUNA_DASHBOARD, label, load_studies, load_tuning
from autospec.telemetry.store import Store
from tests.dashboard_stores import POLICY, file_url, make_study, pairs


@pytest.fixture
def study(tmp_path: Path) -> str:
    return make_study(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(file_url(tmp_path))
    records, comparisons = pairs("fast", 12, 1.5)
    opened.add([each if each.is_control else replace(each, policy="tuned") for each in records], comparisons)
    return opened


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY, encoding="utf-8")
    return file


def make_journal(folder: Path) -> Path:
    journal = folder / "log"
    backend = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    optuna.create_study(storage=backend, study_name="logged")
    return journal


def test_train_held_out_and_measured(store: Store, study: str, policy: Path) -> None:
    found = load_tuning(store, study, policy)
    (mine,) = found.studies
    assert mine.states == {"complete": 4, "pruned": 1, "fail": 1}
    assert [label(trial.part) for trial in mine.trials] == ["ngram:2", "off"]
    assert mine.trials[0].speed_up == pytest.approx(14 / 10)
    chosen = {each.segment: each for each in found.chosen}
    assert set(chosen) == {"fast", "<img src=x>", DEFAULT}
    assert chosen["fast"].train == pytest.approx(1.5)
    assert chosen["fast"].held_out == (1.4, 1.2, 1.6)
    assert chosen["fast"].measured is not None
    assert chosen["fast"].measured.requests == 12
    assert chosen["fast"].measured.verdict == "faster"
    assert chosen[DEFAULT].train == pytest.approx(14 / 15)
    assert chosen["<img src=x>"].train is None
    assert label(chosen["<img src=x>"].part) == "goodput (discount=0.9)"
    assert found.made == (("by", "autospec tune"),)


def test_a_study_is_read_while_it_is_written(tmp_path: Path, study: str) -> None:
    file = tmp_path / "study #1.db"
    before = file.read_bytes()
    for _ in range(3):
        load_studies(study)
    assert file.read_bytes() == before
    writing = optuna.load_study(study_name="<b>mine</b>", storage=study)
    for number in range(5):
        writing.tell(writing.ask(), 1.0)
        assert load_studies(study)[0].states["complete"] == 5 + number


def test_an_empty_study_and_a_journal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    optuna.create_study(storage=url, study_name="empty")
    (found,) = load_studies(url)
    assert (dict(found.states), found.best) == ({}, ())
    assert [each.name for each in load_studies(f"journal:{make_journal(tmp_path)}")] == ["logged"]


def test_storages_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.db"
    for storage in (f"sqlite:///{missing}", f"journal:{missing}"):
        with pytest.raises(AutospecError, match="there is no"):
            load_studies(storage)
    assert not missing.exists()
    with pytest.raises(ConfigurationError, match="no database of Optuna's"):
        load_studies("somewhere")
    other = tmp_path / "other.txt"
    other.write_text("no database at all, but long enough to be looked at" * 40, encoding="utf-8")
    with pytest.raises(AutospecError, match="cannot be read"):
        load_studies(f"sqlite:///{other}")


def test_a_file_that_is_no_policy(store: Store, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("format = 'something'", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no policy of"):
        load_tuning(store, None, other)


def test_the_page(store: Store, study: str, policy: Path) -> None:
    client = TestClient(create_app(store, study_storage=study, policy_file=policy), base_url="http://127.0.0.1")
    text = client.get("/tuning").text
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))
    for words in ("1.40 1.20 to 1.60", "4 complete", "no requests under it yet", "&lt;b&gt;mine&lt;/b&gt;", "ngram:2"):
        assert words in shown
    assert "<img" not in text
    assert 'href="/tuning"' in client.get("/").text


def test_a_link_to_optuna_dashboard_where_it_is_installed(
    store: Store, study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = TestClient(create_app(store, study_storage=study), base_url="http://127.0.0.1")
    text = client.get("/tuning").text
    assert "pip install optuna-dashboard" in text
    assert OPTUNA_DASHBOARD not in text
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "optuna_dashboard.py").write_text("raise RuntimeError('only looked for')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    text = client.get("/tuning").text
    assert f'href="{OPTUNA_DASHBOARD}"' in text
    found = re.search("<code>(optuna-dashboard .*?)</code>", unescape(text))
    assert found is not None
    _, storage = shlex.split(found.group(1))
    assert make_url(storage).database == str(tmp_path / "study #1.db")
    assert (
        load_tuning(store, f"journal:{make_journal(tmp_path)}", None).command == f"optuna-dashboard {tmp_path / 'log'}"
    )


def test_the_page_is_there_only_when_asked_for(store: Store, policy: Path) -> None:
    client = TestClient(create_app(store), base_url="http://127.0.0.1")
    assert client.get("/tuning").status_code == 404
    assert "/tuning" not in client.get("/").text
    only = TestClient(create_app(store, policy_file=policy), base_url="http://127.0.0.1").get("/tuning")
    assert "No study was given" in only.text
