"""The decoder against the model's own `generate`: the same tokens, whatever is drafted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import autospec
from autospec.caches import find_cache
from autospec.drafts import Assistant, NGram, Proposal
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

LENGTHS = (1, 2, 4, 8, 16)


class Oracle:
    """Drafts what it was told will come, with every n-th token spoilt: long accepted runs and rejections, by design."""

    name = "oracle"

    def __init__(self, answer: list[int], spoil_every: int = 0) -> None:
        self._answer = answer
        self._spoil_every = spoil_every

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Any:
        return self

    def propose(self, committed: Any, block_length: int) -> Proposal:
        tokens = self._answer[len(committed) : len(committed) + block_length]
        every = self._spoil_every
        return Proposal(
            [(t + 1) % tiny.VOCAB if every and (len(committed) + i) % every == 0 else t for i, t in enumerate(tokens)]
        )


class Alternating:
    """Switches source and block length at every block."""

    name = "alternating"

    def __init__(self, *actions: tuple[str, int]) -> None:
        self._actions = actions
        self._number = 0

    def choose(self, context: Any) -> Any:
        self._number += 1
        source, block_length = self._actions[self._number % len(self._actions)]
        return autospec.Action(source, block_length)

    def observe(self, outcome: Any) -> None:
        pass


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return tiny.near_copy(target)


def both(
    model: Any, ids: torch.Tensor, *, drafts: Any, policy: Any, seed: int = 0, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """Plain answer, speculative answer from the same seed, and the record of the latter."""
    torch.manual_seed(seed)
    plain = model.generate(ids, **copy.copy(kwargs))
    with autospec.wrap(model, drafts=drafts, policy=policy) as speculator:
        torch.manual_seed(seed)
        found = model.generate(ids, **kwargs)
        record = speculator.last_request
    assert record is not None
    assert record.fallback_reason is None, record.fallback_reason
    assert record.notes is None, record.notes
    return plain, found, record


@pytest.mark.parametrize("block_length", LENGTHS)
@pytest.mark.parametrize("length", [1, 20, 60])
@pytest.mark.parametrize("source", ["ngram", "assistant"])
def test_greedy_equals_generate(target: Any, draft: Any, source: str, block_length: int, length: int) -> None:
    plain, found, record = both(
        target,
        tiny.prompt(length),
        drafts=[NGram(min_ngram=1), Assistant(draft)],
        policy=Fixed(source, block_length=block_length),
        max_new_tokens=40,
        do_sample=False,
    )
    assert torch.equal(plain, found)
    assert record.output_tokens == 40
    assert record.block_tokens == 39  # the first token comes from prefill
    if source == "assistant":
        assert 0 < record.num_accepted_tokens < record.num_judged_tokens <= record.num_draft_tokens


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 0, "typical_p": 0.8},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"min_new_tokens": 5, "eos_token_id": [3, 7, 11]},
]


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize(
    "actions", [[("ngram", 4)], [("assistant", 3)], [("assistant", 5), ("none", 0), ("ngram", 8)]], ids=str
)
def test_sampled_text_follows_the_seed(target: Any, draft: Any, actions: Any, options: Any) -> None:
    accepted = 0
    for seed in range(4):
        plain, found, record = both(
            target,
            tiny.prompt(15, seed),
            drafts=[NGram(min_ngram=1), Assistant(draft)],
            policy=Alternating(*actions),
            seed=seed,
            max_new_tokens=24,
            do_sample=True,
            **options,
        )
        assert torch.equal(plain, found), seed
        accepted += record.num_accepted_tokens
    if actions[0][0] == "assistant":
        assert accepted > 0  # a test in which nothing is ever accepted shows nothing


def test_one_hot_drafts_follow_the_seed_in_maximal_sampling(target: Any) -> None:
    ids = tiny.prompt(30)
    torch.manual_seed(5)
    plain = target.generate(ids, max_new_tokens=24, do_sample=True)
    drafts = [Oracle(plain[0].tolist(), spoil_every=4)]
    with autospec.wrap(target, drafts=drafts, policy=Fixed("oracle", block_length=4), sampling="maximal") as speculator:
        torch.manual_seed(5)
        assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=True), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.num_accepted_tokens > 0


@pytest.mark.parametrize("window", [4, 8, 64])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sliding_window(window: int, attention: str) -> None:
    model = tiny.mistral(window=window, attn_implementation=attention)
    answer = model.generate(tiny.prompt(24), max_new_tokens=30, do_sample=False)[0].tolist()
    for source in (Oracle(answer, spoil_every=3), Assistant(tiny.near_copy(model))):
        plain, found, record = both(
            model,
            tiny.prompt(24),
            drafts=[source],
            policy=Fixed(source.name, block_length=5),
            max_new_tokens=30,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert record.num_accepted_tokens > 0


@pytest.mark.parametrize("block_length", [1, 4, 16])
@pytest.mark.parametrize("where", [1, 2, 5, 9, 24])
def test_eos_inside_a_block(target: Any, block_length: int, where: int) -> None:
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist()
    plain, found, record = both(
        target,
        ids,
        drafts=[Oracle(answer)],
        policy=Fixed("oracle", block_length=block_length),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=[answer[20 + where], 63],
    )
    assert torch.equal(plain, found)
    assert found.shape[1] <= 20 + where + 1
    assert record.num_judged_tokens == record.num_accepted_tokens  # case C07: cut off is neither accepted nor rejected
    assert record.block_tokens == record.output_tokens - 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
@pytest.mark.parametrize("block_length", [3, 10])
def test_never_longer_than_asked(target: Any, max_new_tokens: int, block_length: int) -> None:
    ids = tiny.prompt(30)
    plain, found, record = both(
        target,
        ids,
        drafts=[NGram(min_ngram=1)],
        policy=Fixed("ngram", block_length=block_length),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    assert torch.equal(plain, found)
    assert record.num_draft_tokens <= max(0, max_new_tokens - 1)


class LastTokensEqual(StoppingCriteria):
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        hit = input_ids[0, -len(self._ids) :].tolist() == self._ids
        return torch.tensor([hit], device=input_ids.device)


@pytest.mark.parametrize("where", [2, 6, 13])
def test_custom_criterion_in_the_middle_of_an_accepted_block(target: Any, where: int) -> None:
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist()
    criterion = LastTokensEqual(answer[20 + where : 20 + where + 3])
    plain, found, _ = both(
        target,
        ids,
        drafts=[Oracle(answer)],
        policy=Fixed("oracle", block_length=8),
        max_new_tokens=30,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert torch.equal(plain, found)
    assert found.shape[1] < 50


@pytest.mark.parametrize("given_in", ["keyword", "config"])
def test_stop_strings_across_block_borders(target: Any, given_in: str) -> None:
    tokenizer = tiny.tokenizer()
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist()
    stop = tokenizer.decode(answer[26:29])
    config = copy.deepcopy(target.generation_config)
    config.update(max_new_tokens=30, do_sample=False, stop_strings=[stop])
    kwargs: dict[str, Any] = (
        {"max_new_tokens": 30, "do_sample": False, "stop_strings": stop}
        if given_in == "keyword"
        else {"generation_config": config}
    )
    plain = target.generate(ids, tokenizer=tokenizer, **kwargs)
    with autospec.wrap(
        target, tokenizer=tokenizer, drafts=[Oracle(answer)], policy=Fixed("oracle", block_length=5)
    ) as speculator:
        found = target.generate(ids, **kwargs)
        assert speculator.last_request is not None
        assert speculator.last_request.fallback_reason is None
        assert speculator.last_request.num_accepted_tokens > 0
    assert torch.equal(plain, found)
    assert found.shape[1] < 50
    assert config.stop_strings == [stop]  # the user's object is as it was


class Counting(LogitsProcessor):
    """Keeps state: what it does depends on how often it was called."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.prefixes.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, len(self.prefixes) % tiny.VOCAB] += 5.0
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_that_keep_state_see_what_plain_decoding_shows_them(
    target: Any, draft: Any, do_sample: bool
) -> None:
    ids = tiny.prompt(20)
    processors = [Counting(), Counting()]
    torch.manual_seed(3)
    plain = target.generate(
        ids, max_new_tokens=25, do_sample=do_sample, logits_processor=LogitsProcessorList(processors[:1])
    )
    with autospec.wrap(target, drafts=[Assistant(draft)], policy="fixed:assistant:4"):
        torch.manual_seed(3)
        found = target.generate(
            ids, max_new_tokens=25, do_sample=do_sample, logits_processor=LogitsProcessorList(processors[1:])
        )
    assert torch.equal(plain, found)
    assert processors[0].prefixes == processors[1].prefixes


