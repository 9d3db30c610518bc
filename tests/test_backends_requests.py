"""What a request really ran in: said in its record, and nothing is learned from seconds of other forwards."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_backends import PLAIN
from transformers.generation.streamers import BaseStreamer

import autospec
from autospec.answering import complete
from autospec.backends import Static, StaticModel
from autospec.costs.calibration import calibrate
from autospec.costs.upkeep import _Watched
from autospec.data import DemoPrompt
from autospec.errors import ConfigurationError, StoreError
from autospec.policies import Fixed
from autospec.replay import record
from autospec.traffic import Manifest, ShardWriter, TrafficRequest
from autospec.tune.arms import Arm
from autospec.types import Action, BlockOutcome
from autospec.verify import verify_greedy

GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


def ran_in(speculator: Any) -> str | None:
    deployment = speculator.last_request.deployment
    assert deployment is not None
    found: str | None = deployment.versions.get("backend")
    return found


class TestRecords:
    def test_each_names_what_it_ran_in(self, target: Any) -> None:
        ids = tiny.prompt(20)
        mask = torch.ones_like(ids)
        mask[:, :4] = 0
        inner: list[str | None] = []

        class Nested(BaseStreamer):
            def put(self, value: Any) -> None:
                if not inner and value.numel() == 1:
                    inner.append("")
                    target.generate(ids, **GREEDY)
                    inner[0] = ran_in(speculator)

            def end(self) -> None:
                pass

        with autospec.wrap(
            target, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=PLAIN
        ) as speculator:
            target.generate(ids, streamer=Nested(), **GREEDY)
            assert ran_in(speculator) == "plain"
            assert inner == [None]  # busy
            target.generate(ids, attention_mask=mask, **GREEDY)
            assert ran_in(speculator) is None
            with speculator.control():
                target.generate(ids, **GREEDY)
            assert ran_in(speculator) is None
            target.generate(ids, max_new_tokens=1, do_sample=False)
            assert ran_in(speculator) == "plain"
            target.generate(tiny.prompt(250), **GREEDY)  # outgrows the largest capacity
            assert "the largest capacity is used up" in speculator.last_request.notes
            assert ran_in(speculator) is None

    def test_controls_that_the_policy_takes_are_eager(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `generate` runs without autospec: that is what speed-up is measured against."""
        ids = tiny.prompt(20)
        plain = target.generate(ids, **GREEDY)
        with autospec.wrap(
            target, drafts=["ngram"], policy=Fixed("ngram", block_length=3), control_share=1.0, backend=PLAIN
        ) as speculator:
            assert speculator.backend.name == "plain"

            def run(*args: Any) -> Any:
                raise AssertionError

            monkeypatch.setattr(StaticModel, "run", run)
            assert torch.equal(target.generate(ids, **GREEDY), plain)
            found = speculator.last_request
            assert found is not None
            assert (found.is_control, found.notes, found.error) == (True, None, None)
            assert ran_in(speculator) is None

    def test_a_model_that_was_moved(self) -> None:
        model = tiny.llama()
        with autospec.wrap(model, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=PLAIN) as speculator:
            model.to(torch.float32)
            model.generate(tiny.prompt(20), **GREEDY)
            assert ran_in(speculator) is None
            assert speculator.last_request is not None
            assert speculator.last_request.deployment is not None
            assert speculator.last_request.deployment.dtype == "float32"


class TestCosts:
    def test_eager_forwards_are_not_taken_for_prepared_ones(self) -> None:
        model = tiny.llama()
        with autospec.wrap(model, drafts=["ngram"], policy="off", backend=PLAIN) as speculator:
            handle = model.model.layers[0].mlp.register_forward_hook(lambda *given: None)
            with pytest.raises(RuntimeError, match="has a forward hook"):
                calibrate(model, speculator.sources, budget_seconds=0.1, backend=speculator.backend)
            handle.remove()
            with torch.autocast("cpu"), pytest.raises(RuntimeError, match="autocast is on"):
                calibrate(model, speculator.sources, budget_seconds=0.1, backend=speculator.backend)

    @pytest.mark.parametrize("is_prepared", [False, True])
    def test_blocks_of_other_forwards_teach_no_seconds(self, is_prepared: bool) -> None:
        class Seen:
            def __init__(self) -> None:
                self.outcomes: list[BlockOutcome] = []

            def observe(self, outcome: BlockOutcome) -> None:
                self.outcomes.append(outcome)

        def outcome(is_prepared: bool) -> BlockOutcome:
            return BlockOutcome(
                "s", Action("ngram", 2), 10, 2, 2, 1, 2, 0.1, 0.2, 0.3, 0.4, 0.5, 7, is_prepared=is_prepared
            )

        chooser, costs = Seen(), Seen()
        watched = _Watched(chooser, costs, is_prepared=is_prepared)  # type: ignore[arg-type]
        for each in (False, True):
            watched.observe(outcome(each))
        assert costs.outcomes == [outcome(is_prepared)]
        ours, others = outcome(is_prepared), outcome(not is_prepared).untimed()
        assert chooser.outcomes == ([others, ours] if is_prepared else [ours, others])
        assert others.seconds == others.catch_up_seconds == others.catch_up_tokens == 0
        assert (others.num_judged_tokens, others.num_accepted_tokens) == (2, 1)

    def test_in_service(self, target: Any) -> None:
        ids = tiny.prompt(20)
        mask = torch.ones_like(ids)
        mask[:, :4] = 0
        with autospec.wrap(target, drafts=["ngram"], control_share=0.0, backend=PLAIN) as speculator:
            assert speculator._upkeep is not None
            costs = speculator._upkeep.costs
            seen = lambda: (costs._calibration.verify.num_seen, len(costs._unread))  # noqa: E731
            before = seen()
            target.generate(ids, attention_mask=mask, **GREEDY)
            assert seen() == before
            assert speculator.last_request is not None
            assert speculator.last_request.blocks > 2
            assert speculator.last_request.predicted_control_seconds is None
            target.generate(ids, **GREEDY)
            assert seen() > before
            assert speculator.last_request.predicted_control_seconds is not None


