"""Ends, streams, and what one request leaves for the next: as in plain decoding, greedy and sampled."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from compared import NEW_TOKENS, answer, assert_exact, assert_plain, no_options
from test_choosing_tokens import EveryThirdCall
from test_decoder import Counting, Oracle, Seen
from test_families import make
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

import autospec
from autospec.drafts import Assistant, NGram, Proposal
from autospec.policies import Fixed

pytestmark = [pytest.mark.compat, pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])]

Options = dict[str, Any]
PROMPT = tiny.prompt(28, seed=1, period=24)


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", {})


def said(target: Any, do_sample: bool) -> list[int]:
    return answer(target, PROMPT, do_sample=do_sample)[0, PROMPT.shape[1] :].tolist()  # type: ignore[no-any-return]


def first_said(target: Any, do_sample: bool, after: int) -> int:
    """A position from `after` on whose token has not been said before."""
    tokens = said(target, do_sample)
    return next(i for i in range(after, len(tokens)) if tokens[i] not in tokens[:i])


# --- limits and ends ---


@pytest.mark.parametrize("after", [2, 4, 7])
def test_several_eos_ids_inside_an_accepted_block(target: Any, do_sample: bool, after: int) -> None:
    end = first_said(target, do_sample, after)
    unsaid = next(i for i in range(tiny.VOCAB) if i not in said(target, do_sample))
    options = {"eos_token_id": [unsaid, said(target, do_sample)[end]]}
    found = assert_exact(
        target, PROMPT, lambda: options, do_sample=do_sample, block_length=16, source=told_more, rejects=False
    )
    assert found.shape[1] == PROMPT.shape[1] + end + 1 < PROMPT.shape[1] + NEW_TOKENS


def told_more(tokens: list[int]) -> Oracle:
    """An oracle that drafts right past the end."""
    return Oracle([*tokens, *tokens[-1:] * 20])


class SaysTheEnd(Oracle):
    """Drafts the end of the text at every third position, and is wrong about it."""

    def __init__(self, answer: list[int], eos: int) -> None:
        super().__init__(answer)
        self._eos = eos

    def propose(self, committed: Any, block_length: int) -> Proposal:
        tokens = super().propose(committed, block_length).tokens
        return Proposal([self._eos if (len(committed) + i) % 3 == 0 else t for i, t in enumerate(tokens)])


def test_eos_proposed_but_rejected(target: Any, do_sample: bool) -> None:
    eos = next(i for i in range(tiny.VOCAB) if i not in said(target, do_sample))
    found = assert_exact(
        target,
        PROMPT,
        lambda: {"eos_token_id": eos},
        do_sample=do_sample,
        source=lambda tokens: SaysTheEnd(tokens, eos),
    )
    assert found.shape[1] == PROMPT.shape[1] + NEW_TOKENS


def pairs_of_letters() -> PreTrainedTokenizerFast:
    """Two characters a token, so that a text can begin in the middle of one."""
    vocabulary = {"abcdefgh"[i // 8] + "abcdefgh"[i % 8]: i for i in range(tiny.VOCAB)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="aa"))
    inner.pre_tokenizer = Split(Regex(".."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="aa", pad_token="aa")


@pytest.mark.parametrize("block_length", [2, 5, 16])
def test_stop_strings_across_token_and_block_borders(target: Any, do_sample: bool, block_length: int) -> None:
    tokenizer = pairs_of_letters()
    text = tokenizer.decode(said(target, do_sample))
    start = next(i for i in range(7, 40, 2) if text.find(text[i : i + 4]) == i)  # odd: within a token
    options = {"stop_strings": ["gagaga", text[start : start + 4]], "tokenizer": tokenizer}
    found = assert_exact(
        target,
        PROMPT,
        lambda: options,
        do_sample=do_sample,
        block_length=block_length,
        source=told_more,
        rejects=False,
    )
    assert found.shape[1] == PROMPT.shape[1] + (start + 4 + 1) // 2 < PROMPT.shape[1] + NEW_TOKENS


@pytest.mark.parametrize("seconds", [2, 5, 9])
def test_time_that_runs_out_inside_a_block(
    target: Any, do_sample: bool, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that moves on by a second each time it is read: when made, and after every token."""

    def options() -> Options:
        clock = itertools.count()
        monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: float(next(clock))))
        return {"max_time": float(seconds)}

    found = assert_exact(target, PROMPT, options, do_sample=do_sample, block_length=16, source=told_more, rejects=False)
    assert found.shape[1] == PROMPT.shape[1] + seconds + 1


