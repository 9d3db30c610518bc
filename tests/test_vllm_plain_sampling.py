"""Steps without drafts go to vLLM's own sampler; all others, and whatever is not as expected, to the original."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autospec.integrations.vllm import Proposer, proposer
from autospec.integrations.vllm.plain_sampling import PlainSampler, install
from tests.vllm_driver import Asked, Engine, config, cycle


class Sampler(torch.nn.Module):
    """Takes the likeliest token, and keeps how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, logits: Any, sampling_metadata: Any, predict_bonus_token: bool = False) -> Any:
        self.calls.append({"sampling_metadata": sampling_metadata, "predict_bonus_token": predict_bonus_token})
        tokens = logits.argmax(dim=-1).to(torch.int32).unsqueeze(-1)
        return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=None)


class RejectionSampler(torch.nn.Module):
    """Of the shape of vLLM's: answers what it was asked."""

    def __init__(self, sampler: Any = None) -> None:
        super().__init__()
        self.sampler = Sampler() if sampler is None else sampler
        self.synthetic_mode = False

    def forward(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        return metadata, draft_probs, logits, sampling_metadata


def drafts_of(*counts: int) -> Any:
    ends = torch.tensor([count + 1 for count in counts]).cumsum(0)
    return SimpleNamespace(max_spec_len=max(counts), bonus_logits_indices=ends - 1)


def sampling(**changes: Any) -> Any:
    found = {"max_num_logprobs": None, "logprob_token_ids": None, "thinking_budget_state_holder": None}
    return SimpleNamespace(**found | changes)


def put_on(module: Any) -> PlainSampler:
    found = install(SimpleNamespace(rejection_sampler=module))
    assert found is not None
    return found


LOGITS = torch.eye(5)[[3, 1, 2]]


def test_without_drafts_each_row_gets_the_token_of_vllms_own_sampler() -> None:
    module, asked = RejectionSampler(), sampling()
    stand_in = put_on(module)
    kept = LOGITS.clone()
    output = module(drafts_of(0, 0, 0), None, LOGITS, asked)
    assert output.sampled_token_ids.tolist() == [[3], [1], [2]]
    assert output.sampled_token_ids.dtype == torch.int32
    assert module.sampler.calls == [{"sampling_metadata": asked, "predict_bonus_token": True}]
    assert torch.equal(LOGITS, kept)
    assert module(metadata=drafts_of(0, 0, 0), draft_probs=None, logits=LOGITS, sampling_metadata=asked) is not None
    assert stand_in.num_steps == len(module.sampler.calls) == 2


@pytest.mark.parametrize(
    ("metadata", "logits", "asked"),
    [
        (drafts_of(0, 1), LOGITS, sampling()),
        (drafts_of(0), LOGITS, sampling(max_num_logprobs=0)),
        (drafts_of(0), LOGITS, sampling(logprob_token_ids={0: [1]})),
        (drafts_of(0), LOGITS, sampling(thinking_budget_state_holder=SimpleNamespace(has_tracked_requests=lambda: 1))),
        (drafts_of(0), None, sampling()),
        (SimpleNamespace(), LOGITS, sampling()),  # no such attributes
        (drafts_of(0), LOGITS, SimpleNamespace(max_num_logprobs=None)),
    ],
)
def test_everything_else_goes_to_the_original(metadata: Any, logits: Any, asked: Any) -> None:
    module = RejectionSampler()
    put_on(module)
    assert module(metadata, None, logits, asked) == (metadata, None, logits, asked)
    assert module.sampler.calls == []


def test_a_sampler_that_fails_is_asked_no_more() -> None:
    class Failing(Sampler):
        def forward(self, logits: Any, sampling_metadata: Any, predict_bonus_token: bool = False) -> Any:
            self.calls.append({})
            raise RuntimeError("planted")

    module = RejectionSampler(Failing())
    put_on(module)
    for _ in range(3):
        assert module(drafts_of(0), None, LOGITS, sampling())[2] is LOGITS
    assert len(module.sampler.calls) == 1


def test_closing_puts_the_original_back() -> None:
    module = RejectionSampler()
    stand_in = put_on(module)
    stand_in.close()
    stand_in.close()
    assert "forward" not in vars(module)
    assert module(drafts_of(0), None, LOGITS, sampling())[2] is LOGITS


def test_where_somebody_else_has_wrapped_it_closing_leaves_that() -> None:
    module = RejectionSampler()
    stand_in = put_on(module)
    inner = module.forward
    module.forward = lambda *args: ("wrapped", inner(*args))  # type: ignore[method-assign]
    stand_in.close()
    wrapped, output = module(drafts_of(0), None, LOGITS, sampling())
    assert wrapped == "wrapped"
    assert output[2] is LOGITS


class OtherArguments(RejectionSampler):
    def forward(self, metadata: Any, logits: Any) -> Any:  # type: ignore[override]
        return metadata, logits


class Raising:
    @property
    def rejection_sampler(self) -> Any:
        raise RuntimeError("planted")


def of(module: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(module, name, value)
    return SimpleNamespace(rejection_sampler=module)


@pytest.mark.parametrize(
    "runner",
    [
        None,
        Raising(),
        SimpleNamespace(),
        of(OtherArguments()),
        of(RejectionSampler(torch.nn.Linear(1, 1))),
        of(RejectionSampler(), synthetic_mode=True),
        of(RejectionSampler(), forward=lambda *args: None),
        of(SimpleNamespace(forward=len)),
    ],
)
def test_what_is_of_another_shape_is_left_as_it_is(runner: Any) -> None:
    module = None if isinstance(runner, Raising) else getattr(runner, "rejection_sampler", None)
    before = {} if module is None else dict(vars(module))
    assert install(runner) is None
    assert module is None or vars(module) == before


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(proposer, "tokenizer_of", lambda config: None)

    def make(num_ranks: int = 1, **settings: str) -> tuple[Proposer, Engine]:
        for name, value in settings.items():
            monkeypatch.setenv(f"AUTOSPEC_VLLM_{name.upper()}", value)
        found = Proposer(config(parallel_config=SimpleNamespace(world_size=num_ranks)))
        found.load_model(torch.nn.Linear(4, 4))
        engine = Engine(found.propose)
        engine.rejection_sampler = RejectionSampler()  # type: ignore[attr-defined]
        engine.add(Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4)))
        engine.run(4)
        return found, engine

    return make


def test_the_proposer_installs_it_once_and_takes_it_away(made: Any) -> None:
    found, engine = made()
    stand_in = engine.rejection_sampler.forward
    engine.run()
    assert vars(engine.rejection_sampler)["forward"] is stand_in
    found.close()
    assert "forward" not in vars(engine.rejection_sampler)


@pytest.mark.parametrize(("num_ranks", "settings"), [(2, {}), (1, {"plain_sampler": "no"})])
def test_not_where_ranks_draw_together_nor_where_it_is_switched_off(
    made: Any, num_ranks: int, settings: dict[str, str]
) -> None:
    _, engine = made(num_ranks, **settings)
    assert "forward" not in vars(engine.rejection_sampler)


def test_another_runner_is_looked_for_where_the_first_is_gone(made: Any) -> None:
    found, engine = made()
    del engine
    assert found._rows.runner is None
    other = Engine(found.propose)
    other.rejection_sampler = RejectionSampler()  # type: ignore[attr-defined]
    other.add(Asked("b", [5, 6, 7, 8, 5], cycle(5, 6, 7, 8)))
    other.run(4)
    assert found._rows.runner is other
    assert "forward" in vars(other.rejection_sampler)
    found.close()
