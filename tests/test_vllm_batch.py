"""The batch of an engine, driven as vLLM drives it: what is counted is what really happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from autospec.controller import Controller
from autospec.costs.batches import BatchCosts
from autospec.drafts import NGram, Proposal, Suffix
from autospec.drafts.base import DraftRequest
from autospec.integrations.vllm.batch import AWAY_SECONDS, REST_SECONDS, Batch, Limits
from autospec.integrations.vllm.served import Served
from autospec.policies.base import Policy
from autospec.policies.fixed import Fixed
from autospec.policies.registry import make_policy
from autospec.randomness import TorchRandomness
from autospec.types import Action, BlockContext, BlockOutcome
from tests.vllm_driver import END, MAX_MODEL_LEN, VOCAB_SIZE, Asked, Engine, cycle, scramble

CPU = torch.device("cpu")


def draft_request(segment: str) -> DraftRequest:
    return DraftRequest(
        CPU, VOCAB_SIZE, False, LogitsProcessorList(), TorchRandomness(CPU), torch.float32, False, segment
    )


def by_chance(seed: int) -> Callable[[list[int]], int]:
    """A text in which retrieval finds something to draft, and gets it wrong."""
    return lambda text: random.Random(1000 * seed + len(text)).randrange(10, 50)


class Harness:
    """A batch with an engine around it, and a clock that the engine moves."""

    def __init__(self, policy: str | Policy = "fixed:ngram:4", *, control_share: float | None = None, **engine: Any):
        self.now = 0.0
        self.step_seconds: Callable[[int], float] = lambda num_tokens: 0.05 + 0.001 * num_tokens
        sources = {"ngram": NGram(), "suffix": Suffix()}
        self.costs = BatchCosts((1, 2, 4, 8), sources)
        self.policy = make_policy(policy, sources, lambda: self.costs)
        self.ended: list[Served] = []
        self.batch = Batch(
            Limits(num_speculative_tokens=8, max_model_len=MAX_MODEL_LEN, end_tokens=frozenset({END})),
            sources,
            Controller(self.policy, control_share),
            self.costs,
            segment_of=lambda prompt, sampling: f"s{prompt[0]}",
            draft_request_of=draft_request,
            finish=self.ended.append,
            trace=1.0,
            clock=lambda: self.now,
        )
        self.engine = Engine(self.propose, tick=self.tick, **engine)

    def propose(self, sampled: Any, lengths: Any, token_ids: Any, slot_mappings: Any) -> list[list[int]]:
        return self.batch.step(sampled, lengths, token_ids, len(slot_mappings["layer.0"]))

    def tick(self, num_tokens: int) -> None:
        self.now += self.step_seconds(num_tokens)

    def finish(self) -> None:
        self.engine.run()
        self.batch.close()

    def of(self, asked: Asked) -> Served:
        (found,) = [each for each in self.ended if each.history.text[: len(asked.prompt)] == asked.prompt]
        return found


def agrees(served: Served, asked: Asked) -> None:
    """Counts of a request that ended by its end token, or whose last block fitted."""
    assert served.answer[: len(asked.output)] == asked.output
    tally = served.tally
    assert tally.blocks == asked.num_steps
    assert tally.num_accepted_tokens <= asked.num_accepted
    assert 1 + sum(length * blocks for length, blocks in tally.acceptance_lengths.items()) == served.output_tokens


def test_a_request_alone_is_counted_as_it_was() -> None:
    harness = Harness()
    asked = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=21)
    harness.engine.add(asked)
    harness.finish()
    served = harness.of(asked)
    agrees(served, asked)
    assert served.request.segment == "s1"
    assert served.request.prompt_tokens == 5
    assert served.tally.num_accepted_tokens == served.tally.num_judged_tokens == asked.num_verified == 16
    assert served.tally.acceptance_lengths == {5: 4}
    assert served.tally.actions == {"ngram:4": 4}


def test_drafts_that_are_wrong_are_judged_once_each() -> None:
    harness = Harness()
    asked = Asked("a", [11, 12, 13, 11, 12, 13], scramble(3), max_tokens=40)
    harness.engine.add(asked)
    harness.finish()
    served = harness.of(asked)
    agrees(served, asked)
    assert served.tally.num_judged_tokens == asked.num_verified
    assert served.tally.num_accepted_tokens == asked.num_accepted < asked.num_verified


def test_rows_move_and_each_request_keeps_its_counts() -> None:
    """Requests of different lengths leave at different times, and the last row is moved into the hole."""
    harness = Harness(chunk=7)
    chance = random.Random(5)
    asked = []
    for number in range(30):
        prompt = [20 + number, *(chance.randrange(10, 50) for _ in range(chance.randrange(3, 30)))]
        told = cycle(*chance.sample(range(10, 50), 4)) if number % 2 else scramble(number)
        asked.append(Asked(str(number), prompt, told, max_tokens=chance.randrange(5, 60)))
    harness.engine.add(*asked)
    while harness.engine.rows or harness.engine.waiting:
        harness.engine.step()
        if len(harness.engine.rows) > 2 and chance.random() < 0.3:
            harness.engine.swap(*chance.sample(range(len(harness.engine.rows)), 2))
        if harness.engine.rows and chance.random() < 0.1:
            # one that is read again in the very next step, in the same row, is as if it had stayed
            candidates = [each for each in harness.engine.rows if not each.is_done and len(each.text) > 7]
            if candidates:
                harness.engine.preempt(chance.choice(candidates))
    harness.batch.close()
    assert len(harness.ended) == 30
    for each in asked:
        served = harness.of(each)
        assert served.answer[: len(each.output)] == each.output
        assert served.tally.num_accepted_tokens == each.num_accepted
        assert served.tally.num_judged_tokens == each.num_verified
        assert served.tally.blocks == each.num_steps


def test_another_request_in_the_row_is_another_request() -> None:
    """The same row, the same length, the same last tokens: the text before them differs, so it is a new one."""
    harness = Harness(max_num_seqs=1)
    first = Asked("a", [1, 2, 3, 4, 1, 2], cycle(1, 2, 3, 4), max_tokens=6)
    harness.engine.add(first)
    while not first.is_done:
        harness.engine.step()
    served = harness.batch._rows[0]
    assert served is not None
    text = served.history.text
    second = Asked("b", [9, *text[1:]], cycle(1, 2, 3, 4), max_tokens=4)
    harness.engine.add(second)
    blocks = served.tally.blocks
    harness.finish()
    assert len(harness.ended) == 2
    assert served.tally.blocks == blocks
    other = next(each for each in harness.ended if each is not served)
    assert other.request.prompt_tokens == len(text)
    assert other.answer[:4] == second.output


def test_requests_with_the_same_text_are_not_judged_when_rows_move() -> None:
    harness = Harness()
    twins = [Asked(str(i), [1, 2, 3, 1], cycle(1, 2, 3), max_tokens=30) for i in range(3)]
    other = Asked("other", [9, 8, 9, 8, 9], cycle(8, 9), max_tokens=3)
    harness.engine.add(other, *twins)
    while not other.is_done:
        harness.engine.step()
    served = [each for each in harness.batch._rows if each and each.request.segment == "s1"]
    before = [each.tally.blocks for each in served]
    assert min(before) > 0  # as long as nothing moves, they are known by their rows
    harness.engine.step()  # `other` leaves, and a twin takes its row
    assert [each.tally.blocks for each in served] == before
    harness.engine.step()
    assert [each.tally.blocks for each in served] == [blocks + 1 for blocks in before]
    harness.finish()
    assert all(each in harness.ended and each.output_tokens >= 30 for each in served)


def test_the_end_of_an_answer_is_seen_and_nothing_behind_it_counts() -> None:
    harness = Harness()
    asked = Asked("a", [1, 2, END, 3, 1, 2], lambda text: {1: 2, 2: END, END: 3, 3: 1}[text[-1]], max_tokens=50)
    harness.engine.add(asked)
    harness.engine.run()
    assert asked.output[-1] == END
    other = Asked("b", [5, 5], scramble(1), max_tokens=2)
    harness.engine.add(other)
    harness.engine.step()  # the first has left its row
    (served,) = harness.ended
    assert served.answer == asked.output
    tally = served.tally
    assert 1 + sum(length * blocks for length, blocks in tally.acceptance_lengths.items()) == len(asked.output)


def test_a_request_that_ignores_ends_goes_on() -> None:
    harness = Harness()
    asked = Asked("a", [1, 2, END, 3, 1, 2], lambda text: {1: 2, 2: END, END: 3, 3: 1}[text[-1]], max_tokens=30)
    asked.ignores_end = True
    harness.engine.add(asked)
    harness.finish()
    served = harness.of(asked)
    agrees(served, asked)
    assert served.ignores_end
    assert served.tally.num_accepted_tokens == asked.num_accepted


def test_drafts_that_the_engine_cut_are_not_judged_as_refused() -> None:
    harness = Harness()
    asked = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=40)
    harness.engine.add(asked)
    harness.engine.most_drafts = 2
    harness.finish()
    served = harness.of(asked)
    agrees(served, asked)
    assert served.tally.num_accepted_tokens == served.tally.num_judged_tokens == asked.num_accepted


def test_a_preempted_request_is_the_same_when_it_comes_back_and_another_when_it_is_too_late() -> None:
    harness = Harness(max_num_seqs=1)
    asked = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=60)
    harness.engine.add(asked)
    for _ in range(4):
        harness.engine.step()
    other = Asked("b", [9, 8, 9], cycle(8, 9), max_tokens=4)
    harness.engine.preempt(asked)
    harness.engine.waiting.insert(0, other)
    while not other.is_done:
        harness.engine.step()
    harness.batch.sweep()
    assert harness.ended == []
    harness.finish()
    assert len(harness.ended) == 2
    assert harness.of(asked).answer[: len(asked.output)] == asked.output
    late = Harness(max_num_seqs=1)
    again = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=60)
    late.engine.add(again)
    for _ in range(4):
        late.engine.step()
    late.engine.preempt(again)
    late.engine.waiting.insert(0, Asked("b", [9, 8, 9], cycle(8, 9), max_tokens=40))
    late.engine.step()
    late.now += AWAY_SECONDS + 1.0
    late.batch.sweep()
    assert len(late.ended) == 1


def test_steps_without_a_call_belong_to_no_block_and_split_no_request() -> None:
    """Where one request is near the longest that there may be, vLLM asks for no drafts of any of them."""
    harness = Harness()
    near = Asked("near", [1] + [1, 2, 3, 4] * 20, cycle(1, 2, 3, 4), max_tokens=36)
    others = [Asked(str(i), [30 + i, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=120) for i in range(2)]
    harness.engine.asks_below = 120
    harness.batch._limits = Limits(num_speculative_tokens=8, max_model_len=120, end_tokens=frozenset({END}))
    harness.engine.add(near, *others)
    while not near.is_done:
        harness.engine.step()
    harness.engine.asks_below = MAX_MODEL_LEN
    harness.finish()
    assert len(harness.ended) == 3
    for asked in others:
        served = harness.of(asked)
        assert served.num_outside > 0
        assert served.answer[: len(asked.output)] == asked.output
        assert served.tally.num_judged_tokens == served.tally.num_accepted_tokens
        assert (
            1 + served.num_outside + sum(length * blocks for length, blocks in served.tally.acceptance_lengths.items())
            == served.output_tokens
        )


class Failing(NGram):
    """A source that fails at its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def start(self, request: DraftRequest) -> Any:
        session = super().start(request)
        source = self

        class Session:
            def propose(self, committed: Any, block_length: int) -> Proposal:
                source.calls += 1
                if source.calls == 3:
                    raise RuntimeError("planted")
                return session.propose(committed, block_length)

        return Session()


