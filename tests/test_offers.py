"""Offers: what retrieval sources would propose, known before the choice and judged by what is committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

import autospec
from autospec.decoding.loop import MAX_OFFER
from autospec.decoding.offers import Offers
from autospec.drafts import Assistant, NGram, Proposal, Suffix
from autospec.errors import DraftError
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome, RequestContext

pytestmark = pytest.mark.compat


class Watching:
    """Takes a source's offer, or leaves it, and remembers what it was shown."""

    name = "watching"
    wants_offers = True

    def __init__(self, *actions: Action) -> None:
        self._actions = actions
        self.contexts: list[BlockContext] = []
        self.outcomes: list[BlockOutcome] = []

    def choose(self, context: BlockContext) -> Action:
        self.contexts.append(context)
        return self._actions[len(self.contexts) % len(self._actions)]

    def observe(self, outcome: BlockOutcome) -> None:
        self.outcomes.append(outcome)


class Counted(NGram):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def start(self, request: Any) -> Any:
        inner, asked = super().start(request), self.asked

        class Session:
            def propose(self, committed: Any, block_length: int) -> Proposal:
                asked.append(block_length)
                return inner.propose(committed, block_length)

        return Session()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}])
def test_the_text_stays_what_plain_decoding_says(model: Any, options: dict[str, Any]) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        expected = model.generate(tiny.prompt(20, seed), max_new_tokens=40, **options)
        policy = Watching(Action("ngram", 4), OFF, Action("suffix", 8), Action("assistant", 2))
        torch.manual_seed(seed)
        with autospec.wrap(
            model, drafts=[NGram(), Suffix(), Assistant(tiny.near_copy(model))], policy=policy
        ) as speculator:
            output = model.generate(tiny.prompt(20, seed), max_new_tokens=40, **options)
            request = speculator.last_request
        assert torch.equal(output, expected)
        assert request is not None
        assert request.notes is None


def test_every_offer_is_judged_once_and_as_the_text_says(model: Any) -> None:
    policy = Watching(Action("ngram", 4), OFF, Action("assistant", 3))
    with autospec.wrap(model, drafts=[NGram(), Assistant(tiny.near_copy(model))], policy=policy):
        output = model.generate(tiny.prompt(20), max_new_tokens=60, do_sample=False)[0].tolist()
    made = [context for context in policy.contexts if "ngram" in context.offers]
    settled = [each for outcome in policy.outcomes for each in outcome.offers]
    assert len(made) >= 20
    assert sorted(each.output_tokens for each in settled) == [context.output_tokens for context in made]
    source = NGram().start(type("Request", (), {"vocab_size": tiny.VOCAB}))
    drafts = {
        n: source.propose(output[: 20 + n], MAX_OFFER).tokens for n in sorted(each.output_tokens for each in settled)
    }
    for each in settled:
        following = output[20 + each.output_tokens :]
        draft = drafts[each.output_tokens][: each.offer.num_tokens]
        assert len(draft) == each.offer.num_tokens
        run = next((i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b), None)
        if run is None:
            run = min(len(draft), len(following))
            assert each.num_judged_tokens == run
        else:
            assert each.num_judged_tokens == run + 1
        assert each.num_accepted_tokens == run


def test_a_source_is_asked_once_in_a_block_and_its_offer_taken(model: Any) -> None:
    source = Counted()
    policy = Watching(Action("ngram", 3))
    with autospec.wrap(model, drafts=[source], policy=policy) as speculator:
        model.generate(tiny.prompt(20), max_new_tokens=40, do_sample=False)
        request = speculator.last_request
    assert request is not None
    assert len(source.asked) == sum(bool(context.offers) for context in policy.contexts)
    assert max(source.asked) == MAX_OFFER
    assert all(outcome.num_draft_tokens <= 3 for outcome in policy.outcomes)
    assert request.num_accepted_tokens > 0


def test_a_block_longer_than_offers_are_asks_again(model: Any) -> None:
    source = Counted()
    with autospec.wrap(model, drafts=[source], policy=Watching(Action("ngram", 30))) as speculator:
        model.generate(tiny.prompt(60, period=5), max_new_tokens=80, do_sample=False)
        assert speculator.last_request is not None
    assert 16 < max(source.asked) <= 30


