from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from autospec.errors import StoreError
from autospec.telemetry.codec import to_entry
from autospec.telemetry.migrate import REVISIONS, alembic_config, needs_migration
from autospec.telemetry.schema import VERSION_TABLE, Base
from autospec.telemetry.store import Store
from autospec.telemetry.upkeep import check
from autospec.types import PolicyState
from tests.postgres_server import fresh_database
from tests.test_telemetry_hourly import HERE, NOON, traffic


@pytest.fixture(params=["memory", "file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        with fresh_database() as address:
            yield address
    else:
        yield "sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path / 'telemetry.db'}"


def test_migrating_an_empty_database_gives_the_models(url: str) -> None:
    with Store(url) as store, store._transaction(write=True) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "version_table": VERSION_TABLE})
        assert compare_metadata(context, Base.metadata) == []
        indexes = {index["name"] for index in inspect(connection).get_indexes("requests")}
        assert {"ix_requests_segment_started_at", "ix_requests_run"} <= indexes


def test_a_missing_column_would_be_noticed(url: str) -> None:
    with Store(url) as store, store._transaction(write=True) as connection:
        connection.exec_driver_sql("ALTER TABLE requests DROP COLUMN decoding")
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert [change[0] for change in compare_metadata(context, Base.metadata)] == ["add_column"]


def test_down_and_up_again(url: str) -> None:
    with Store(url) as store, store._transaction(write=True) as connection:
        command.downgrade(alembic_config(connection), "base")
        assert inspect(connection).get_table_names() == [VERSION_TABLE]
        command.upgrade(alembic_config(connection), "head")
        assert set(inspect(connection).get_table_names()) == {VERSION_TABLE, *Base.metadata.tables}


def test_states_of_policies_came_with_the_third_revision(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.db"
    with Store(f"sqlite:///{path}") as store:
        store.add(traffic(20))
        with store.writing() as connection:
            command.downgrade(alembic_config(connection), "0002")
            assert "policy_states" not in inspect(connection).get_table_names()
    with Store(f"sqlite:///{path}") as store:
        assert store.count() == 20
        assert check(store) == []
        store.write([to_entry(PolicyState(HERE, "auto", "v", "p", NOON, {"n": 1}))])
        assert [each.state for each in store.policy_states(HERE, "v", NOON)[0]] == [{"n": 1}]
    copy = sqlite3.connect(tmp_path / "telemetry.db.schema-0002")
    assert copy.execute("SELECT COUNT(*) FROM requests").fetchone() == (20,)
    assert copy.execute("SELECT version_num FROM autospec_version").fetchone() == ("0002",)
    copy.close()


def test_a_server_gets_them_too() -> None:
    with fresh_database() as url:
        with Store(url) as store, store.writing() as connection:
            command.downgrade(alembic_config(connection), "0002")
        with Store(url) as store:
            store.write([to_entry(PolicyState(HERE, "auto", "v", "p", NOON, {"n": 1}))])
            assert check(store) == []
            assert [each.state for each in store.policy_states(HERE, "v", NOON)[0]] == [{"n": 1}]


def test_an_emptied_version_table_means_start_again(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path / 'telemetry.db'}"
    with Store(address) as store, store._transaction(write=True) as connection:
        command.downgrade(alembic_config(connection), "base")
    with Store(address) as store:
        assert store.count() == 0


def test_the_known_revisions_are_those_that_exist() -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == REVISIONS
    assert scripts.get_heads() == [REVISIONS[-1]]


def test_no_ratio_is_stored() -> None:
    names = [column.name for table in Base.metadata.tables.values() for column in table.columns]
    assert not [name for name in names if "rate" in name or "speed" in name or "per_" in name or "mean" in name]


def test_what_needs_migration() -> None:
    ours = frozenset([VERSION_TABLE, "requests"])
    assert needs_migration(frozenset(), None, "x", readonly=False)
    assert not needs_migration(ours, REVISIONS[-1], "x", readonly=True)
    for tables, revision in [(frozenset(["other"]), None), (ours, "9999")]:
        with pytest.raises(StoreError, match="nothing was changed"):
            needs_migration(tables, revision, "x", readonly=False)