@pytest.mark.parametrize("max_length", [31, 35, 47])
def test_length_that_is_reached_inside_a_block(target: Any, do_sample: bool, max_length: int) -> None:
    found = assert_exact(
        target,
        PROMPT,
        lambda: {"max_length": max_length, "max_new_tokens": None},
        do_sample=do_sample,
        block_length=16,
        source=told_more,
        rejects=False,
    )
    assert found.shape[1] == max_length


def test_a_single_new_token(target: Any, do_sample: bool) -> None:
    plain = answer(target, PROMPT, lambda: {"max_new_tokens": 1}, do_sample=do_sample)
    with autospec.wrap(target, drafts=[NGram(min_ngram=1)], policy="fixed:ngram:8") as speculator:
        assert torch.equal(answer(target, PROMPT, lambda: {"max_new_tokens": 1}, do_sample=do_sample), plain)
        assert speculator.last_request is not None
        assert (speculator.last_request.output_tokens, speculator.last_request.num_draft_tokens) == (1, 0)


def test_a_prompt_that_ends_with_eos(target: Any, do_sample: bool) -> None:
    ids = torch.cat([PROMPT, torch.tensor([[13]])], dim=-1)
    found = assert_exact(target, ids, lambda: {"eos_token_id": 13}, do_sample=do_sample)
    assert found.shape[1] == ids.shape[1] + NEW_TOKENS


def test_transformers_own_criterion_on_scores(target: Any, do_sample: bool) -> None:
    ids = tiny.prompt(20, seed=3)
    scored = {"return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(1)
    whole = target.generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=do_sample, **({"temperature": 0.4} if do_sample else {}), **scored
    )
    tokens = whole.sequences[0, 20:].tolist()
    chances = [float(scores.softmax(-1)[0, token]) for scores, token in zip(whole.scores, tokens, strict=True)]
    end = next(i for i in range(3, NEW_TOKENS) if chances[i] < 0.9 * min(chances[:i]))

    def options() -> Options:
        return {**scored, "stopping_criteria": StoppingCriteriaList([ConfidenceCriteria(1.05 * chances[end])])}

    found = assert_exact(target, ids, options, do_sample=do_sample, block_length=4, source=told_more, rejects=False)
    assert found.shape[1] == 20 + end + 1


# --- outputs and streams ---