def test_a_source_that_fails_is_off_for_that_request_alone() -> None:
    harness = Harness()
    harness.batch._sources["ngram"] = Failing()
    first = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=30)
    second = Asked("b", [2, 2, 3, 4, 2], cycle(2, 3, 4), max_tokens=30)
    harness.engine.add(first, second)
    with pytest.warns(UserWarning, match="ngram switched off: RuntimeError: planted"):
        harness.finish()
    notes = sorted(each.tally.notes for each in harness.ended)
    assert [len(each) for each in notes] == [0, 1]
    for asked in (first, second):
        assert harness.of(asked).answer[: len(asked.output)] == asked.output


class Watching:
    """Asks for four tokens of ngram, and keeps what it learned."""

    name = "watching"

    def __init__(self) -> None:
        self.outcomes: list[BlockOutcome] = []

    def choose(self, context: BlockContext) -> Action:
        return Action("ngram", 4, "watching")

    def observe(self, outcome: BlockOutcome) -> None:
        self.outcomes.append(outcome)


def test_seconds_that_a_policy_learns_leave_out_what_others_drafted() -> None:
    policy = Watching()
    harness = Harness(policy)
    quiet = Asked("quiet", [9, 51, 52, 53, 54, 55], lambda text: 60 + len(text), max_tokens=60)  # nothing to find
    loud = Asked("loud", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=200)
    harness.engine.add(quiet, loud)
    harness.finish()
    learned = [each for each in policy.outcomes if each.segment == "s9"][20:]
    step_of_both, both_plain = 0.05 + 0.001 * 6, 0.05 + 0.001 * 2
    for outcome in learned:
        assert outcome.num_draft_tokens == 0
        assert outcome.verify_seconds <= step_of_both * 1.01
    assert harness.of(quiet).tally.verify_seconds == pytest.approx(
        step_of_both * harness.of(quiet).tally.blocks, rel=0.05
    )
    assert both_plain < step_of_both