class TestOptions:
    """What is wrong is said before anything is prepared, which may take minutes."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"policy": "fastest"}, "unknown policy 'fastest'"),
            ({"policy": "fixed:suffix:3"}, "needs draft source 'suffix'"),
            ({"policy": "tuned:nowhere.toml"}, "nowhere.toml"),
            ({"store": "mysql://a/b"}, "not supported"),
            ({"store": "sqlite:////proc/nothing/a.db"}, "/proc/nothing"),
        ],
        ids=str,
    )
    def test_mistakes(self, target: Any, options: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def choose(*given: Any) -> Any:
            raise AssertionError

        monkeypatch.setattr("autospec.speculator.choose_backend", choose)
        with pytest.raises((ConfigurationError, StoreError), match=message):
            autospec.wrap(target, drafts=["ngram"], backend=PLAIN, **{"policy": "auto", **options})

    def test_the_database_is_closed_where_preparing_ends(
        self, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from autospec.telemetry.recorder import Recorder

        closed: list[Any] = []
        close = Recorder.close
        monkeypatch.setattr(Recorder, "close", lambda self: closed.append(close(self)))

        def interrupted(*given: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr("autospec.speculator.choose_backend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            autospec.wrap(target, drafts=["ngram"], policy="off", store=f"sqlite:///{tmp_path / 'a.db'}")
        assert len(closed) == 1
        assert "generate" not in vars(target)


class TestAnswersInALoop:
    """Whoever wraps a model for each answer, or wants plain decoding, has nothing prepared for it."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str | Static]:
        from autospec import speculator

        found: list[str | Static] = []
        usual = speculator.choose_backend

        def choose(asked: Any, *given: Any) -> Any:
            found.append(asked)
            return usual(asked, *given)

        monkeypatch.setattr(speculator, "choose_backend", choose)
        return found

    @pytest.fixture
    def tokenizer(self) -> Any:
        made = tiny.tokenizer()
        made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        return made

    def prompts(self) -> list[DemoPrompt]:
        return [DemoPrompt("p", "s", ({"role": "user", "content": "abcabcabc"},), 8)]

    def request(self) -> TrafficRequest:
        return TrafficRequest("r", datetime(2026, 1, 1, tzinfo=UTC), "s", (3, 4, 5))

    def test_verify(self, target: Any, tokenizer: Any, asked: list[str | Static]) -> None:
        assert len(list(verify_greedy(target, tokenizer, self.prompts(), drafts=["ngram"], block_lengths=(2,)))) == 1
        assert set(asked) == {"eager"}

    def test_replay(self, target: Any, tokenizer: Any, asked: list[str | Static]) -> None:
        assert len(list(record(target, tokenizer, self.prompts(), {"do_sample": False}))) == 1
        assert asked == ["eager"]

    def test_tune(self, target: Any, asked: list[str | Static]) -> None:
        arm = Arm(target, None, Fixed("ngram", block_length=2), ["ngram"])
        arm.answer(replace(self.request(), output=(6, 7)))
        assert set(asked) == {"eager"}
        assert len(asked) == 2

    def test_complete(self, target: Any, tokenizer: Any, tmp_path: Path, asked: list[str | Static]) -> None:
        from autospec.traffic.manifest import open_folder

        open_folder(tmp_path, Manifest.of(tokenizer, "t"))
        writer = ShardWriter(tmp_path)
        writer.write(self.request())
        writer.close()
        assert [each.error for each in complete(target, tokenizer, tmp_path, max_new_tokens=3)] == [None]
        assert asked == ["eager"]


def test_learned_states_of_a_backend_are_its_own(target: Any, tmp_path: Path) -> None:
    """What pays under prepared forwards is not what pays under the model's own."""

    class Counting(Fixed):
        """Learns how many blocks there were."""

        is_off = False
        blocks = 0

        def observe(self, outcome: BlockOutcome) -> None:
            self.blocks += 1

        def state(self) -> dict[str, Any]:
            return {"segments": {}, "blocks": self.blocks}

        def restore(self, state: Any) -> None:
            self.blocks = state["blocks"]

    def known(backend: Any) -> int:
        """Blocks at the beginning; some more follow."""
        policy = Counting("ngram", block_length=2)
        with autospec.wrap(
            target, drafts=["ngram"], policy=policy, store=f"sqlite:///{tmp_path / 'a.db'}", backend=backend
        ):
            found = policy.blocks
            target.generate(tiny.prompt(20), **GREEDY)
        assert policy.blocks > found
        return found

    assert [known(backend) > 0 for backend in (PLAIN, "eager", PLAIN, "eager")] == [False, False, True, True]