@pytest.mark.parametrize("asked", [(), ("output_scores",), ("output_logits",), ("output_scores", "output_logits")])
def test_what_a_dictionary_holds(target: Any, do_sample: bool, asked: tuple[str, ...]) -> None:
    options = {"return_dict_in_generate": True, "repetition_penalty": 1.2, **dict.fromkeys(asked, True)}
    settings = {"max_new_tokens": 12, "do_sample": do_sample, **options}
    torch.manual_seed(1)
    plain = target.generate(PROMPT, **settings)
    source = Oracle(plain.sequences[0].tolist(), spoil_every=4)
    with autospec.wrap(target, drafts=[source], policy=Fixed("oracle", block_length=5)) as speculator:
        torch.manual_seed(1)
        found = target.generate(PROMPT, **settings)
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens > 0
    assert type(found) is type(plain)
    assert set(found) == set(plain)
    assert torch.equal(found.sequences, plain.sequences)
    for name in ("scores", "logits"):
        if f"output_{name}" not in asked:
            assert found.get(name) is None
            continue
        assert len(found[name]) == 12
        for a, b in zip(found[name], plain[name], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_inner_states_are_left_to_generate(target: Any, do_sample: bool, wanted: str) -> None:
    options = {"return_dict_in_generate": True, wanted: True}
    reason = "attentions or hidden states were asked for"
    assert_plain(target, PROMPT, reason, lambda: options, do_sample=do_sample)


def test_streamers_see_each_token_once(target: Any, do_sample: bool) -> None:
    """Also those of a call that is left to `generate`."""
    for options in ({}, {"use_cache": False}):
        plain, found = Seen(), Seen()
        answer(target, PROMPT, lambda: {**options, "streamer": plain}, do_sample=do_sample)  # noqa: B023
        tokens = plain.events[1:-1]
        source = Oracle([*PROMPT[0].tolist(), *itertools.chain(*tokens)], spoil_every=4)
        with autospec.wrap(target, drafts=[source], policy=Fixed("oracle", block_length=5)) as speculator:
            if options:
                with pytest.warns(UserWarning, match="use_cache=False"):
                    answer(target, PROMPT, lambda: {**options, "streamer": found}, do_sample=do_sample)  # noqa: B023
            else:
                answer(target, PROMPT, lambda: {"streamer": found}, do_sample=do_sample)  # noqa: B023
                assert speculator.last_request is not None
                assert speculator.last_request.num_accepted_tokens > 0
        assert found.events == plain.events
        assert (found.events[0], found.events[-1]) == (PROMPT.tolist(), "end")
        assert len(tokens) == NEW_TOKENS


def printed(target: Any, capsys: pytest.CaptureFixture[str], options: Callable[[], Options], do_sample: bool) -> str:
    capsys.readouterr()
    streamer = TextStreamer(tiny.tokenizer(), skip_prompt=True)
    answer(target, PROMPT, lambda: {**options(), "streamer": streamer}, do_sample=do_sample)
    return capsys.readouterr().out


def test_printed_text(target: Any, do_sample: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(target, capsys, no_options, do_sample)
    with autospec.wrap(target, drafts=[Assistant(tiny.near_copy(target))], policy="fixed:assistant:4") as speculator:
        assert printed(target, capsys, no_options, do_sample) == plain
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens > 0
    assert plain.strip() == tiny.tokenizer().decode(said(target, do_sample))


class Interrupts(StoppingCriteria):
    """Raises once the answer has ten tokens."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] == PROMPT.shape[1] + 10:
            raise self._error
        return torch.zeros(1, dtype=torch.bool)


async def collected(streamer: Any) -> str:
    return "".join([part async for part in streamer])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("kind", [TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer])
def test_an_interrupted_stream_ends_with_what_was_committed(
    target: Any, do_sample: bool, kind: Any, error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = said(target, do_sample)

    async def interrupted() -> str:
        waiting: Options = {} if kind is TextStreamer else {"timeout": 5}
        streamer = kind(tiny.tokenizer(), skip_prompt=True, **waiting)
        criteria = StoppingCriteriaList([Interrupts(error)])
        with pytest.raises(error):
            answer(target, PROMPT, lambda: {"streamer": streamer, "stopping_criteria": criteria}, do_sample=do_sample)
        if kind is TextStreamer:
            return capsys.readouterr().out.strip()
        return "".join(streamer) if kind is TextIteratorStreamer else await collected(streamer)

    source = Oracle([*PROMPT[0].tolist(), *tokens])
    with autospec.wrap(target, drafts=[source], policy=Fixed("oracle", block_length=6)) as speculator:
        assert asyncio.run(raised_apart(interrupted)) == tiny.tokenizer().decode(tokens[:9])
        assert speculator.last_request is not None
        assert (speculator.last_request.error or "").startswith(error.__name__)
        assert said(target, do_sample) == tokens  # and the next request is as good as ever


async def raised_apart(work: Callable[[], Any]) -> str:
    """In a task of its own, since asyncio takes some errors for messages to itself."""
    text: str = await asyncio.create_task(work())
    return text


class Cancelled(StoppingCriteria):
    """Ends the request as soon as a reader has left, as servers do it."""

    def __init__(self, left: threading.Event) -> None:
        self._left = left

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([self._left.is_set()])


def test_a_reader_that_leaves_ends_the_request_inside_a_block(target: Any, do_sample: bool) -> None:
    class LeavesAfterFive(Seen):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.events) == 1 + 5:
                left.set()

    tokens = said(target, do_sample)
    source = Oracle([*PROMPT[0].tolist(), *tokens])
    with autospec.wrap(target, drafts=[source], policy=Fixed("oracle", block_length=16)) as speculator:
        left, streamer = threading.Event(), LeavesAfterFive()
        criteria = StoppingCriteriaList([Cancelled(left)])
        answer(target, PROMPT, lambda: {"streamer": streamer, "stopping_criteria": criteria}, do_sample=do_sample)
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens == 5
    assert streamer.events == [PROMPT.tolist(), *[[token] for token in tokens[:6]], "end"]


# --- what one request leaves for the next ---


def test_requests_do_not_change_each_other(target: Any, do_sample: bool) -> None:
    """One wrapped model, many kinds of request in two orders: each answer is that of the request alone."""
    requests: list[Callable[[], Options]] = [
        no_options,
        lambda: {"repetition_penalty": 1.6, "max_new_tokens": 9},
        lambda: {"eos_token_id": [59, 16], "min_new_tokens": 5},
        lambda: {"logits_processor": LogitsProcessorList([EveryThirdCall()])},
        lambda: {"return_dict_in_generate": True, "output_scores": True, "suppress_tokens": [16, 59]},
        lambda: {"watermarking_config": {"greenlist_ratio": 0.4, "bias": 20.0}},
        lambda: {"guidance_scale": 3.0},
    ]
    alone = [answer(target, PROMPT, make, do_sample=do_sample) for make in requests]
    config = target.generation_config.to_dict()
    drafts = [NGram(min_ngram=1), Assistant(tiny.near_copy(target, noise=0.05))]
    with autospec.wrap(target, drafts=drafts, policy="fixed:assistant:4") as speculator:
        for number in [*range(7), *reversed(range(7)), 3, 0, 3]:
            assert torch.equal(answer(target, PROMPT, requests[number], do_sample=do_sample), alone[number]), number
            assert speculator.last_request is not None
            assert speculator.last_request.num_accepted_tokens > 0
    assert target.generation_config.to_dict() == config
    assert len({tuple(tokens[0].tolist()) for tokens in alone}) == 7


def test_what_the_user_hands_in_stays_as_it_is(target: Any, do_sample: bool) -> None:
    tokenizer = tiny.tokenizer()
    config = copy.deepcopy(target.generation_config)
    config.update(max_new_tokens=20, do_sample=do_sample, stop_strings=["7"], repetition_penalty=1.1, eos_token_id=[3])
    handed: Options = {
        "inputs": PROMPT.clone(),
        "attention_mask": torch.ones_like(PROMPT),
        "generation_config": config,
        "logits_processor": LogitsProcessorList([Counting()]),
        "stopping_criteria": StoppingCriteriaList([Cancelled(threading.Event())]),
    }
    before = config.to_dict()
    lists = [list(handed["logits_processor"]), list(handed["stopping_criteria"])]
    drafts = [Assistant(tiny.near_copy(target, noise=0.05), tokenizer=tokenizer)]
    with autospec.wrap(target, tokenizer=tokenizer, drafts=drafts, policy="fixed:assistant:4") as speculator:
        target.generate(**handed)
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens > 0
    assert config.to_dict() == before
    assert [list(handed["logits_processor"]), list(handed["stopping_criteria"])] == lists
    assert torch.equal(handed["inputs"], PROMPT)
    assert torch.equal(handed["attention_mask"], torch.ones_like(PROMPT))


def test_two_wrapped_models_in_two_threads(do_sample: bool) -> None:
    """Greedy threads at the same time; sampled requests one after the other, in whichever thread."""
    models = [tiny.llama(seed=0), tiny.mistral(seed=1, window=8)]
    prompts = [tiny.prompt(10 + i, seed=i) for i in range(6)]
    plain = [[answer(model, ids, do_sample=do_sample) for ids in prompts] for model in models]
    turn = threading.Lock()

    def answers(model: Any) -> list[torch.Tensor]:
        if not do_sample:
            return [answer(model, ids, do_sample=False) for ids in prompts]
        found = []
        for ids in prompts:
            with turn:  # torch has one generator for all threads
                found.append(answer(model, ids, do_sample=True))
        return found

    speculators = [
        autospec.wrap(model, drafts=[NGram(min_ngram=1), Assistant(tiny.near_copy(model))], policy="fixed:assistant:4")
        for model in models
    ]
    with speculators[0], speculators[1], ThreadPoolExecutor(2) as pool:
        found = list(pool.map(answers, models))
    for row, expected in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, expected, strict=True))
    assert all(s.last_request is not None and s.last_request.num_accepted_tokens > 0 for s in speculators)


def test_one_wrapped_model_in_two_threads(target: Any, do_sample: bool) -> None:
    """Each request with a processor that keeps state; sampled requests one after the other."""
    prompts = [tiny.prompt(10 + i, seed=i) for i in range(8)]
    turn = threading.Lock()

    def one(ids: torch.Tensor) -> torch.Tensor:
        def stateful() -> Options:
            return {"logits_processor": LogitsProcessorList([Counting()])}

        if not do_sample:
            return answer(target, ids, stateful, do_sample=False)
        with turn:
            return answer(target, ids, stateful, do_sample=True)

    plain = [one(ids) for ids in prompts]
    drafts = [NGram(min_ngram=1), Assistant(tiny.near_copy(target, noise=0.05))]
    with autospec.wrap(target, drafts=drafts, policy="fixed:assistant:4"), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, prompts * 2))
    assert all(torch.equal(output, plain[i % 8]) for i, output in enumerate(found))
