"""Blocks that end where the draft is unsure of itself: when they do, what is learnt of it, and that nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import autospec
from autospec.certify import certify
from autospec.certify.cases import POLICIES, _policies
from autospec.certify.certifier import BOUND
from autospec.certify.synthetic import SyntheticModel, random_table
from autospec.drafts import Assistant, EarlyExit
from autospec.drafts.base import Proposal, checked
from autospec.drafts.drawing import Drawing, confidence
from autospec.errors import DraftError
from autospec.policies import Goodput
from autospec.policies.stopping import MarginalStop
from autospec.types import Action, BlockContext, BlockOutcome, RequestContext

SURE, UNSURE = (0.9, 0.3), (0.1, 2.5)  # margin and entropy
RIGHT_IF_SURE, RIGHT_IF_UNSURE = 0.95, 0.25
REQUEST = RequestContext("s", 50, 1000, do_sample=False, sources=("assistant",))


def stop(rates: list[float], draft: list[float], verify: list[float], rate: float = 1.0) -> MarginalStop:
    return MarginalStop(rates, lambda position, margin, entropy: margin, draft, verify, rate)


class TestMarginalStop:
    def test_a_position_worth_less_than_its_seconds_ends_the_block(self) -> None:
        block = stop([0.6] * 3, [0.0, 0.3, 0.6, 0.9], [1.0] * 4)
        assert not block.ends(0.9, 0.0)
        assert block.wants_more()  # 0.9 x 0.6 for 0.3 seconds
        assert not block.ends(0.5, 0.0)
        assert not block.wants_more()  # 0.9 x 0.5 x 0.6 for 0.3 seconds

    def test_looking_is_paid_for_and_then_costs_nothing(self) -> None:
        block = stop([0.6], [0.0, 0.3], [1.0, 1.1])
        assert not replaced(block).ends(0.2, 0.0)  # less than the 0.3 seconds that were spent, more than 0.1
        assert replaced(block).ends(0.05, 0.0)

    def test_a_step_of_the_device_is_looked_over(self) -> None:
        """The second token costs as much as a plain step, those after it nothing: one alone is not worth it."""
        draft, verify = [0.0] * 4, [1.0, 1.8, 1.8, 1.8]
        assert not stop([0.7, 0.7, 0.7], draft, verify).ends(0.7, 0.0)
        assert stop([0.7, 0.1, 0.1], draft, verify).ends(0.7, 0.0)

    def test_it_ends_where_nothing_is_known(self) -> None:
        block = stop([0.9], [0.0, 0.1], [1.0, 1.0])
        assert not block.ends(0.9, 0.0)
        assert not block.wants_more()
        assert block.ends(1.0, 0.0)

    def test_without_a_price_of_time_it_only_looks(self) -> None:
        block = stop([0.1] * 2, [0.0, 9.0, 18.0], [1.0] * 3, rate=0.0)
        assert [block.ends(0.0, 9.0), block.wants_more(), block.ends(0.0, 9.0)] == [False, True, False]


def replaced(block: MarginalStop) -> MarginalStop:
    return MarginalStop(block._rates, block._confident, block._draft, block._verify, block._rate)


@dataclass(frozen=True)
class Costs:
    """A device on which each further token costs a quarter of a plain step to verify."""

    block_lengths: tuple[int, ...] = (1, 2, 4, 8, 16)
    version: int = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 0.040 + 0.010 * (num_tokens - 1)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 0.002 * block_length

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


def live(policy: Any, blocks: int, seed: int, *, is_stoppable: bool) -> tuple[float, list[BlockOutcome]]:
    """Tokens per second where half of the positions are sure ones, and what happened."""
    rng = np.random.default_rng(seed)
    outcomes, tokens, seconds = [], 0, 0.0
    for number in range(blocks):
        stoppable, place = frozenset(["assistant"] * is_stoppable), number % 500
        context = BlockContext(REQUEST, 100 + place, 50 + place, ("assistant",), stoppable=stoppable)
        action = policy.choose(context)
        rule, drafted, looked = action.stop, 0, []
        sure = rng.random(action.block_length + 1) < 0.5
        while drafted < action.block_length:
            if rule is not None:
                looked.append(SURE if sure[drafted] else UNSURE)
                if rule.ends(*looked[-1]):
                    break
            drafted += 1
            if rule is not None and not rule.wants_more():
                break
        right = rng.random(drafted) < np.where(sure[:drafted], RIGHT_IF_SURE, RIGHT_IF_UNSURE)
        accepted = int(np.cumprod(right).sum())
        outcome = BlockOutcome(
            "s",
            action,
            context.context_tokens,
            drafted,
            min(drafted, accepted + 1),
            accepted,
            accepted + 1,
            request=REQUEST,
            confidences=tuple(looked),
        )
        policy.observe(outcome)
        outcomes.append(outcome)
        tokens += accepted + 1
        seconds += Costs().verify_seconds(drafted + 1, 0) + Costs().draft_seconds("", outcome.num_draft_steps, 0)
    return tokens / seconds, outcomes


class TestGoodputWithAStop:
    @pytest.mark.parametrize("seed", range(3))
    def test_confidence_is_worth_tokens(self, seed: int) -> None:
        with_stop, outcomes = live(Goodput(Costs()), 1500, seed, is_stoppable=True)
        without, _ = live(Goodput(Costs()), 1500, seed, is_stoppable=False)
        assert with_stop > 1.06 * without
        lengths = [o.num_draft_tokens for o in outcomes[300:]]
        assert min(lengths) == 0
        assert max(lengths) == 4

    @pytest.mark.parametrize("seed", range(3))
    def test_ending_blocks_does_not_bias_what_is_thought_of_the_draft(self, seed: int) -> None:
        """The positions that are judged are the sure ones; all of them together are right in 60 % of the cases."""
        policy = Goodput(Costs())
        _, outcomes = live(policy, 3000, seed, is_stoppable=True)
        judged = sum(o.num_judged_tokens for o in outcomes[500:])
        naive = sum(o.num_accepted_tokens for o in outcomes[500:]) / judged
        truth = (RIGHT_IF_SURE + RIGHT_IF_UNSURE) / 2
        first = policy._acceptance.rates("s", "assistant", 1)[0]
        assert naive > truth + 0.15  # what counting the judged ones alone would say
        assert first == pytest.approx(truth, abs=0.07)

    def test_confidence_is_calibrated(self) -> None:
        policy = Goodput(Costs())
        live(policy, 2000, 0, is_stoppable=True)
        confident = policy._acceptance.confident("s", "assistant", 0.0, 2000, 2)
        assert confident(0, *SURE) == pytest.approx(RIGHT_IF_SURE, abs=0.07)
        assert confident(0, *UNSURE) == pytest.approx(RIGHT_IF_UNSURE, abs=0.1)

    def test_a_trial_is_not_cut_short(self) -> None:
        policy = Goodput(Costs(), acceptance={"prior_acceptance": 0.05}, optimism=6.0)
        context = BlockContext(REQUEST, 100, 50, ("assistant",), stoppable=frozenset({"assistant"}))
        action = policy.choose(context)
        assert action.reason_kind == "explore"
        assert action.stop is not None
        assert not action.stop.ends(*UNSURE)

    def test_state_survives_and_goes_on(self) -> None:
        one, other = Goodput(Costs()), Goodput(Costs())
        live(one, 300, 0, is_stoppable=True)
        other.restore(one.state())
        pairs = zip(live(one, 100, 1, is_stoppable=True)[1], live(other, 100, 1, is_stoppable=True)[1], strict=True)
        assert all(a.action == replace(b.action, gain=a.action.gain) for a, b in pairs)
        assert all(a.num_draft_tokens == b.num_draft_tokens for a, b in pairs)


class Recording:
    """Notes what it is asked, and ends as it is told to."""

    def __init__(self, ends_at: int = 99, wants: int = 99) -> None:
        self.ends_at, self.wants = ends_at, wants
        self.asked: list[tuple[float, float]] = []

    def wants_more(self) -> bool:
        return len(self.asked) < self.wants

    def ends(self, margin: float, entropy: float) -> bool:
        self.asked.append((margin, entropy))
        return len(self.asked) > self.ends_at


class Always:
    """One action, with a new stop for each block."""

    name = "always"

    def __init__(self, make: Any, source: str = "assistant", block_length: int = 5) -> None:
        self._make, self._source, self._block_length = make, source, block_length
        self.stops: list[Any] = []
        self.outcomes: list[BlockOutcome] = []

    def choose(self, context: BlockContext) -> Action:
        assert context.stoppable == {self._source}
        self.stops.append(self._make())
        return Action(self._source, self._block_length, stop=self.stops[-1])

    def observe(self, outcome: BlockOutcome) -> None:
        self.outcomes.append(outcome)


class TestLive:
    @pytest.mark.parametrize("source", [lambda: Assistant(tiny.llama(seed=1)), lambda: EarlyExit(1)])
    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    def test_blocks_end_as_the_stop_says(self, source: Any, do_sample: bool, sampling: str) -> None:
        model, draft = tiny.llama(), source()
        prompt = torch.arange(5)[None]
        torch.manual_seed(0)
        plain = model.generate(prompt, max_new_tokens=24, do_sample=do_sample)
        policy = Always(lambda: Recording(ends_at=2), draft.name)
        with autospec.wrap(model, drafts=[draft], policy=policy, sampling=sampling):
            torch.manual_seed(0)
            found = model.generate(prompt, max_new_tokens=24, do_sample=do_sample)
        if sampling == "paired" or not do_sample:
            assert found.tolist() == plain.tolist()
        whole = [o for o in policy.outcomes if o.action.block_length == 5]
        assert whole
        assert {(o.num_draft_tokens, o.num_draft_steps) for o in whole} == {(2, 3)}
        assert [list(o.confidences) for o in policy.outcomes] == [each.asked for each in policy.stops]

    def test_no_forward_for_a_position_that_is_not_wanted(self) -> None:
        model, draft = tiny.llama(), tiny.llama(seed=1)
        forwards = []
        draft.register_forward_hook(lambda *_: forwards.append(1))
        policy = Always(lambda: Recording(wants=2))
        with autospec.wrap(model, drafts=[Assistant(draft)], policy=policy):
            forwards.clear()
            model.generate(torch.arange(5)[None], max_new_tokens=24, do_sample=False)
        whole = [o for o in policy.outcomes if o.action.block_length == 5]
        assert {(o.num_draft_tokens, o.num_draft_steps) for o in whole} == {(2, 2)}
        catch_ups = 1  # the prompt
        assert len(forwards) == sum(o.num_draft_steps for o in policy.outcomes) + catch_ups

    def test_auto_with_an_assistant_says_what_generate_says(self) -> None:
        model = tiny.llama()
        prompt = torch.arange(6)[None]
        plain = model.generate(prompt, max_new_tokens=60, do_sample=False)
        policy = Goodput(Costs())
        with autospec.wrap(model, drafts=[Assistant(tiny.llama())], policy=policy):
            found = model.generate(prompt, max_new_tokens=60, do_sample=False)
        assert found.tolist() == plain.tolist()
        assert policy._acceptance._confidence["assistant"]._weights != [0.0] * 7

    def test_a_stop_that_raises_switches_the_draft_off(self) -> None:
        class Broken(Recording):
            def ends(self, margin: float, entropy: float) -> bool:
                raise ValueError("of the stop")

        model, prompt = tiny.llama(), torch.arange(5)[None]
        plain = model.generate(prompt, max_new_tokens=24, do_sample=False)
        with (
            autospec.wrap(model, drafts=[Assistant(tiny.llama(seed=1))], policy=Always(Broken)),
            pytest.warns(UserWarning, match="of the stop"),
        ):
            assert model.generate(prompt, max_new_tokens=24, do_sample=False).tolist() == plain.tolist()


def test_the_stop_is_asked_before_a_token_is_drawn() -> None:
    from test_drafts import request

    drawn: list[int] = []

    class Watching(Recording):
        def ends(self, margin: float, entropy: float) -> bool:
            seen.append(len(drawing.tokens))
            return super().ends(margin, entropy)

    seen: list[int] = []
    drawing = Drawing(request(), [1, 2], is_greedy=True, stop=Watching(ends_at=2))
    rng = torch.Generator().manual_seed(0)
    while drawing.draw(torch.randn((1, tiny.VOCAB), generator=rng)):
        drawn.append(drawing.tokens[-1])
    assert seen == [0, 1, 2]
    assert drawing.tokens == drawn
    assert len(drawing.proposal(0.0).confidences) == 3


def test_margin_and_entropy() -> None:
    margin, entropy = confidence(torch.log(torch.tensor([0.5, 0.25, 0.25])))
    assert margin == pytest.approx(0.25)
    assert entropy == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(4))
    assert confidence(torch.tensor([3.0])) == (pytest.approx(1.0), pytest.approx(0.0))


@pytest.mark.parametrize(
    "confidences", ["none", [(0.1,)], [(0.1, float("nan"))], [(0.1, 1)], [(0.5, 1.0)] * 3, [[0.5, 1.0]]]
)
def test_confidences_that_cannot_be_are_refused(confidences: Any) -> None:
    with pytest.raises(DraftError, match="confidences"):
        checked(Proposal([1], confidences=confidences), 4, 8)


# --- exactness ---


def test_every_branch_is_exact() -> None:
    for certificate in certify(_policies(max_new_tokens=4, vocab_size=3, only=("stopping", "goodput"))):
        assert certificate.total_variation <= BOUND


class Trimming:
    """Ends the block by what was drawn: the trap that non-anticipation is about."""

    name = "assistant"
    takes_stop = True

    def __init__(self) -> None:
        self._inner = Assistant(SyntheticModel(random_table(42, 3), 3))

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Any:
        self._session = self._inner.start(request)
        return self

    def propose(self, committed: Any, block_length: int, stop: Any = None) -> Proposal:
        made: Proposal = self._session.propose(committed, block_length)
        if made.tokens[-1] != 2 or made.draft_probs is None:
            return made
        return replace(made, tokens=made.tokens[:-1], draft_probs=made.draft_probs[:-1])


def test_a_stop_that_looks_at_what_was_drawn_is_found() -> None:
    case = next(c for c in _policies(max_new_tokens=4, vocab_size=3, only=("stopping",)) if "maximal" in c.name)
    faulty = replace(case, sources=lambda: {"assistant": Trimming()}, policy=POLICIES["stopping"])
    assert next(certify([faulty])).total_variation > 1e3 * BOUND