GREEDY_OPTIONS: list[dict[str, Any]] = [
    {"min_length": 30, "eos_token_id": list(range(1, 20))},
    {"min_new_tokens": 10, "eos_token_id": list(range(1, 20))},
    {"bad_words_ids": [[5], [9, 10]]},
    {"sequence_bias": [[[7], 6.0], [[8, 9], -4.0]]},
    {"suppress_tokens": [1, 2, 3, 4]},
    {"begin_suppress_tokens": list(range(10, 40))},
    {"forced_eos_token_id": 7},
    {"exponential_decay_length_penalty": (5, 1.4), "eos_token_id": 7},
    {"repetition_penalty": 1.3},
    {"encoder_repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"guidance_scale": 1.5},
    {"renormalize_logits": True, "remove_invalid_values": True},
    {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 4.0}},
]


@pytest.mark.parametrize("options", GREEDY_OPTIONS, ids=lambda o: next(iter(o)))
def test_processors_of_transformers(target: Any, draft: Any, options: dict[str, Any]) -> None:
    plain, found, _ = both(
        target,
        tiny.prompt(20),
        drafts=[Assistant(draft), NGram(min_ngram=1)],
        policy=Alternating(("assistant", 4), ("ngram", 3)),
        max_new_tokens=30,
        do_sample=False,
        **options,
    )
    assert torch.equal(plain, found)


