"""What a wrapped call leaves in the database besides its counts: predictions, memory, versions, traces, tokens."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

import autospec
from autospec.costs.table import CostTable, Curve
from autospec.decoding.tally import Tally
from autospec.errors import ConfigurationError
from autospec.memory import weight_bytes
from autospec.observations import calibration_samples, policy_version, predicted_control_seconds
from autospec.policies import Fixed, Goodput
from autospec.telemetry import traces
from autospec.telemetry.store import Store
from autospec.types import Deployment
from tests import tiny

PLACE = Deployment("h", "d", "t", "float32", (), {})
COSTS = CostTable(
    (2, 4),
    Curve((10, 110), (1, 3, 5), ((1.0, 1.1, 1.2), (2.0, 2.1, 2.2))),
    {"ngram": Curve((10,), (2, 4), ((0.1, 0.2),))},
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 't.db'}"


TRACES = "SELECT t.blocks FROM block_traces t JOIN requests r ON r.request_id = t.request_id ORDER BY r.id"


def answered(url: str, count: int = 3, **options: Any) -> list[torch.Tensor]:
    target = tiny.llama()
    with autospec.wrap(target, store=url, **options):
        return [target.generate(tiny.prompt(12 + n), max_new_tokens=9, do_sample=False) for n in range(count)]


def scalars(url: str, query: str) -> list[Any]:
    with Store(url, readonly=True) as store, store.reading() as connection:
        return list(connection.exec_driver_sql(query).scalars())


class TestTokens:
    def test_nothing_is_kept_unless_it_is_asked_for(self, url: str) -> None:
        answered(url)
        assert scalars(url, "SELECT COUNT(*) FROM recordings") == [0]

    def test_all(self, url: str) -> None:
        outputs = answered(url, record=True)
        with Store(url, readonly=True) as store:
            found = [tokens for _, tokens in store.recordings()]
            assert list(store.recordings(segment="other")) == []
        assert [list(tokens.prompt + tokens.output) for tokens in found] == [output[0].tolist() for output in outputs]
        assert [len(tokens.prompt) for tokens in found] == [12, 13, 14]
        assert found[0].options["max_new_tokens"] == 9
        assert found[0].options["do_sample"] is False

    def test_what_a_function_leaves(self, url: str) -> None:
        def redact(prompt: list[int], output: list[int]) -> tuple[list[int], list[int]] | None:
            return None if len(prompt) == 13 else ([0] * len(prompt), output[:2])

        outputs = answered(url, record=redact)
        with Store(url, readonly=True) as store:
            found = [tokens for _, tokens in store.recordings()]
        assert [tokens.prompt for tokens in found] == [(0,) * 12, (0,) * 14]
        assert found[0].output == tuple(outputs[0][0, 12:14].tolist())

    @pytest.mark.parametrize(
        "given", [lambda p, o: 1 / 0, lambda p, o: p, lambda p, o: (["text"], o), lambda p, o: ([-1], o)]
    )
    def test_a_function_that_fails_keeps_nothing_and_no_answer_is_lost(self, url: str, given: Any) -> None:
        with pytest.warns(UserWarning, match="nothing of the request is kept"):
            outputs = answered(url, record=given)
        assert len(outputs) == 3
        assert scalars(url, "SELECT COUNT(*) FROM recordings") == [0]
        assert scalars(url, "SELECT COUNT(*) FROM requests") == [3]

    def test_batches_are_not_kept(self, url: str) -> None:
        target = tiny.llama()
        with autospec.wrap(target, store=url, record=True), pytest.warns(UserWarning, match="original generate"):
            target.generate(tiny.prompt(8).repeat(2, 1), max_new_tokens=3)
        assert scalars(url, "SELECT COUNT(*) FROM recordings") == [0]

    def test_neither_true_nor_a_function(self) -> None:
        with pytest.raises(ConfigurationError, match="record='yes'"):
            autospec.wrap(tiny.llama(), store="sqlite://", record="yes")  # type: ignore[arg-type]

    @pytest.mark.parametrize("options", [{"record": True}, {"trace": 0.5}])
    def test_nothing_can_be_kept_without_a_store(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="give store="):
            autospec.wrap(tiny.llama(), **options)


class TestTraces:
    def test_every_block_of_some_requests(self, url: str) -> None:
        answered(url, 2, trace=1.0, policy=Fixed("ngram", block_length=3))
        blocks = [traces.unpack(bytes(data), "default") for data in scalars(url, TRACES)]
        with Store(url, readonly=True) as store:
            records = list(store.requests())
        for record, outcomes in zip(records, blocks, strict=True):
            assert len(outcomes) == record.blocks
            assert sum(each.num_accepted_tokens for each in outcomes) == record.num_accepted_tokens
            assert sum(each.num_committed_tokens for each in outcomes) == record.output_tokens - 1

    def test_none_by_default(self, url: str) -> None:
        answered(url)
        assert scalars(url, "SELECT COUNT(*) FROM block_traces") == [0]

    @pytest.mark.parametrize("share", [-0.1, 1.5, "all", True])
    def test_shares_that_make_no_sense(self, share: Any) -> None:
        with pytest.raises(ConfigurationError, match="trace"):
            autospec.wrap(tiny.llama(), trace=share)

    def test_the_users_own_randomness_is_not_moved(self, url: str) -> None:
        import random

        random.seed(3)
        expected = random.Random(3).random()
        answered(url, trace=0.5)
        assert random.random() == expected


def test_counts_by_action_add_up(url: str) -> None:
    answered(url, 4, policy=Fixed("ngram", block_length=3))
    with Store(url, readonly=True) as store:
        for record in store.requests():
            parts = record.by_action.values()
            assert sum(part.blocks for part in parts) == record.blocks == sum(record.decisions.values())
            assert sum(part.num_draft_tokens for part in parts) == record.num_draft_tokens
            assert sum(part.num_accepted_tokens for part in parts) == record.num_accepted_tokens
            assert sum(part.num_committed_tokens for part in parts) == record.block_tokens
            assert set(record.by_action) == set(record.actions)


def test_policies_and_costs_are_noted(url: str) -> None:
    for policy in ("off", "fixed:ngram:3", "fixed:ngram:3"):
        answered(url, 1, policy=policy)
    assert sorted(scalars(url, "SELECT name FROM policy_versions")) == ["fixed:ngram:3", "off"]
    versions = scalars(url, "SELECT policy_version FROM requests ORDER BY id")
    assert versions[0] != versions[1] == versions[2]
    assert scalars(url, "SELECT COUNT(*) FROM calibration_samples") == [0]
    answered(url, 1, policy="auto")
    assert scalars(url, "SELECT COUNT(*) FROM calibration_samples WHERE source = 'target'")[0] > 4
    assert scalars(url, "SELECT predicted_control_seconds FROM requests ORDER BY id")[-1] > 0


def test_versions_follow_from_name_and_settings() -> None:
    one, two = (policy_version(Goodput(COSTS), "wrap") for _ in range(2))
    other = policy_version(Goodput(COSTS, minimum_gain=0.5), "wrap")
    assert one.version == two.version != other.version
    assert one.settings["minimum_gain"] == 0.02

    class Odd:
        name = "odd"
        settings = types.MappingProxyType({"what": object})

    assert policy_version(Odd(), "me").settings  # type: ignore[arg-type]  # anything can be written down


def test_every_measured_point_is_a_sample() -> None:
    samples = list(calibration_samples(COSTS, PLACE))
    assert len(samples) == 6 + 2
    assert {(s.source, s.tokens, s.context_tokens, s.seconds) for s in samples} >= {
        ("target", 3, 110, 2.1),
        ("ngram", 4, 10, 0.2),
    }
    assert list(calibration_samples(None, PLACE)) == []


def test_prediction() -> None:
    tally = Tally(draft_seconds=0.5, verify_seconds=4.0, prefill_seconds=1.0)
    # 6.0 in all, of which 1.5 are neither drafting nor verification; 10 steps at the mean of both contexts
    assert predicted_control_seconds(COSTS, tally, 55, 11, 6.0) == pytest.approx(1.5 + 10 * 1.5)
    assert predicted_control_seconds(COSTS, tally, 55, 0, 6.0) is None
    assert predicted_control_seconds(None, tally, 55, 11, 6.0) is None


def test_weights_that_are_shared_count_once() -> None:
    target = tiny.llama()
    once = weight_bytes([target])
    assert once == sum(p.numel() * p.element_size() for p in target.parameters()) + sum(
        b.numel() * b.element_size() for b in target.buffers()
    )
    assert weight_bytes([target, target, None, "text"]) == once
    with autospec.wrap(
        target, drafts=["ngram", autospec.drafts.Assistant(tiny.llama(num_hidden_layers=1))]
    ) as speculator:
        target.generate(tiny.prompt(5), max_new_tokens=2)
        record = speculator.last_request
    assert record is not None
    assert record.deployment is not None
    assert record.deployment.model_bytes is not None
    assert record.deployment.model_bytes > once
    assert record.peak_memory_bytes is not None
    assert record.peak_memory_bytes > 1_000_000


def test_deciding_is_no_part_of_plain_decoding() -> None:
    from test_goodput import Costs

    from autospec.decoding.tally import Tally
    from autospec.observations import predicted_control_seconds

    tally = Tally(draft_seconds=0.5, verify_seconds=1.0, decision_seconds=0.25)
    predicted = predicted_control_seconds(Costs(), tally, prompt_tokens=10, output_tokens=11, total_seconds=3.0)
    assert predicted == pytest.approx(3.0 - 0.5 - 1.0 - 0.25 + 10 * 0.040)
