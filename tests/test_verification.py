"""Verification of a block as one pass: bits of row-by-row work, one look at the device, noise of plain decoding."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import tiny
import torch
import transformers
from test_decoder import Oracle
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import autospec
from autospec.certify import SyntheticModel, constant_table
from autospec.decoding.loop import Loop
from autospec.decoding.processors import COSTLY, PREFIXES, PURE, SCORES_ALONE, SUMMING, BlockProcessors
from autospec.decoding.selection import Greedy, Maximal, Paired
from autospec.decoding.target import TargetSession
from autospec.decoding.tokens import Tokens
from autospec.drafts import Assistant
from autospec.policies import Fixed
from autospec.randomness import TorchRandomness, race, race_is_multinomial

pytestmark = pytest.mark.compat

CPU = torch.device("cpu")
VOCAB = 1003  # odd, so that rows start at every alignment

MADE: dict[str, LogitsProcessor] = {
    "EpsilonLogitsWarper": transformers.EpsilonLogitsWarper(3e-4),
    "EtaLogitsWarper": transformers.EtaLogitsWarper(2e-3, device="cpu"),
    "InfNanRemoveLogitsProcessor": transformers.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": transformers.LogitNormalization(),
    "MinPLogitsWarper": transformers.MinPLogitsWarper(0.05),
    "SuppressTokensLogitsProcessor": transformers.SuppressTokensLogitsProcessor([1, 5, 900]),
    "TemperatureLogitsWarper": transformers.TemperatureLogitsWarper(0.7),
    "TopKLogitsWarper": transformers.TopKLogitsWarper(50),
    "EncoderNoRepeatNGramLogitsProcessor": transformers.EncoderNoRepeatNGramLogitsProcessor(
        2, torch.tensor([[1, 5, 2]])
    ),
    "SequenceBiasLogitsProcessor": transformers.SequenceBiasLogitsProcessor([[[4], 1.5], [[1, 2], -2.0]]),
    "EncoderRepetitionPenaltyLogitsProcessor": transformers.EncoderRepetitionPenaltyLogitsProcessor(
        1.3, torch.tensor([[3, 4, 5]])
    ),
    "ExponentialDecayLengthPenalty": transformers.ExponentialDecayLengthPenalty((2, 1.2), 7, 4),
    "ForcedBOSTokenLogitsProcessor": transformers.ForcedBOSTokenLogitsProcessor(3),
    "ForcedEOSTokenLogitsProcessor": transformers.ForcedEOSTokenLogitsProcessor(9, 7),
    "MinLengthLogitsProcessor": transformers.MinLengthLogitsProcessor(8, 7),
    "MinNewTokensLengthLogitsProcessor": transformers.MinNewTokensLengthLogitsProcessor(4, 3, 7),
    "RepetitionPenaltyLogitsProcessor": transformers.RepetitionPenaltyLogitsProcessor(1.3),
    "SuppressTokensAtBeginLogitsProcessor": transformers.SuppressTokensAtBeginLogitsProcessor([2, 3], 7),
    "NoBadWordsLogitsProcessor": transformers.NoBadWordsLogitsProcessor([[5], [1, 2]], 7),
    "NoRepeatNGramLogitsProcessor": transformers.NoRepeatNGramLogitsProcessor(2),
    "TopHLogitsWarper": transformers.TopHLogitsWarper(0.4),
    "TopPLogitsWarper": transformers.TopPLogitsWarper(0.9),
    "TypicalLogitsWarper": transformers.TypicalLogitsWarper(0.9),
}


def rows(count: int = 6, *, masked: bool = False, vocab_size: int = VOCAB) -> torch.Tensor:
    scores = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    scores = (scores * 8).round() / 8  # steps of half precision: many equals
    if masked:
        scores[:, ::3] = -torch.inf
    return scores


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", PURE)
def test_all_positions_at_once_give_the_bits_of_one_by_one(name: str, masked: bool) -> None:
    prefix = torch.tensor([[1, 2, 3, 1]])
    drafts = torch.tensor([[2, 3, 5, 1, 2]])
    ids = torch.cat([prefix, drafts], dim=1)
    processor, scores = MADE[name], rows(masked=masked)
    expected = [processor(ids[:, : 4 + i], scores[i : i + 1].clone()) for i in range(6)]
    for device in (CPU, torch.device("meta")):  # where all pure processors belong to the first stage
        block = BlockProcessors(LogitsProcessorList([processor]), device)
        assert (block.num_together is None) == (device.type != "cpu" or name not in COSTLY)
        if block.num_together is None:
            assert torch.equal(block.first_stage(ids, scores.clone()), torch.cat(expected))
        else:
            assert torch.equal(block.second_stage(ids, scores.clone()), torch.cat(expected))


@pytest.mark.parametrize("name", sorted({*SCORES_ALONE, "softmax"} - set(SUMMING)))
def test_a_large_vocabulary_and_several_threads_change_no_bit(name: str) -> None:
    scores, before = rows(5, vocab_size=70_001), torch.get_num_threads()
    ids = torch.zeros(1, 9, dtype=torch.long)
    call = (lambda _, rows: rows.softmax(-1)) if name == "softmax" else MADE[name]
    torch.set_num_threads(2)
    try:
        assert torch.equal(call(ids, scores), torch.cat([call(ids, scores[i : i + 1]) for i in range(5)]))
    finally:
        torch.set_num_threads(before)


def test_each_kind_is_listed_once() -> None:
    assert sorted(PURE) == sorted({*SCORES_ALONE, *PREFIXES}) == sorted(MADE)
    assert set(SUMMING) <= set(SCORES_ALONE)
    assert set(COSTLY) <= set(PURE)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_costly_processors_take_as_many_positions_as_there_are_threads(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls = tiny.llama(), []
    ids = tiny.prompt(20)
    call = transformers.TopPLogitsWarper.__call__

    def counted(self: Any, input_ids: Any, scores: Any) -> Any:
        calls.append(len(scores))
        return call(self, input_ids, scores)

    answer = target.generate(ids, max_new_tokens=10, do_sample=False)[0].tolist()
    answer[-3] ^= 1  # the last draft but one or two is rejected
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    with autospec.wrap(target, drafts=[Oracle(answer)], policy=Fixed("oracle", block_length=8)):
        monkeypatch.setattr(transformers.TopPLogitsWarper, "__call__", counted)
        target.generate(ids, max_new_tokens=10, do_sample=True, temperature=0.01, top_p=0.9)
    block = {1: [1] * 7, 2: [2, 2, 2, 2], 3: [3, 3, 3]}[num_threads]  # positions 1 to 7 are judged, of 9
    assert calls[: 1 + len(block)] == [1, *block]


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_processor_that_fails_for_positions_in_company_fails_as_in_plain_decoding(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.llama()
    ids = tiny.prompt(20)
    call = transformers.TopPLogitsWarper.__call__

    def alone(self: Any, input_ids: Any, scores: Any) -> Any:
        if len(scores) > 1:
            raise RuntimeError("one row only")
        return call(self, input_ids, scores)

    answer = target.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.3, "top_p": 0.9}
    torch.manual_seed(3)
    plain = target.generate(ids, **options)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(transformers.TopPLogitsWarper, "__call__", alone)
    with autospec.wrap(target, drafts=[Oracle(answer)], policy=Fixed("oracle", block_length=4)) as speculator:
        torch.manual_seed(3)
        assert torch.equal(target.generate(ids, **options), plain)
        assert speculator.last_request is not None
        assert speculator.last_request.fallback_reason is None


class Counting(LogitsProcessor):
    """A user's processor."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        return scores


