"""The dashboard's page on tuning: studies read without writing, and a policy file beside what was measured since."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from starlette.testclient import TestClient

from autospec.errors import AutospecError, ConfigurationError
from autospec.telemetry.dashboard.app import create_app
from autospec.telemetry.dashboard.tuning import DEFAULT, label, load_studies, load_tuning
from autospec.telemetry.store import Store
from tests.dashboard_stores import file_url, pairs

POLICY = """
format = "autospec-policy"
version = 1
default = {source = "none", block_length = 0}
[segments]
fast = {source = "ngram", block_length = 2}
"<img src=x>" = {policy = "goodput", settings = {discount = 0.9}}
[made]
by = "autospec tune"
[made.speed_up]
fast = [1.4, 1.2, 1.6]
"""


@pytest.fixture
def study(tmp_path: Path) -> str:
    """One candidate walked twice, one that is slower, one given up, one that failed."""
    url = f"sqlite:///{tmp_path / 'study #1.db'}"
    made = optuna.create_study(storage=url, study_name="<b>mine</b>")
    for part, on in (({"source": "ngram", "block_length": 2}, 8.0), ({"source": "none", "block_length": 0}, 12.0)) * 2:
        trial = made.ask()
        trial.set_user_attr("part", part)
        trial.set_user_attr("seconds", {"fast": [on, 12.0], "slow": [on / 4, 2.0]})
        made.tell(trial, on / 12)
    made.tell(made.ask(), state=optuna.trial.TrialState.PRUNED)
    made.tell(made.ask(), state=optuna.trial.TrialState.FAIL)
    return url


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
    journal = tmp_path / "log"
    backend = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    optuna.create_study(storage=backend, study_name="logged")
    assert [each.name for each in load_studies(f"journal:{journal}")] == ["logged"]


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


def test_the_page_is_there_only_when_asked_for(store: Store, policy: Path) -> None:
    client = TestClient(create_app(store), base_url="http://127.0.0.1")
    assert client.get("/tuning").status_code == 404
    assert "/tuning" not in client.get("/").text
    only = TestClient(create_app(store, policy_file=policy), base_url="http://127.0.0.1").get("/tuning")
    assert "No study was given" in only.text