def test_first_of_equal_logits_wins(target: Any) -> None:
    model = copy.deepcopy(target)
    with torch.no_grad():  # exact ties at every step
        model.lm_head.weight[32:] = model.lm_head.weight[:32]
    answer = model.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)[0].tolist()
    plain, found, _ = both(
        model,
        tiny.prompt(20),
        drafts=[Oracle(answer)],
        policy=Fixed("oracle", block_length=4),
        max_new_tokens=20,
        do_sample=False,
    )
    assert torch.equal(plain, found)
    assert int(found[0, 20:].max()) < 32


def test_left_padding(target: Any, draft: Any) -> None:
    ids = tiny.prompt(20)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=-1)
    mask = torch.cat([torch.zeros(1, 7, dtype=torch.long), torch.ones_like(ids)], dim=-1)
    unpadded = target.generate(ids, max_new_tokens=25, do_sample=False)
    for source in (NGram(min_ngram=1), Assistant(draft)):
        plain, found, record = both(
            target,
            padded,
            drafts=[source],
            policy=Fixed(source.name, block_length=4),
            attention_mask=mask,
            max_new_tokens=25,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert torch.equal(found[:, 7:], unpadded)
        assert record.num_draft_tokens > 0


def test_padding_is_no_match_for_ngrams(target: Any) -> None:
    """The last tokens stand in the padding, too; what followed them there is never drafted."""

    class Watched(NGram):
        def start(self, request: Any) -> Any:
            session = super().start(request)
            propose = session.propose
            session.propose = lambda committed, k: texts.append(list(committed)) or propose(committed, k)  # type: ignore[method-assign, func-returns-value]
            return session

    texts: list[list[int]] = []
    ids = torch.tensor([[5, 9, 5, 9, 5, 9, 4, 3, 8, 2, 5]])  # 5 9 5 9 5 9 is padding
    mask = torch.tensor([[0] * 6 + [1] * 5])
    with autospec.wrap(target, drafts=[Watched(min_ngram=1)], policy=Fixed("ngram", block_length=4)):
        target.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert texts
    assert all(text[:5] == [4, 3, 8, 2, 5] for text in texts)


@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits(target: Any, draft: Any, do_sample: bool) -> None:
    plain, found, _ = both(
        target,
        tiny.prompt(20),
        drafts=[Assistant(draft)],
        policy="fixed:assistant:4",
        max_new_tokens=20,
        do_sample=do_sample,
        top_k=9,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert type(found) is type(plain)
    assert torch.equal(plain.sequences, found.sequences)
    for name in ("scores", "logits"):
        assert len(plain[name]) == len(found[name]) == 20
        for a, b in zip(plain[name], found[name], strict=True):
            torch.testing.assert_close(a, b)
    assert find_cache(found).get_seq_length() == find_cache(plain).get_seq_length()


@pytest.mark.parametrize("model", [tiny.llama(), tiny.mistral(window=8)], ids=["full", "window"])
def test_cache_is_handed_back_as_generate_leaves_it(model: Any) -> None:
    """Two turns with one cache."""
    ids = tiny.prompt(20)

    def two_turns(is_wrapped: bool) -> list[int]:
        answer = model.generate(ids, max_new_tokens=60, do_sample=False)[0].tolist()
        speculator = (
            autospec.wrap(model, drafts=[Oracle(answer, 4)], policy=Fixed("oracle", block_length=5))
            if is_wrapped
            else None
        )
        first = model.generate(ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        cache = find_cache(first)
        assert cache.get_seq_length() == first.sequences.shape[1] - 1
        again = torch.cat([first.sequences, tiny.prompt(5, seed=9)], dim=-1)
        from autospec.caches import CACHE_KEYWORD

        second = model.generate(again, max_new_tokens=12, do_sample=False, **{CACHE_KEYWORD: cache})
        if speculator is not None:
            speculator.close()
        return second[0].tolist()  # type: ignore[no-any-return]

    assert two_turns(is_wrapped=True) == two_turns(is_wrapped=False)


class Seen(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


def test_streamer_sees_what_it_sees_in_plain_decoding(target: Any, draft: Any) -> None:
    ids = tiny.prompt(20)
    plain, speculative = Seen(), Seen()
    target.generate(ids, max_new_tokens=20, do_sample=False, streamer=plain)
    with autospec.wrap(target, drafts=[Assistant(draft)], policy="fixed:assistant:4"):
        target.generate(ids, max_new_tokens=20, do_sample=False, streamer=speculative)
    assert plain.events == speculative.events
    assert speculative.events[-1] == "end"


def test_an_error_ends_the_stream(target: Any) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] > 25:
                raise RuntimeError("broken processor")
            return scores

    tokenizer = tiny.tokenizer()
    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    with autospec.wrap(target, policy="fixed:ngram:4") as speculator:
        with pytest.raises(RuntimeError, match="broken processor"):
            target.generate(
                tiny.prompt(20),
                max_new_tokens=20,
                do_sample=False,
                streamer=streamer,
                logits_processor=LogitsProcessorList([Broken()]),
            )
        assert speculator.last_request is not None
        assert speculator.last_request.error == "RuntimeError: broken processor"
        assert speculator.last_request.output_tokens == 6
    assert len("".join(streamer)) > 0  # ends instead of waiting for ever


def test_a_miss_is_a_plain_step(target: Any) -> None:
    ids = torch.arange(1, 30)[None]  # nothing repeats
    with autospec.wrap(target, drafts=[NGram(max_ngram=8, min_ngram=8)], policy="fixed:ngram:8") as speculator:
        widths = []
        forward = target.forward
        target.forward = lambda *args, **kwargs: widths.append(kwargs["input_ids"].shape[1]) or forward(*args, **kwargs)
        try:
            target.generate(ids, max_new_tokens=6, do_sample=False)
        finally:
            del target.forward
        assert widths == [29, 1, 1, 1, 1, 1]
        assert speculator.last_request is not None
        assert speculator.last_request.num_draft_tokens == 0
        assert speculator.last_request.acceptance_lengths == {1: 5}


def test_without_eos_it_runs_to_the_length(target: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 7, 8]])
    plain, found, record = both(
        target, ids, drafts=["ngram"], policy="fixed:ngram:4", max_new_tokens=15, do_sample=False, eos_token_id=None
    )
    assert torch.equal(plain, found)
    assert found.shape[1] == 24
    assert record.num_draft_tokens > 0


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_the_cache_holds_what_was_said(target: Any, draft: Any, sampling: str) -> None:
    """After rejections the cached keys are those of a fresh forward over the returned ids."""
    torch.manual_seed(1)
    with autospec.wrap(target, drafts=[Assistant(draft)], policy="fixed:assistant:4", sampling=sampling) as speculator:
        output = target.generate(tiny.prompt(20), max_new_tokens=30, do_sample=True, return_dict_in_generate=True)
        assert speculator.last_request is not None
        assert 0 < speculator.last_request.num_accepted_tokens < speculator.last_request.num_judged_tokens
    fresh = find_cache(target(output.sequences[:, :-1], use_cache=True))
    for a, b in zip(find_cache(output).layers, fresh.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)
