"""Replay: the decoder's own counts without its forwards; and what `draft_bench` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

import autospec
from autospec.data import DemoPrompt
from autospec.decoding.tally import Tally
from autospec.draft_bench import ALL, bench
from autospec.drafts import Assistant, NGram, Suffix
from autospec.drafts.base import DraftRequest, Proposal
from autospec.errors import AutospecError, DraftError
from autospec.replay import Recording, Replay, record

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": SAMPLED,
    "penalised": {**SAMPLED, "repetition_penalty": 1.3},
    "ends": {"do_sample": False, "eos_token_id": list(range(1, 20))},
}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def prompts(count: int = 3) -> list[DemoPrompt]:
    texts = ["abcabcabc", "hellohello", "xyzzyxyzzyx", "qrstqrst"]
    return [
        DemoPrompt(f"p{i}", f"segment{i % 2}", ({"role": "user", "content": texts[i % 4]},), 24) for i in range(count)
    ]


def inputs(recording: Recording) -> dict[str, torch.Tensor]:
    """With a mask of its own: the prompts hold the pad token as a letter."""
    ids = torch.tensor([recording.prompt])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MAKERS: dict[str, Callable[[Any], Any]] = {
    "ngram": lambda target: NGram(min_ngram=1),
    "suffix": lambda target: Suffix(min_match=1, learns=False),
    "assistant": lambda target: Assistant(tiny.near_copy(target), tokenizer=tiny.tokenizer()),
    "assistant greedy": lambda target: Assistant(tiny.near_copy(target), tokenizer=tiny.tokenizer(), greedy=True),
    "assistant stops": lambda target: Assistant(tiny.near_copy(target), tokenizer=tiny.tokenizer(), max_entropy=3.9),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("maker", MAKERS)
def test_counts_are_those_of_the_decoder(target: Any, tokenizer: Any, maker: str, options: str) -> None:
    """Block for block: drafted, judged, accepted by position, acceptance lengths."""
    recordings = list(record(target, tokenizer, prompts(2), OPTIONS[options], seed=5))
    assert len(recordings) == 2
    total = 0
    for number, recording in enumerate(recordings):
        for block_length in (1, 5):
            source = MAKERS[maker](target)
            with autospec.wrap(
                target, tokenizer=tokenizer, drafts=[source], policy=f"fixed:{source.name}:{block_length}"
            ) as speculator:
                output = target.generate(
                    **inputs(recording),
                    **OPTIONS[options],
                    max_new_tokens=24,
                    generator=torch.Generator().manual_seed(5 + number),
                )
                live = speculator.last_request
            assert live is not None
            assert tuple(output[0, len(recording.prompt) :].tolist()) == recording.answer
            tally = Tally()
            for block in Replay(source, recording).run(block_length):
                tally.add(block)
            assert tally.num_draft_tokens == live.num_draft_tokens
            assert tally.num_judged_tokens == live.num_judged_tokens
            assert tally.num_accepted_tokens == live.num_accepted_tokens
            assert tuple(tally.at_risk) == live.at_risk
            assert tuple(tally.accepted) == live.accepted
            assert dict(tally.acceptance_lengths) == dict(live.acceptance_lengths)
            assert tally.blocks == live.blocks
            assert dict(tally.actions) == dict(live.actions)
            total += tally.num_judged_tokens
    assert total > 0 or options == "ends"


def test_answers_are_the_targets_own(target: Any, tokenizer: Any) -> None:
    for recording in record(target, tokenizer, prompts(1), {"do_sample": False}):
        plain = target.generate(**inputs(recording), do_sample=False, max_new_tokens=24)
        assert recording.answer == tuple(plain[0, len(recording.prompt) :].tolist())
        assert recording.noise == ()


def test_what_cannot_be_recorded_is_said(target: Any, tokenizer: Any) -> None:
    with (
        pytest.raises(AutospecError, match=r"cannot replay answers with .*num_beams"),
        pytest.warns(UserWarning, match="left to the original generate"),
    ):
        list(record(target, tokenizer, prompts(1), {"num_beams": 2}))


class Failing:
    """Gives up in its second block."""

    name = "failing"

    def attach(self, target: Any, tokenizer: Any) -> None:
        """Fits all."""

    def start(self, request: DraftRequest) -> Failing:
        self.calls = 0
        return self

    def propose(self, committed: Any, block_length: int) -> Proposal:
        self.calls += 1
        if self.calls > 1:
            raise DraftError("no more")
        return Proposal([committed[-1]])


class TestBench:
    def test_a_row_for_each_segment_and_all(self, target: Any, tokenizer: Any) -> None:
        recordings = list(record(target, tokenizer, prompts(4), {"do_sample": False}))
        results = list(
            bench(
                target,
                tokenizer,
                recordings,
                [NGram, lambda: Assistant(target, tokenizer=tokenizer)],
                block_lengths=(1, 4),
            )
        )
        assert [(rows[0].source, rows[0].block_length) for rows in results] == [
            ("ngram", 1),
            ("ngram", 4),
            ("assistant", 1),
            ("assistant", 4),
        ]
        for rows in results:
            assert [row.segment for row in rows] == ["segment0", "segment1", ALL]
            assert sum(len(row.blocks) for row in rows[:-1]) == len(rows[-1].blocks)
        whole = results[-1][-1]
        assert whole.acceptance_by_position == [1.0] * 4  # the target drafts for itself
        assert 4 < whole.mean_acceptance_length <= 5
        assert whole.mean_accepted_tokens == pytest.approx(whole.mean_acceptance_length - 1)
        assert whole.draft_ms > 0

    def test_memory_leaves_out_what_the_target_holds(self, target: Any, tokenizer: Any) -> None:
        recordings = list(record(target, tokenizer, prompts(1), {"do_sample": False}))
        weights = sum(p.nbytes for p in target.parameters())
        for model, low, high in ((target, 0, weights), (tiny.near_copy(target), weights, 3 * weights)):
            rows = next(
                bench(
                    target,
                    tokenizer,
                    recordings,
                    [lambda m=model: Assistant(m, tokenizer=tokenizer)],
                    block_lengths=(2,),
                )
            )  # type: ignore[misc]
            cache = 2 * 2 * 2 * 8 * 8 * len(recordings[0].answer)  # layers, keys and values, heads, width, bytes
            assert low + cache < rows[-1].memory_bytes < high

    def test_the_pool_of_suffix_starts_empty_for_each_block_length(self, target: Any, tokenizer: Any) -> None:
        recordings = list(record(target, tokenizer, prompts(2), {"do_sample": False}))
        twice = [*recordings, *recordings]
        first, second = bench(target, tokenizer, twice, [Suffix], block_lengths=(4, 4))
        assert [b.num_accepted_tokens for b in first[-1].blocks] == [b.num_accepted_tokens for b in second[-1].blocks]
        again = Tally()
        for block in Replay(Suffix(), recordings[0]).run(4):
            again.add(block)
        assert first[-1].tally().num_accepted_tokens > 2 * again.num_accepted_tokens  # the pool knows the answers

    def test_a_source_that_gives_up_is_counted_with_its_reason(self, target: Any, tokenizer: Any) -> None:
        recordings: list[Recording] = list(record(target, tokenizer, prompts(1), {"do_sample": False}))
        rows = next(bench(target, tokenizer, recordings, [Failing], block_lengths=(2,)))
        assert rows[-1].failures == ["no more"]
        assert rows[-1].tally().num_draft_tokens == 1