def test_controls_are_decoded_plainly_and_counted_as_controls() -> None:
    harness = Harness(control_share=1.0)
    asked = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=20)
    harness.engine.add(asked)
    harness.finish()
    served = harness.of(asked)
    assert served.is_control
    assert asked.num_drafted == 0
    assert served.tally.decisions == {"none control": 19}


def test_drafting_stops_where_wide_steps_are_dear() -> None:
    """A device on which a token more costs as much as a token, and drafts that are wrong: the steps show it."""
    harness = Harness("fixed:ngram:8", max_num_seqs=4)
    harness.step_seconds = lambda num_tokens: 0.01 * num_tokens
    harness.engine.add(*(Asked(str(i), [1 + i, 20, 21, 20], by_chance(i), max_tokens=400) for i in range(4)))
    harness.finish()
    outcomes = [outcome for each in harness.ended for outcome in each.tally.outcomes or []]
    drafting = [outcome for outcome in outcomes if outcome.num_draft_tokens]
    assert 0 < len(drafting) < 0.1 * len(outcomes)  # it was tried, and tried again after a while
    assert all("none off" in each.tally.decisions for each in harness.ended)


def test_auto_drafts_for_one_request_and_not_for_many_on_a_device_that_saturates() -> None:
    """Up to eight tokens cost as one, and each further one as much as a whole step of one."""
    saturating: Callable[[int], float] = lambda num_tokens: 0.02 * max(1.0, num_tokens / 8.0)  # noqa: E731
    alone = Harness("auto", control_share=0.0)
    alone.step_seconds = saturating
    alone.engine.add(Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=300))
    alone.finish()
    many = Harness("auto", control_share=0.0, max_num_seqs=8)
    many.step_seconds = saturating
    many.engine.add(*(Asked(str(i), [1 + i, 20, 21, 20], scramble(i), max_tokens=400) for i in range(8)))
    many.finish()

    def rate(harness: Harness) -> float:
        late = [outcome for each in harness.ended for outcome in (each.tally.outcomes or [])[-100:]]
        return sum(outcome.num_draft_tokens for outcome in late) / len(late)

    assert rate(alone) > 3.0
    assert rate(many) < 0.3