def test_offers_are_not_asked_for_where_nobody_reads_them(model: Any) -> None:
    source = Counted()
    with autospec.wrap(model, drafts=[source, "suffix"], policy="fixed:suffix:2"):
        model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)
    assert source.asked == []


def test_a_source_that_fails_when_asked_is_off_for_the_request(model: Any) -> None:
    class Broken(NGram):
        def start(self, request: Any) -> Any:
            raise DraftError("no index today")

    policy = Watching(OFF)
    with (
        autospec.wrap(model, drafts=[Broken(), "suffix"], policy=policy) as speculator,
        pytest.warns(UserWarning, match="ngram switched off: no index today"),
    ):
        model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)
    request = speculator.last_request
    assert request is not None
    assert request.notes == "ngram switched off: no index today"
    assert all(set(context.offers) == {"suffix"} for context in policy.contexts[:-1])


class Controls(Watching):
    """Every second request is a control."""

    name = "controls"

    def __init__(self, *actions: Action) -> None:
        super().__init__(*actions)
        self.requests: list[RequestContext] = []

    def is_control(self, request: RequestContext) -> bool:
        self.requests.append(request)
        return len(self.requests) % 2 == 0


def test_a_control_is_decoded_plainly_and_recorded_as_one(model: Any) -> None:
    source = Counted()
    policy = Controls(Action("ngram", 3))
    records = []
    with autospec.wrap(model, drafts=[source], policy=policy) as speculator:
        for _ in range(4):
            model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False, segment="s")
            records.append(speculator.last_request)
            asked = len(source.asked)
    assert [record.is_control for record in records] == [False, True, False, True]
    assert [record.policy for record in records] == ["controls", "off", "controls", "off"]
    control = records[1]
    assert control.actions == {NONE: 11}
    assert control.decisions == {"none control": 11}
    assert control.policy_version is None
    assert control.num_draft_tokens == 0
    assert asked == len(source.asked)
    assert all(not context.offers or context.request is not policy.requests[1] for context in policy.contexts)
    plain = [outcome for outcome in policy.outcomes if outcome.action.reason == "control"]
    assert len(plain) == 22  # a policy learns from them what plain steps take
    assert [request.segment for request in policy.requests] == ["s"] * 4


def test_recent_acceptance_follows_the_fates() -> None:
    offers = Offers()
    text = [1, 2, 3]
    assert offers.add("ngram", Proposal([4, 5], match_length=2), 3, 1).recent_acceptance is None
    assert offers.settle(text, is_finished=False) == ()
    text += [4]
    assert offers.settle(text, is_finished=False) == ()  # the second may still come true
    text += [9]
    (settled,) = offers.settle(text, is_finished=False)
    assert (settled.num_judged_tokens, settled.num_accepted_tokens, settled.offer.match_length) == (2, 1, 2)
    assert offers.add("ngram", Proposal([7]), 5, 3).recent_acceptance == pytest.approx(0.6)
    (ended,) = offers.settle(text, is_finished=True)
    assert (ended.num_judged_tokens, ended.num_accepted_tokens) == (0, 0)
    offers.add("ngram", Proposal(), 5, 3)
    (nothing,) = offers.settle(text, is_finished=False)
    assert (nothing.offer.num_tokens, nothing.num_judged_tokens) == (0, 0)


def test_backlogs_are_what_a_source_has_not_seen(model: Any) -> None:
    assistant = Assistant(tiny.near_copy(model))
    policy = Watching(OFF, OFF, Action("assistant", 2), Action("assistant", 2), OFF)
    with autospec.wrap(model, drafts=["ngram", assistant], policy=policy):
        model.generate(tiny.prompt(20), max_new_tokens=40, do_sample=False)
    drafted_at, is_last = 0, False
    for context, outcome in zip(policy.contexts, policy.outcomes, strict=True):
        expected = 0 if is_last else context.context_tokens - drafted_at
        assert context.backlogs == {"assistant": expected}
        is_last = outcome.action.block_length > 0
        assert outcome.catch_up_tokens == (expected if is_last else 0)
        assert (outcome.catch_up_seconds > 0) == (is_last and expected > 1)
        drafted_at = context.context_tokens if is_last else drafted_at
    assert {outcome.action.block_length for outcome in policy.outcomes} >= {0, 2}


