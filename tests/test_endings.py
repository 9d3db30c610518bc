"""How a request ends: limits, criteria that look at scores, consumers that go away, streamers of every kind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import tiny
import torch
from test_decoder import Oracle, both
from transformers import AsyncTextIteratorStreamer, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

import autospec
from autospec.drafts import Assistant
from autospec.policies import Fixed

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


def oracle(target: Any, ids: torch.Tensor, length: int = 30) -> Oracle:
    return Oracle(target.generate(ids, max_new_tokens=length, do_sample=False)[0].tolist())


class LowConfidence(StoppingCriteria):
    """Ends once the chosen token's probability falls below a bound: looks at the scores of each position."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.seen: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(len(scores))
        probability = scores[-1].softmax(-1)[0, input_ids[0, -1]]
        return torch.tensor([bool(probability <= self._bound)])


def test_a_criterion_that_reads_scores_sees_every_position(target: Any) -> None:
    ids = tiny.prompt(20)
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    whole = target.generate(ids, **options)
    chosen = [float(s.softmax(-1)[0].max()) for s in whole.scores]
    lows = [i for i, p in enumerate(chosen) if p <= min(chosen[: i + 1])]
    criteria = [LowConfidence(chosen[lows[-1]]), LowConfidence(chosen[lows[-1]])]
    assert lows[-1] >= 3
    plain = target.generate(ids, stopping_criteria=StoppingCriteriaList(criteria[:1]), **options)
    with autospec.wrap(target, drafts=[oracle(target, ids)], policy=Fixed("oracle", block_length=6)) as speculator:
        found = target.generate(ids, stopping_criteria=StoppingCriteriaList(criteria[1:]), **options)
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens > 0
    assert torch.equal(plain.sequences, found.sequences)
    assert criteria[0].seen == criteria[1].seen


def test_max_time_that_is_over_ends_after_the_first_token(target: Any) -> None:
    ids = tiny.prompt(20)
    plain, found, _ = both(
        target,
        ids,
        drafts=[oracle(target, ids)],
        policy=Fixed("oracle", block_length=6),
        max_new_tokens=30,
        max_time=0.0,
        do_sample=False,
    )
    assert plain.shape == found.shape == (1, 21)


def test_a_prompt_that_ends_with_eos(target: Any) -> None:
    ids = tiny.prompt(20)
    plain, found, _ = both(
        target,
        ids,
        drafts=[oracle(target, ids)],
        policy=Fixed("oracle", block_length=6),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=int(ids[0, -1]),
    )
    assert torch.equal(plain, found)


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_inner_states_come_from_the_original(target: Any, wanted: str) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, wanted: True}
    plain = target.generate(tiny.prompt(20), **options)
    with autospec.wrap(target, policy="fixed:ngram:4"), pytest.warns(UserWarning, match="attentions or hidden states"):
        found = target.generate(tiny.prompt(20), **options)
    assert torch.equal(plain.sequences, found.sequences)
    assert len(plain[wanted.removeprefix("output_")]) == len(found[wanted.removeprefix("output_")])


def test_text_streamers_give_the_same_text(target: Any) -> None:
    tokenizer = tiny.tokenizer()

    def streamed() -> str:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        thread = threading.Thread(
            target=target.generate,
            kwargs={"inputs": tiny.prompt(20), "streamer": streamer, "max_new_tokens": 20, "do_sample": False},
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    plain = streamed()
    with autospec.wrap(target, drafts=[Assistant(tiny.near_copy(target))], policy="fixed:assistant:4"):
        assert streamed() == plain
    assert len(plain) > 10


def test_async_streamers_give_the_same_text(target: Any) -> None:
    tokenizer = tiny.tokenizer()

    async def streamed() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        thread = threading.Thread(
            target=target.generate,
            kwargs={"inputs": tiny.prompt(20), "streamer": streamer, "max_new_tokens": 20, "do_sample": False},
        )
        thread.start()
        text = "".join([part async for part in streamer])
        thread.join()
        return text

    plain = asyncio.run(streamed())
    with autospec.wrap(target, drafts=[Assistant(tiny.near_copy(target))], policy="fixed:assistant:4"):
        assert asyncio.run(streamed()) == plain


def test_a_consumer_that_goes_away_ends_the_request(target: Any) -> None:
    class Cancelled(Exception):  # noqa: N818
        pass

    class Leaves:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            if len(self.events) == 5:
                raise Cancelled
            self.events.append(value.tolist())

        def end(self) -> None:
            self.events.append("end")

    ids = tiny.prompt(20)
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)[0, 20:].tolist()
    streamer = Leaves()
    with autospec.wrap(target, drafts=[oracle(target, ids)], policy=Fixed("oracle", block_length=6)) as speculator:
        with pytest.raises(Cancelled):
            target.generate(ids, max_new_tokens=20, do_sample=False, streamer=streamer)
        assert speculator.last_request is not None
        assert (speculator.last_request.error or "").startswith("Cancelled")
        again = target.generate(ids, max_new_tokens=20, do_sample=False)  # and the next one is as good as ever
    assert streamer.events == [ids.tolist(), *[[token] for token in expected[:4]], "end"]
    assert again[0, 20:].tolist() == expected