def test_a_fixed_policy_needs_no_costs_and_off_drafts_nothing() -> None:
    harness = Harness(Fixed())
    asked = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=20)
    harness.engine.add(asked)
    harness.finish()
    assert asked.num_drafted == 0
    assert harness.of(asked).tally.actions == {"none": 19}


def test_where_it_is_off_rows_are_followed_without_being_looked_at_and_counted_all_the_same() -> None:
    harness = Harness("fixed:ngram:8", max_num_seqs=4)
    harness.step_seconds = lambda num_tokens: 0.01 * num_tokens
    chance = random.Random(7)
    asked = [
        Asked(
            str(i), [100 + i, 20, 21, 20, chance.randrange(10, 50)], scramble(i), max_tokens=chance.randrange(30, 300)
        )
        for i in range(24)
    ]
    asked[5].next_token = lambda text: END if len(text) > 150 else scramble(5)(text)
    quiet = []
    harness.engine.add(*asked)
    while harness.engine.rows or harness.engine.waiting:
        harness.engine.step()
        quiet.append(harness.batch._quiet is not None and harness.batch._quiet.num_steps > 0)
        if len(harness.engine.rows) == 4 and chance.random() < 0.02:
            harness.engine.swap(*chance.sample(range(4), 2))
    harness.batch.close()
    assert sum(quiet) > 0.5 * len(quiet)
    assert len(harness.ended) == 24
    for each in asked:
        served = harness.of(each)
        agrees(served, each)
        assert served.tally.num_accepted_tokens == each.num_accepted
        assert [outcome.context_tokens for outcome in served.tally.outcomes or []] == sorted(
            {outcome.context_tokens for outcome in served.tally.outcomes or []}
        )


