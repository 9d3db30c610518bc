"""The boundary to vLLM: what it makes of calls and configurations, and that nothing it does takes an engine down."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select

from autospec.errors import ConfigurationError, StoreError
from autospec.integrations.vllm import Proposer, engine, proposer, telemetry
from autospec.integrations.vllm.engine import ShapeError, limits_of, read_call
from autospec.telemetry import Store, calibrations
from autospec.telemetry.schema import CalibrationRow
from tests.vllm_driver import END, MAX_MODEL_LEN, Asked, Engine, config, cycle, scramble


class Letters:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(1000)}


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "tokenizer_of", lambda config: Letters())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes proposers with settings of the environment, and closes them."""
    found: list[Proposer] = []

    def make(**settings: str) -> Proposer:
        for name, value in settings.items():
            monkeypatch.setenv(f"AUTOSPEC_VLLM_{name.upper()}", value)
        found.append(Proposer(config()))
        found[-1].load_model(torch.nn.Linear(4, 4))
        return found[-1]

    yield make
    for each in found:
        each.close()


def loops(count: int, max_tokens: int = 24) -> list[Asked]:
    return [Asked(str(i), [30 + i, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=max_tokens) for i in range(count)]


def test_import_loads_no_vllm() -> None:
    code = "import sys, autospec, autospec.integrations, autospec.integrations.vllm as v; v.Proposer; "
    code += "print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_requests_reach_the_store_with_what_was_learned(made: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    proposer = made(store=url, policy="goodput", name="engine-1", run="here")
    engine = Engine(proposer.propose)
    asked = loops(5)
    engine.add(*asked)
    engine.run()
    proposer.close()
    with Store(url, readonly=True) as store:
        records = list(store.requests())
        deployment, version = records[0].deployment, records[0].policy_version
        assert deployment is not None
        assert version is not None
        from datetime import UTC, datetime

        states, _ = store.policy_states(deployment, version, datetime.fromtimestamp(0, UTC))
    assert len(records) == 5
    assert len(states) == 1
    assert deployment.host == "engine-1"
    assert deployment.device.startswith("vllm: cpu")
    assert deployment.model_bytes == 4 * (16 + 4)
    assert deployment.target == "tiny"
    for record in records:
        assert record.run == "here"
        assert 1 + record.block_tokens >= 24 >= record.output_tokens >= 1 + record.block_tokens - 8
    assert sum(record.num_accepted_tokens for record in records) == sum(each.num_accepted for each in asked) > 0


def test_requests_that_have_ended_are_recorded_while_the_engine_rests(made: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    proposer = made(store=url, policy="fixed:ngram:4")
    engine = Engine(proposer.propose)
    ending = Asked("a", [1, 2, 1], lambda text: END if len(text) > 12 else 1 + len(text) % 2, max_tokens=50)
    engine.add(ending)
    engine.run()
    assert ending.output[-1] == END
    engine.add(Asked("b", [5, 6], scramble(2), max_tokens=1))
    engine.step()
    proposer.flush()
    with Store(url, readonly=True) as store:
        (record,) = store.requests()
    assert record.output_tokens == len(ending.output)


def test_what_is_learned_by_one_is_what_the_next_begins_with(made: Any, tmp_path: Path) -> None:
    settings = {"store": f"sqlite:///{tmp_path}/store.db", "policy": "goodput"}
    first = made(**settings)
    engine = Engine(first.propose)
    engine.add(*loops(4, 60))
    engine.run()
    first.close()
    second = made(**settings)
    assert second._policy.state()["acceptance"] == first._policy.state()["acceptance"]
    assert second._policy.state()["segments"].keys() == first._policy.state()["segments"].keys() != set()
    third = made(**settings, resume="no")
    assert third._policy.state()["segments"] == {}


def test_a_step_that_fails_goes_without_drafts_and_the_next_ones_do_not(
    made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    proposer = made(store=url, policy="fixed:ngram:4")
    real, calls = proposer._batch.step, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        drafts = real(*args)
        if len(calls) in (4, 5, 9):
            raise ValueError("planted")
        return drafts

    monkeypatch.setattr(proposer._batch, "step", failing)
    engine = Engine(proposer.propose)
    asked = loops(3, 60)
    engine.add(*asked)
    engine.run()
    assert all(len(each.output) == 60 for each in asked)
    assert sum(each.num_accepted for each in asked) > 0
    said = [record for record in caplog.records if "a step goes without drafts" in record.message]
    assert len(said) == 1
    assert said[0].exc_info is not None
    proposer.close()
    with Store(url, readonly=True) as store:
        records = list(store.requests())
    assert [record.prompt_tokens for record in records] == [6, 6, 6]
    assert all(52 <= record.output_tokens <= 60 for record in records)
    assert all("tokens belong to no block" in str(record.notes) for record in records)


def test_a_proposer_that_always_fails_gives_up(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = made(policy="fixed:ngram:4")
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(args)
        raise ValueError("planted")

    monkeypatch.setattr(proposer._batch, "step", failing)
    engine = Engine(proposer.propose)
    engine.add(*loops(2, 150))
    engine.run()
    assert len(calls) == 100


class Wrong:
    """A policy that chooses what there is not."""

    name = "wrong"

    def choose(self, context: Any) -> Any:
        return "ngram"

    def observe(self, outcome: Any) -> None: ...


def test_a_policy_that_chooses_nonsense_takes_nothing_down(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    proposer = made()
    proposer._controller._policy = Wrong()
    engine = Engine(proposer.propose)
    asked = loops(2)
    engine.add(*asked)
    engine.run()
    assert all(len(each.output) == 24 for each in asked)
    assert "policy 'wrong' chose str ngram" in caplog.text


def test_a_store_that_is_away_costs_no_draft_and_no_record(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    proposer = made(store=f"sqlite:///{folder}/store.db", policy="fixed:ngram:4")
    assert "the store cannot be used, requests are kept in memory" in caplog.text
    engine = Engine(proposer.propose)
    asked = loops(2)
    engine.add(*asked)
    engine.run()
    assert sum(each.num_accepted for each in asked) > 0
    folder.mkdir()
    proposer._telemetry._not_before = 0.0
    proposer.close()
    with Store(f"sqlite:///{folder}/store.db", readonly=True) as store:
        assert len(list(store.requests())) == 2


def test_only_one_of_several_ranks_drafts_and_records(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "is_leader", lambda: False)
    other = made(policy="fixed:ngram:4")
    engine = Engine(other.propose)
    asked = loops(2)
    engine.add(*asked)
    engine.run()
    assert sum(each.num_drafted for each in asked) == 0


def test_a_call_of_another_shape_is_refused_once_and_for_all(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    proposer = made()
    lengths, token_ids = np.zeros(4, dtype=np.int32), np.zeros((4, 16), dtype=np.int32)
    assert proposer.propose([[1], [2]], torch.zeros(4), token_ids) == [[], []]
    assert proposer.propose([[1], [2], []], lengths, token_ids) == [[], [], []]
    said = [record.message for record in caplog.records if "autospec drafts nothing in this engine" in record.message]
    assert len(said) == 1
    assert "propose(list[], Tensor[4], ndarray[4, 16])" in said[0]


def test_calls_are_read_by_their_shape() -> None:
    lengths, token_ids = np.array([3, 9], dtype=np.int32), np.zeros((2, 16), dtype=np.int32)
    mapping = {"layer.0": torch.zeros(7), "layer.1": torch.zeros(7)}
    call = read_call(([[1], []], lengths, token_ids), {"slot_mappings": mapping})
    assert (call.num_step_tokens, call.most, call.unknown) == (7, None, ())
    call = read_call((4, [[1]], lengths, token_ids), {"slot_mappings": [mapping], "hint": 1})
    assert (call.num_step_tokens, call.most, call.unknown) == (None, 4, ("hint",))
    named = {"sampled_token_ids": [[1]], "num_tokens_no_spec": lengths, "token_ids_cpu": token_ids}
    assert read_call((), named).sampled == [[1]]
    for args in (
        (),
        ([[1]],),
        ([[1]], lengths),
        ([1], lengths, token_ids),
        ([[1]], lengths.astype(float), token_ids),
        ([[1]], lengths, lengths),
        ([[1]] * 3, lengths, token_ids),
        (torch.zeros(2, 1), lengths, token_ids),
    ):
        with pytest.raises(ShapeError, match="which is not as it was"):
            read_call(args, {})


def test_limits_are_read_off_the_configuration() -> None:
    limits = limits_of(config(model_config__hf_text_config=SimpleNamespace(eos_token_id=[2, 3])))
    assert limits.num_speculative_tokens == 8
    assert limits.max_model_len == MAX_MODEL_LEN
    assert limits.end_tokens == {2, 3, END}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_config": None}, "no usable speculative_config.num_speculative_tokens"),
        ({"speculative_config__num_speculative_tokens": None}, "no usable speculative_config.num_speculative_tokens"),
        ({"model_config__get_vocab_size": 7}, "no usable model_config.get_vocab_size"),
        ({"scheduler_config__async_scheduling": True}, "--no-async-scheduling"),
        ({"additional_config": {"autospec": {"polici": "off"}}}, "no such setting; known are store, policy"),
        ({"additional_config": {"autospec": {"policy": "nothing"}}}, "unknown policy 'nothing'"),
        ({"additional_config": {"autospec": {"drafts": "assistant"}}}, "needs settings"),
        ({"additional_config": {"autospec": {"store": "mysql://x/y"}}}, "databases of kind 'mysql' are not supported"),
        ({"additional_config": {"autospec": {"segments": "/nowhere.toml"}}}, "cannot read the rules"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Proposer(config(**changes))


def test_a_model_that_cannot_be_begun_with_is_served_without_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(config: Any) -> Any:
        raise OSError("planted")

    monkeypatch.setattr(proposer, "tokenizer_of", failing)
    found = Proposer(config())
    found.load_model(None)
    assert "autospec drafts nothing in this engine, and records nothing: OSError: planted" in caplog.text
    asked = loops(2)
    driver = Engine(found.propose)
    driver.add(*asked)
    driver.run()
    assert all(len(each.output) == 24 for each in asked)


def test_a_segmenter_that_fails_costs_a_label(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = made(policy="fixed:ngram:4", segments="auto")
    found._tokenizer = SimpleNamespace(decode=lambda ids: 1 / 0)
    driver = Engine(found.propose)
    driver.add(*loops(2))
    driver.step()
    assert {each.request.segment for each in found._batch._rows} == {"default"}
    assert caplog.text.count("such requests are in segment 'default'") == 1


def test_a_proposer_that_is_dropped_is_let_go() -> None:
    found = Proposer(config())
    found.load_model(None)
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None


def test_one_rank_is_the_leader_without_vllm() -> None:
    assert engine.is_leader()


def test_what_waited_in_memory_is_written_at_the_end(made: Any, tmp_path: Path) -> None:
    """Also where nothing has ended since the store came back."""
    folder = tmp_path / "later"
    found = made(store=f"sqlite:///{folder}/store.db", policy="fixed:ngram:4")
    driver = Engine(found.propose)
    driver.add(*loops(2))
    driver.run()
    found._batch.close()
    found._record_ended()
    assert len(found._telemetry._waiting) == 2
    folder.mkdir()
    found.close()
    with Store(f"sqlite:///{folder}/store.db", readonly=True) as store:
        assert len(list(store.requests())) == 2


def test_a_store_that_comes_back_gets_what_waited_though_nothing_ends(made: Any, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    url = f"sqlite:///{folder}/store.db"
    found = made(store=url, policy="fixed:ngram:4")
    driver = Engine(found.propose)
    driver.add(*loops(2))
    driver.run()
    found._batch.close()
    found._record_ended()
    folder.mkdir()
    found._telemetry._not_before = 0.0
    found.flush()
    with Store(url, readonly=True) as store:
        assert len(list(store.requests())) == 2


def test_requests_that_cannot_wait_in_memory_are_counted(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MOST_WAITING", 3)
    found = made(store=f"sqlite:///{tmp_path}/never/store.db", policy="fixed:ngram:4")
    driver = Engine(found.propose)
    driver.add(*loops(5))
    driver.run()
    found.close()
    assert "5 requests are not recorded: the store was not reached in time" in caplog.text


def test_a_request_that_cannot_be_learned_from_costs_no_other_its_record(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    found = made(store=url, policy="fixed:ngram:4")
    found._sources["ngram"].learn = lambda request, answer: 1 / 0
    driver = Engine(found.propose)
    driver.add(*loops(3))
    driver.run()
    found.close()
    with Store(url, readonly=True) as store:
        assert len(list(store.requests())) == 3
    assert caplog.text.count("not learned from: ZeroDivisionError") == 1


def test_what_steps_cost_is_told_once(made: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    found = made(store=url, policy="fixed:ngram:4")
    driver = Engine(found.propose)
    driver.add(*loops(2, 60))
    driver.run()
    for _ in range(3):
        found._telemetry.note_costs(found._costs)
    found.close()
    with Store(url, readonly=True) as store, store.reading() as connection:
        tokens = [row.tokens for row in connection.execute(select(CalibrationRow.tokens))]
    assert tokens == sorted(set(tokens)) != []


def test_what_others_know_of_steps_is_no_condition(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **named: Any) -> None:
        raise StoreError("planted")

    monkeypatch.setattr(calibrations, "newest_steps", failing)
    found = made(store=f"sqlite:///{tmp_path}/store.db", policy="fixed:ngram:4")
    assert "what steps cost other engines could not be read: planted" in caplog.text
    driver = Engine(found.propose)
    asked = loops(2)
    driver.add(*asked)
    driver.run()
    assert sum(each.num_accepted for each in asked) > 0


def test_the_end_token_of_the_tokenizer_ends_answers_too(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(Letters):
        eos_token_id = 9

    monkeypatch.setattr(proposer, "tokenizer_of", lambda config: Ending())
    assert made()._batch._limits.end_tokens == {END, 9}