@pytest.mark.parametrize("policy", [Watching(Action("drawing", 1)), "fixed:drawing:2"], ids=["offered", "fixed"])
def test_a_retrieval_source_that_draws_is_switched_off(model: Any, policy: Any) -> None:
    """Its draft would be cut by what it drew, and sampling would no longer be the target's."""

    class Drawing(Assistant):
        name = "drawing"
        is_retrieval = True

    with (
        autospec.wrap(model, drafts=[Drawing(tiny.near_copy(model))], policy=policy, sampling="maximal") as speculator,
        pytest.warns(UserWarning, match="drawing switched off: its drafts are drawn"),
    ):
        model.generate(tiny.prompt(20), max_new_tokens=8, do_sample=True)
    assert speculator.last_request is not None
    assert speculator.last_request.num_draft_tokens == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scores", [float("nan")] * 16),
        ("scores", None),
        ("scores", [float("inf")]),
        ("match_length", -1),
        ("match_length", None),
        ("catch_up_seconds", float("nan")),
    ],
)
def test_what_a_source_says_of_its_draft_is_checked(model: Any, field: str, value: Any) -> None:
    class Odd(NGram):
        def start(self, request: Any) -> Any:
            inner = super().start(request)

            class Session:
                def propose(self, committed: Any, block_length: int) -> Proposal:
                    return replace(inner.propose(committed, block_length), **{field: value})

            return Session()

    plain = model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)
    with (
        autospec.wrap(model, drafts=[Odd()], policy=Watching(Action("ngram", 4))) as speculator,
        pytest.warns(UserWarning, match="ngram switched off: proposed"),
    ):
        output = model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)
    assert torch.equal(output, plain)
    assert speculator.last_request is not None
    assert "ngram switched off: proposed" in (speculator.last_request.notes or "")


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_a_retrieval_source_that_breaks_does_not_end_a_request(model: Any, sampling: str) -> None:
    class Breaking(NGram):
        def start(self, request: Any) -> Any:
            raise RuntimeError("broken")

    with (
        autospec.wrap(model, drafts=[Breaking(), "suffix"], policy=Watching(OFF), sampling=sampling),
        pytest.warns(UserWarning, match="ngram switched off: RuntimeError: broken"),
    ):
        model.generate(tiny.prompt(20), max_new_tokens=8, do_sample=True)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_indexing_the_prompt_is_no_part_of_drafting(model: Any, name: str) -> None:
    """Case C01."""
    policy = Watching(Action(name, 4))
    with autospec.wrap(model, drafts=[name], policy=policy):
        model.generate(tiny.prompt(200), max_new_tokens=12, do_sample=False)
    first, *later = policy.outcomes
    assert first.catch_up_seconds > 0
    assert all(outcome.catch_up_seconds == 0 for outcome in later)
    assert all(outcome.draft_seconds >= 0 for outcome in policy.outcomes)


def test_what_a_model_drafts_now_is_known_to_no_policy(model: Any) -> None:
    """Its tokens may be drawn: a choice that knew how many there are would depend on the draws."""

    class Greedy(Watching):
        def asks(self, segment: str, sources: Any) -> list[str]:
            return ["assistant", "ngram", "ngram", "nothing"]

    policy = Greedy(Action("assistant", 2))
    drafts = [NGram(), Suffix(), Assistant(tiny.near_copy(model))]
    with autospec.wrap(model, drafts=drafts, policy=policy):
        model.generate(tiny.prompt(20), max_new_tokens=12, do_sample=True)
    assert policy.contexts
    assert all(set(context.offers) <= {"ngram"} for context in policy.contexts)
    assert any(context.offers for context in policy.contexts)