def test_what_the_engine_cut_of_the_only_drafts_is_known_to_be_cut() -> None:
    """So what was refused of the others is judged: without it, all that is judged would be accepted."""
    harness = Harness()
    harness.engine.most_drafts = 2
    asked = Asked("a", [11, 12, 13, 11, 12, 13], scramble(3), max_tokens=60)
    harness.engine.add(asked)
    harness.finish()
    tally = harness.of(asked).tally
    assert tally.num_judged_tokens == asked.num_verified > asked.num_accepted
    assert tally.num_accepted_tokens == asked.num_accepted


def test_where_it_is_not_known_whose_drafts_were_cut_nobody_looks_better_for_it() -> None:
    policy = Watching()
    harness = Harness(policy)
    cut = Asked("cut", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=60, most_drafts=0)
    broken = lambda text: (cycle(11, 12, 13) if len(text) % 3 else scramble(3))(text)  # noqa: E731
    other = Asked("other", [11, 12, 13, 11, 12, 13], broken, max_tokens=200)
    harness.engine.add(cut, other)
    while not cut.is_done:
        harness.engine.step()
    served = harness.batch._rows[1]
    assert served.num_outside > 20
    assert served.output_tokens == 1 + served.num_outside + served.tally.num_committed_tokens
    accepted, verified = other.num_accepted, other.num_verified
    assert served.tally.num_judged_tokens == 0 < accepted < verified
    harness.finish()
    assert served.tally.num_accepted_tokens == other.num_accepted - accepted
    assert served.tally.num_judged_tokens == other.num_verified - verified
    learned = [each for each in policy.outcomes if each.segment == "s11"]
    assert sum(each.num_judged_tokens for each in learned) == served.tally.num_judged_tokens


def test_drafting_stops_also_where_the_engine_cuts_drafts() -> None:
    harness = Harness("fixed:ngram:8", max_num_seqs=4)
    harness.step_seconds = lambda num_tokens: 0.01 * num_tokens
    harness.engine.most_drafts = 3
    asked = [Asked(str(i), [1 + i, 20, 21, 20], by_chance(i), max_tokens=400) for i in range(4)]
    harness.engine.add(*asked)
    harness.engine.run(150)
    drafted = sum(each.num_drafted for each in asked)
    harness.finish()
    assert drafted > 20
    assert sum(each.num_drafted for each in asked) < 0.2 * sum(each.num_steps for each in asked)  # tried a few times
    points = harness.costs.points(is_sampled=True)  # as nothing is known of it
    assert max(tokens for tokens, _ in points) > 8
    for tokens, seconds in points:
        assert seconds == pytest.approx(0.01 * tokens, rel=0.02)