def test_stages_end_where_the_first_other_processor_stands() -> None:
    temperature, counting = transformers.TemperatureLogitsWarper(0.5), Counting()
    block = BlockProcessors(LogitsProcessorList([temperature, counting, temperature]), CPU)
    assert block.num_together == 1
    assert torch.equal(
        block.second_stage(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 3)), torch.full((1, 3), 2.0)
    )
    assert counting.calls == 1
    scores = rows()
    assert torch.equal(block.first_stage(torch.zeros(1, 9, dtype=torch.long), scores), scores / 0.5)
    assert counting.calls == 1


def test_a_list_with_a_call_of_its_own_is_called_position_by_position() -> None:
    class Special(LogitsProcessorList):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return super().__call__(input_ids, scores, **kwargs) + 1

    block = BlockProcessors(Special([transformers.TemperatureLogitsWarper(0.5)]), CPU)
    assert block.num_together == 1
    assert torch.equal(block.second_stage(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3)), torch.ones(1, 3))


@pytest.mark.parametrize("block_length", [1, 4, 8])
def test_known_processors_are_called_once_a_block(block_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = tiny.llama(), []
    ids = tiny.prompt(20)
    call = transformers.TemperatureLogitsWarper.__call__

    def counted(self: Any, input_ids: Any, scores: Any) -> Any:
        calls.append(len(scores))
        return call(self, input_ids, scores)

    answer = target.generate(ids, max_new_tokens=24, do_sample=False)[0].tolist()
    with autospec.wrap(
        target, drafts=[Oracle(answer, spoil_every=5)], policy=Fixed("oracle", block_length=block_length)
    ) as speculator:
        monkeypatch.setattr(transformers.TemperatureLogitsWarper, "__call__", counted)
        target.generate(ids, max_new_tokens=24, do_sample=True, temperature=0.01, top_k=5)
        record = speculator.last_request
    assert record is not None
    assert len(calls) == record.blocks + 1  # and once after the prompt
    assert sum(calls) == record.blocks + record.num_draft_tokens + 1


class OnDevice(torch.Tensor):
    """Stands for a tensor on an accelerator: what is computed from it stays there until someone looks."""

    looks = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            cls.looks += 1
            args = tuple(a.as_subclass(torch.Tensor) if isinstance(a, OnDevice) else a for a in args)
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


SAMPLED = {"do_sample": True, "temperature": 0.05, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("sampling", "options"),
    [("paired", {"do_sample": False}), ("paired", SAMPLED), ("maximal", SAMPLED)],
    ids=["greedy", "paired", "maximal"],
)
@pytest.mark.parametrize("kind", ["oracle", "assistant"])
def test_one_look_at_the_device_a_block(
    kind: str, sampling: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.llama()
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=24, do_sample=False)[0].tolist()
    source = Oracle(answer, spoil_every=5) if kind == "oracle" else Assistant(tiny.near_copy(target))
    forward, decode = TargetSession.forward, Loop._decode_block
    looks: list[int] = []

    def counted(self: Loop, *args: Any) -> Any:
        before = OnDevice.looks
        committed = decode(self, *args)
        looks.append(OnDevice.looks - before)
        return committed

    monkeypatch.setattr(TargetSession, "forward", lambda self, *a: forward(self, *a).as_subclass(OnDevice))
    monkeypatch.setattr(Loop, "_decode_block", counted)
    monkeypatch.setattr("autospec.speculator.TorchRandomness", partial(TorchRandomness, draws_ahead=True))
    with autospec.wrap(target, drafts=[source], policy=Fixed(kind, block_length=4), sampling=sampling) as speculator:
        target.generate(ids, max_new_tokens=24, eos_token_id=[1, 2], pad_token_id=0, **options)
        record = speculator.last_request
    assert record is not None
    assert record.num_accepted_tokens > 0
    assert looks[1:] == [1] * record.blocks


class TestDrawingAhead:
    """As on accelerators: all rows are drawn, looked at together, and the noise of those that do not count is kept."""

    def test_the_race_is_torchs_own(self) -> None:
        assert race_is_multinomial("cpu")
        probs = rows(3).softmax(-1)
        torch.manual_seed(0)
        expected = torch.multinomial(probs, 1)[:, 0]
        torch.manual_seed(0)
        assert torch.equal(race(probs, None), expected)

    @pytest.mark.parametrize("generator", [None, 3])
    def test_walks_and_noise_are_those_of_looking_at_each(self, generator: int | None) -> None:
        probs = rows(7).mul(0.3).softmax(-1)

        def walks(draws_ahead: bool) -> list[Any]:
            torch.manual_seed(8)
            own = None if generator is None else torch.Generator().manual_seed(generator)
            randomness = TorchRandomness(CPU, own, draws_ahead=draws_ahead)
            seen: list[Any] = []
            for count in (1, 3, 6, 7, 2, 6):
                fork = randomness.fork()
                expected = [fork.categorical(row) for row in probs[:count]]  # what this walk will draw
                if count == 3:
                    expected[1] += 1
                drawn = randomness.walk(probs[:count], expected)
                assert len(drawn) == min(count, 2 if count == 3 else count)
                randomness.rewind(len(drawn) - count // 6)
                seen += [drawn, randomness.categorical(probs[0])]
            return seen

        assert walks(True) == walks(False)

    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    def test_the_text_is_plain_decodings(self, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        monkeypatch.setattr("autospec.speculator.TorchRandomness", partial(TorchRandomness, draws_ahead=True))
        accepted = 0
        for seed in range(20):
            torch.manual_seed(seed)
            plain = target.generate(ids, max_new_tokens=16, do_sample=True, temperature=0.7, eos_token_id=[3, 9])
            after = torch.rand(())
            source = Oracle(plain[0].tolist(), spoil_every=4)
            with autospec.wrap(
                target, drafts=[source], policy=Fixed("oracle", block_length=5), sampling=sampling
            ) as speculator:
                torch.manual_seed(seed)
                found = target.generate(ids, max_new_tokens=16, do_sample=True, temperature=0.7, eos_token_id=[3, 9])
                assert speculator.last_request is not None
                accepted += speculator.last_request.num_accepted_tokens
            assert torch.equal(plain, found)
            assert torch.equal(after, torch.rand(()))
        assert accepted > 60

    def test_a_row_that_is_no_distribution_fails_as_in_plain_decoding(self) -> None:
        probs = torch.full((3, 5), 0.2)
        probs[1] = torch.nan
        for draws_ahead in (True, False):
            randomness = TorchRandomness(CPU, torch.Generator().manual_seed(0), draws_ahead=draws_ahead)
            first = randomness.fork().categorical(probs[0])
            state = randomness._generator.get_state()
            assert randomness.walk(probs, [first, 0]) == [first]  # what comes before it is said
            with pytest.raises(RuntimeError, match="probability tensor"):
                randomness.walk(probs[1:], [0])
            randomness._generator.set_state(state)
            assert randomness.walk(probs, [-1, 0]) == [first]  # not reached, not an error


@pytest.mark.parametrize("draws_ahead", [False, True])
@pytest.mark.parametrize("eos_at", range(1, 7))
def test_an_end_inside_a_block_uses_no_more_noise_than_plain_decoding(
    eos_at: int, draws_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.llama()
    ids = tiny.prompt(20)
    torch.manual_seed(5)
    whole = target.generate(ids, max_new_tokens=12, do_sample=True, temperature=0.5)
    eos = int(whole[0, 20 + eos_at])
    torch.manual_seed(5)
    plain = target.generate(ids, max_new_tokens=12, do_sample=True, temperature=0.5, eos_token_id=eos)
    after = torch.get_rng_state()
    monkeypatch.setattr("autospec.speculator.TorchRandomness", partial(TorchRandomness, draws_ahead=draws_ahead))
    with autospec.wrap(target, drafts=[Oracle(whole[0].tolist())], policy=Fixed("oracle", block_length=8)):
        torch.manual_seed(5)
        found = target.generate(ids, max_new_tokens=12, do_sample=True, temperature=0.5, eos_token_id=eos)
    assert torch.equal(plain, found)
    assert torch.equal(after, torch.get_rng_state())


class DrawsNoise(BaseStreamer):
    """A streamer that draws from torch's generator, as nobody should."""

    def put(self, value: Any) -> None:
        torch.rand(3)

    def end(self) -> None:
        """Nothing to do."""


class TestPartsWithEffects:
    """What users hand in may draw or fail: it does so where it does in plain decoding."""

    def test_a_streamer_that_draws(self) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7}
        torch.manual_seed(1)
        plain = target.generate(ids, streamer=DrawsNoise(), **options)
        after = torch.get_rng_state()
        with autospec.wrap(target, drafts=[Oracle(plain[0].tolist())], policy=Fixed("oracle", block_length=5)):
            torch.manual_seed(1)
            assert torch.equal(target.generate(ids, streamer=DrawsNoise(), **options), plain)
        assert torch.equal(torch.get_rng_state(), after)

    def test_a_function_of_the_users_that_asks_several_times(self) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.7, "eos_token_id": [3, 9]}

        def twice(model: Any, input_ids: Any, **kwargs: Any) -> Any:
            return model.generate(model.generate(ids, **options), **options)

        torch.manual_seed(1)
        plain = target.generate(ids, custom_generate=twice, max_new_tokens=99)
        after = torch.get_rng_state()
        source = Oracle(plain[0].tolist(), spoil_every=4)
        with autospec.wrap(target, drafts=[source], policy=Fixed("oracle", block_length=5)):
            torch.manual_seed(1)
            with pytest.warns(UserWarning, match="its own custom_generate"):
                found = target.generate(ids, custom_generate=twice, max_new_tokens=99)
        assert torch.equal(found, plain)
        assert torch.equal(torch.get_rng_state(), after)

    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    @pytest.mark.parametrize("warpers", [{"top_k": 9}, {"eta_cutoff": 0.01}], ids=["top-k", "eta"])
    @pytest.mark.parametrize("is_reached", [False, True])
    def test_scores_that_are_no_numbers(self, sampling: str, warpers: dict[str, Any], is_reached: bool) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.7, **warpers}
        torch.manual_seed(1)
        whole = target.generate(ids, **options)[0].tolist()
        inside = next(i for i in range(23, 30) if whole[i] not in whole[20:i])  # in the middle of a block
        bad = whole[inside] if is_reached else next(t for t in range(64) if t not in whole[20:])
        drafts = [*whole[:inside], bad, *whole[inside + 1 :]]
        if is_reached:
            drafts = whole
        broken = copy.deepcopy(target)
        overflow(broken, after=bad)
        seen: list[list[int]] = []
        for wrapped in (False, True):
            streamer = Collects()
            with ExitStack() as stack:
                if wrapped:
                    policy = Fixed("oracle", block_length=6)
                    stack.enter_context(
                        autospec.wrap(broken, drafts=[Oracle(drafts)], policy=policy, sampling=sampling)
                    )
                if is_reached:
                    stack.enter_context(pytest.raises((RuntimeError, ValueError)))
                torch.manual_seed(1)
                broken.generate(ids, streamer=streamer, **options)
            seen.append(streamer.tokens)
        assert seen[0] == seen[1]
        assert seen[0][20:] == (whole[20 : inside + 1] if is_reached else whole[20:])

    def test_a_policy_that_draws_does_not_bend_maximal_sampling(self) -> None:
        """What it has seen of the noise is used up; the token after it comes from other noise."""

        class Draws(Fixed):
            def choose(self, context: Any) -> Any:
                first = int(torch.multinomial(torch.tensor([[0.5, 0.3, 0.2]]), 1))
                return super().choose(context) if first == 0 else autospec.Action("none", 0)

        target, draft = (SyntheticModel(constant_table(*p), 3) for p in ((0.5, 0.3, 0.2), (0.3, 0.3, 0.4)))
        count, draws = 0, 3000
        torch.manual_seed(0)
        policy = Draws("assistant", block_length=1)
        with autospec.wrap(target, drafts=[Assistant(draft)], policy=policy, sampling="maximal"):
            for _ in range(draws):
                output = target.generate(torch.tensor([[0]]), max_new_tokens=3, do_sample=True, top_k=0)
                count += int(output[0, 2] == 0)
        assert count / draws == pytest.approx(0.5, abs=0.03)


def overflow(model: Any, after: int) -> None:
    """Make a model's logits nan after one token."""
    forward = model.forward

    @functools.wraps(forward)
    def overflowing(*args: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        outputs = forward(*args, input_ids=input_ids, **kwargs)
        width = outputs.logits.shape[1]
        outputs.logits[input_ids[:, -width:] == after] = torch.nan
        return outputs

    model.forward = overflowing


class Collects(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing to do."""


class TestRules:
    """Blocks of several positions, and the same positions one by one."""

    def test_greedy(self) -> None:
        scores = rows(4)
        best = scores.argmax(-1).tolist()
        assert Greedy().select(scores, best[:3], None) == (best, 3)
        assert Greedy().select(scores[:3], best[:3], None) == (best[:3], 3)
        assert Greedy().select(scores, [best[0], best[1] + 1, best[2]], None) == (best[:2], 1)
        assert Greedy().select(scores[:1], [], None) == (best[:1], 0)

    @pytest.mark.parametrize("rule_type", [Paired, Maximal])
    def test_one_hot_drafts_in_a_block_and_one_by_one(self, rule_type: Any) -> None:
        scores = rows(4)
        for seed in range(20):
            drafts = [int(t) for t in torch.multinomial(scores[:3].softmax(-1), 1, generator=_seeded(seed)).flatten()]
            whole, single = (rule_type(TorchRandomness(CPU, _seeded(seed))) for _ in range(2))
            tokens: list[int] = []
            for i in range(4):
                part = single.select(scores[i : i + 1], drafts[i : i + 1], None)
                tokens += part.tokens
                if not part.num_accepted:
                    break
            assert whole.select(scores, drafts, None) == (tokens, len(tokens) - 1)

    def test_drawn_drafts_are_accepted_as_often_as_theory_says(self) -> None:
        torch.manual_seed(0)
        p, q = torch.rand(3, 6).log_softmax(-1), torch.rand(2, 6).softmax(-1)
        accepted = [0, 0, 0]
        draws = 4000
        rule = Maximal(TorchRandomness(CPU))
        for _ in range(draws):
            drafts = torch.multinomial(q, 1)[:, 0].tolist()
            selection = rule.select(p, drafts, q)
            assert len(selection.tokens) == selection.num_accepted + 1
            accepted[selection.num_accepted] += 1
        rates = torch.minimum(p.exp()[:2], q).sum(-1).tolist()
        assert accepted[0] / draws == pytest.approx(1 - rates[0], abs=0.03)
        assert accepted[2] / draws == pytest.approx(rates[0] * rates[1], abs=0.03)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_tokens_grow_and_views_stay(is_mirrored: bool) -> None:
    tokens = Tokens(torch.arange(5, dtype=torch.int32)[None], is_mirrored)
    assert tokens.on_device.dtype == torch.long
    views = []
    for token in range(5, 2000):
        assert tokens.followed_by([7] * 40)[0, tokens.length :].tolist() == [7] * 40
        tokens.append(token)
        views.append(tokens.on_host)
        if token % 3 == 0:
            views.append(tokens.on_device)
    assert tokens.on_device.tolist() == [list(range(2000))]
    assert all(view[0].tolist() == list(range(len(view[0]))) for view in views[::97])
    tokens.append(2000)
    assert tokens.followed_by([1, 2])[0, -4:].tolist() == [1999, 2000, 1, 2]
    tokens.append(3)
    assert tokens.on_device[0, -3:].tolist() == [1999, 2000, 3]


class TestGenerators:
    """`generate(generator=...)` while the model is wrapped: a generator of the user's in place of the global one."""

    OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7}  # noqa: RUF012

    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    def test_the_text_is_that_of_the_global_one_in_its_state(self, sampling: str) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        for seed in range(10):
            torch.manual_seed(seed)
            plain = target.generate(ids, **self.OPTIONS)
            after = torch.get_rng_state()
            generator = _seeded(seed)
            torch.manual_seed(99)
            untouched = torch.get_rng_state()
            source = Oracle(plain[0].tolist(), spoil_every=4)
            with autospec.wrap(target, drafts=[source], policy=Fixed("oracle", block_length=5), sampling=sampling):
                found = target.generate(ids, generator=generator, **self.OPTIONS)
            assert torch.equal(plain, found)
            assert torch.equal(generator.get_state(), after)
            assert torch.equal(torch.get_rng_state(), untouched)

    def test_an_assistant_forks_the_users_generator(self) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        torch.manual_seed(3)
        plain = target.generate(ids, **self.OPTIONS)
        with autospec.wrap(
            target, drafts=[Assistant(tiny.near_copy(target))], policy=Fixed("assistant", block_length=4)
        ) as speculator:
            found = target.generate(ids, generator=_seeded(3), **self.OPTIONS)
            assert speculator.last_request is not None
            assert speculator.last_request.num_accepted_tokens > 3
        assert torch.equal(plain, found)

    def test_control_and_fallback_use_it_too(self) -> None:
        target = tiny.llama()
        ids = tiny.prompt(20)
        torch.manual_seed(3)
        plain = target.generate(ids, **self.OPTIONS)
        untouched = torch.get_rng_state()
        with autospec.wrap(target, drafts=["ngram"], policy="off") as speculator:
            generator = _seeded(3)
            with speculator.control():
                assert torch.equal(target.generate(ids, generator=generator, **self.OPTIONS), plain)
            assert not torch.equal(generator.get_state(), _seeded(3).get_state())
            with pytest.warns(UserWarning, match="use_cache=False"):
                found = target.generate(ids, generator=_seeded(3), use_cache=False, **self.OPTIONS)
            assert torch.equal(found, plain)
        assert torch.equal(torch.get_rng_state(), untouched)

    @pytest.mark.parametrize("wrong", [3, "cpu", torch.Generator])
    def test_anything_else_is_refused(self, wrong: Any) -> None:
        target = tiny.llama()
        with (
            autospec.wrap(target, policy="off"),
            pytest.raises(autospec.ConfigurationError, match=r"a torch\.Generator or None"),
        ):
            target.generate(tiny.prompt(), generator=wrong, max_new_tokens=2)