def test_drafts_are_no_longer_than_the_engine_wants_them() -> None:
    harness = Harness()
    harness.engine.propose = lambda sampled, lengths, token_ids, slot_mappings: harness.batch.step(
        sampled, lengths, token_ids, len(slot_mappings["layer.0"]), 2
    )
    asked = Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=22)
    harness.engine.add(asked)
    harness.finish()
    tally = harness.of(asked).tally
    assert tally.acceptance_lengths == {3: 7}
    assert tally.num_draft_tokens == tally.num_judged_tokens == asked.num_drafted - 2 == 14


def test_of_the_last_block_only_what_is_certain_is_output() -> None:
    """Whatever lies behind an end that is not seen would make drafting look faster than it is."""
    harness = Harness()
    silent = Asked("silent", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=14)
    ending = Asked("ending", [11, 12, 13, END, 11], cycle(11, 12, 13, END), max_tokens=50)
    harness.engine.add(silent, ending)
    harness.finish()
    served = harness.of(silent)
    assert served.output_tokens == 1 + 5 + 5 + 5
    assert served.num_sure_tokens == 1 + 5 + 5 + 1 <= len(silent.output)
    assert harness.of(ending).num_sure_tokens == harness.of(ending).output_tokens == len(ending.output)


def test_the_last_requests_end_while_the_engine_rests() -> None:
    harness = Harness()
    asked = [Asked(str(i), [30 + i, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=20 + i) for i in range(3)]
    harness.engine.add(*asked)
    harness.engine.run()
    last = harness.now
    harness.now += REST_SECONDS / 2.0  # it may be a step
    harness.batch.sweep()
    assert len(harness.ended) < 3
    harness.now += REST_SECONDS
    harness.batch.sweep()
    assert len(harness.ended) == 3
    assert max(each.last_seen for each in harness.ended) <= last
    again = Asked("again", [40, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=20)
    harness.engine.add(again)
    harness.finish()
    assert len(harness.ended) == 4
    assert harness.of(again).tally.num_accepted_tokens == again.num_accepted


def test_rest_is_no_part_of_a_request_that_was_only_followed() -> None:
    harness = Harness(Fixed(), max_num_seqs=2)
    asked = [Asked(str(i), [30 + i, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=200) for i in range(4)]
    harness.engine.add(*asked[:2])
    harness.engine.run()
    first = harness.now
    harness.now += 3600.0
    harness.engine.add(*asked[2:])
    harness.engine.run()
    second = harness.now
    harness.now += 3600.0
    assert harness.batch._quiet is not None
    harness.batch.close()
    assert sorted(each.last_seen for each in harness.ended) == [first, first, second, second]
    assert all(each.tally.blocks == 199 for each in harness.ended)


class FailingNow(Watching):
    """Fails at some of its choices."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers, self.calls = numbers, 0

    def choose(self, context: BlockContext) -> Action:
        self.calls += 1
        if self.calls in self.numbers:
            raise RuntimeError("planted")
        return super().choose(context)


def test_a_step_that_fails_splits_no_request() -> None:
    """It has committed tokens all the same: they belong to no block, and to the request that they are of."""
    harness = Harness(FailingNow(9, 10, 20))

    def propose(*args: Any, **named: Any) -> list[list[int]]:
        try:
            return harness.propose(*args, **named)
        except RuntimeError:
            harness.batch.forget()
            return [[] for _ in args[0]]

    harness.engine.propose = propose
    asked = [Asked(str(i), [30 + i, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=60 + i) for i in range(3)]
    harness.engine.add(*asked)
    harness.finish()
    assert len(harness.ended) == 3
    for each in asked:
        served = harness.of(each)
        assert served.request.prompt_tokens == 6
        assert served.answer[: len(each.output)] == each.output
        assert served.output_tokens == 1 + served.num_outside + served.tally.num_committed_tokens
        assert served.tally.num_accepted_tokens == each.num_accepted
    assert sum(each.num_outside for each in harness.ended) > 0


def test_drafts_that_follow_plain_steps_may_reach_the_end_too() -> None:
    """The longest request drafts again just before vLLM asks for no more: the other one is not split by that."""
    harness = Harness("fixed:ngram:8")
    harness.batch._limits = Limits(num_speculative_tokens=8, max_model_len=64, end_tokens=frozenset({END}))
    harness.engine.asks_below = 64
    harness.batch._switch.is_on = lambda num_requests: harness.engine.calls >= 11  # type: ignore[method-assign]
    near = Asked("near", [1] + [1, 2, 3, 4] * 10, cycle(1, 2, 3, 4), max_tokens=20)
    other = Asked("other", [30, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=40)
    harness.engine.add(near, other)
    harness.finish()
    assert near.num_drafted == 8
    assert len(harness.ended) == 2
    assert harness.of(other).answer[:40] == other.output


def test_tokens_behind_an_end_are_no_gain() -> None:
    harness = Harness()
    seen: list[int] = []
    harness.batch._switch.observe = (  # type: ignore[method-assign]
        lambda kind, num_tokens, seconds, *, num_requests, was_on: seen.append(num_tokens)
    )
    asked = Asked("a", [11, 12, 13, END, 11], cycle(11, 12, 13, END), max_tokens=50)
    harness.engine.add(asked)
    harness.finish()
    assert asked.num_accepted == 4  # the end is the second of them
    assert sum(seen) == len(asked.output) - 1 == 2
    tally = harness.of(asked).tally
    assert tally.acceptance_lengths == {2: 1}
    assert tally.num_accepted_tokens == tally.num_judged_tokens == 2


def test_steps_in_which_nobody_may_draft_tell_the_switch_nothing() -> None:
    harness = Harness(control_share=1.0, max_num_seqs=2)
    seen: list[object] = []
    harness.batch._switch.is_on = lambda kind: seen.append(kind) is None  # type: ignore[method-assign]
    harness.batch._switch.observe = lambda *args, **named: seen.append(args)  # type: ignore[method-assign]
    asked = [Asked(str(i), [1 + i, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=40) for i in range(2)]
    harness.engine.add(*asked)
    harness.engine.run(20)
    assert harness.batch._quiet is not None  # they are only followed
    harness.finish()
    assert seen == []
    assert [harness.of(each).tally.decisions for each in asked] == [{"none control": 39}] * 2


def test_a_stalled_step_counts_as_a_few_of_its_width() -> None:
    harness = Harness("fixed:ngram:4")
    seen: list[float] = []
    harness.batch._switch.observe = (  # type: ignore[method-assign]
        lambda kind, num_tokens, seconds, *, num_requests, was_on: seen.append(seconds)
    )
    harness.step_seconds = lambda num_tokens: 9.0 if harness.engine.calls == 30 else 0.05
    harness.engine.add(Asked("a", [1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=200))
    harness.finish()
    assert max(seen) == pytest.approx(4 * 0.05, rel=0.05)
    assert min(seen) == pytest.approx(0.05)


def test_alone_each_segment_is_judged_by_itself() -> None:
    """Drafts of one kind of request lose, those of another gain, and they come by turns."""
    harness = Harness("fixed:ngram:8", max_num_seqs=1)
    harness.step_seconds = lambda num_tokens: 0.02 + 0.004 * num_tokens
    asked = []
    for number in range(4):
        asked.append(Asked(f"loses {number}", [100, 20, 21, 20, 10 + number], scramble(number), max_tokens=200))
        asked.append(Asked(f"gains {number}", [101, 1, 2, 3, 4, 1, number], cycle(1, 2, 3, 4), max_tokens=100))
    harness.engine.add(*asked)
    harness.finish()
    assert all(each.num_accepted > 50 for each in asked[1::2])
    assert asked[0].num_drafted > 30
    drafting = [o for each in asked[2::2] for o in harness.of(each).tally.outcomes or [] if o.num_draft_tokens]
    assert len(drafting) < 0.2 * sum(each.num_steps for each in asked[2::2])  # tried again at times


def test_a_failure_loses_no_steps_that_were_only_followed() -> None:
    harness = Harness(Fixed(), max_num_seqs=2)
    asked = [Asked(str(i), [30 + i, 1, 2, 3, 4, 1], cycle(1, 2, 3, 4), max_tokens=150) for i in range(2)]
    harness.engine.add(*asked)
    harness.engine.run(100)
    assert harness.batch._quiet is not None
    assert harness.batch._quiet.num_steps > 20
    harness.batch.forget()
    harness.engine.preempt(asked[1])
    harness.engine.max_num_seqs = 1  # it is away for a step
    harness.engine.step()
    harness.engine.max_num_seqs = 2
    harness.finish()
    assert len(harness.ended) == 2
    for each in asked:
        served = harness.of(each)
        assert served.answer == each.output
        assert served.num_outside <= 2
        assert served.tally.blocks == 149 - served.num_outside


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_what_is_counted_has_happened(seed: int) -> None:
    """Rows that move, preemption, ends, controls, and steps that fail."""
    chance = random.Random(seed)
    policy = chance.choice(["fixed:ngram:8", "fixed:suffix:3", "auto", "goodput"])
    harness = Harness(policy, control_share=chance.choice([None, 0.3]), max_num_seqs=chance.choice([1, 3, 8]), chunk=50)
    token_seconds = chance.choice([0.0005, 0.01])
    harness.step_seconds = lambda num_tokens: (0.02 + token_seconds * num_tokens) * (1.0 + 0.3 * chance.random())
    fails = seed % 2 == 1

    def propose(*args: Any, **named: Any) -> list[list[int]]:
        drafts = harness.propose(*args, **named)
        if not fails or chance.random() > 0.02:
            return drafts
        harness.batch.forget()
        return [[] for _ in args[0]]

    def ending(next_token: Callable[[list[int]], int], at: int) -> Callable[[list[int]], int]:
        return lambda text: END if len(text) >= at else next_token(text)

    harness.engine.propose = propose
    asked = []
    for number in range(20):
        prompt = [100 + number, *(chance.randrange(10, 50) for _ in range(chance.randrange(3, 30)))]
        told = cycle(*chance.sample(range(10, 50), 4)) if chance.random() < 0.4 else scramble(number)
        told = ending(told, len(prompt) + chance.randrange(1, 80)) if chance.random() < 0.4 else told
        asked.append(Asked(str(number), prompt, told, max_tokens=chance.randrange(1, 150)))
    later = asked[8:]
    harness.engine.add(*asked[:8])
    while later or harness.engine.rows or harness.engine.waiting:
        harness.engine.step()
        rows = harness.engine.rows
        if later and chance.random() < 0.1:
            harness.engine.add(later.pop())
        if len(rows) > 2 and chance.random() < 0.1:
            harness.engine.swap(*chance.sample(range(len(rows)), 2))
        going_on = [each for each in rows if not each.is_done]
        if len(going_on) > 1 and chance.random() < 0.03:
            harness.engine.preempt(chance.choice(going_on))
            waiting, harness.engine.waiting = harness.engine.waiting, []
            harness.engine.step()  # vLLM lets nobody in where it has just preempted
            harness.engine.waiting = waiting
        harness.batch.sweep()
    harness.batch.close()
    assert len(harness.ended) == len(asked)
    for each in asked:
        served = harness.of(each)
        tally = served.tally
        assert served.answer[: len(each.output)] == each.output
        assert len(each.output) - 8 <= served.num_sure_tokens
        assert served.num_sure_tokens <= len(each.output) or END in served.answer
        assert served.output_tokens == 1 + served.num_outside + tally.num_committed_tokens
        assert not served.is_control or not each.num_drafted
        if fails:
            assert tally.blocks <= each.num_steps
            assert tally.num_accepted_tokens <= each.num_accepted
        else:
            assert tally.blocks == each.num_steps
            assert tally.num_judged_tokens - tally.num_accepted_tokens <= each.num_verified - each.num_accepted
