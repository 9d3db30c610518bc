"""Scoring several recorded answers at once gives what scoring them one by one gives, and costs fewer forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_families import RECURRENT, make
from test_translation import permuted, shuffled

from autospec.certify.cases import Costs
from autospec.certify.synthetic import SyntheticModel, random_table
from autospec.drafts import Assistant, CrossTokenizer, EarlyExit, NGram, Suffix
from autospec.drafts.drawing import confidence
from autospec.errors import AutospecError, ConfigurationError
from autospec.scores import ScoredRequest, batches
from autospec.scores import scorer as scorer_module
from autospec.scores.acceptance import confidences
from autospec.scores.folder import ScoreFolder
from autospec.scores.rows import why_one_by_one
from autospec.scores.scorer import Scorer
from autospec.traffic.request import TrafficRequest
from autospec.traffic.shards import frames
from autospec.tune.scoring import check_costs, host_seconds, score_traffic
from autospec.types import PhaseSeconds

WHEN = datetime(2026, 1, 1, tzinfo=UTC)
LENGTHS = ((3, 40), (50, 2), (9, 9), (30, 21), (3, 1), (12, 33), (70, 12), (9, 10))
"""Tokens of prompts and answers."""

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0}
SHAPED = {**SAMPLED, "repetition_penalty": 1.3, "top_p": 0.9, "top_k": 30}
COSTLY = {**SAMPLED, "no_repeat_ngram_size": 3, "typical_p": 0.8}
OPTIONS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampled": SAMPLED, "shaped": SHAPED, "costly": COSTLY}


def request(number: int, prompt: Sequence[int], output: Sequence[int], **options: Any) -> TrafficRequest:
    return TrafficRequest(
        request_id=f"r{number}",
        started_at=WHEN + timedelta(seconds=number),
        segment="s",
        prompt=tuple(prompt),
        output=tuple(output),
        options={"max_new_tokens": 64, **options},
    )


def answered(
    target: Any, options: dict[str, Any], lengths: Sequence[tuple[int, int]] = LENGTHS
) -> list[TrafficRequest]:
    found = []
    for number, (prompt_tokens, output_tokens) in enumerate(lengths):
        prompt = tiny.prompt(prompt_tokens, seed=number, period=5)
        torch.manual_seed(number)
        output = target.generate(prompt, **{**options, "max_new_tokens": output_tokens})[0, prompt_tokens:]
        found.append(request(number, prompt[0].tolist(), output.tolist(), **options))
    return found


def sources_for(target: Any) -> dict[str, Any]:
    """Each time anew: pools remember."""
    subset = permuted(tiny.near_copy(target, seed=3), shuffled(40), extra_rows=1, unknown_id=40)
    found: dict[str, Any] = {
        "ngram": NGram(min_ngram=1),
        "suffix": Suffix(min_match=1),
        "assistant": Assistant(tiny.near_copy(target)),
        "subset": Assistant(subset),
        "likeliest": Assistant(tiny.near_copy(target, seed=4), greedy=True),
        "early_exit": EarlyExit(1),
    }
    for source in found.values():
        source.attach(target, None)
    return found


def assert_same(one: ScoredRequest, other: ScoredRequest | Exception, tolerance: float = 1e-5) -> None:
    assert isinstance(other, ScoredRequest)
    assert replace(one, drafts={}, offers={}) == replace(other, drafts={}, offers={})
    assert one.drafts.keys() == other.drafts.keys()
    for name, ours in one.drafts.items():
        theirs = other.drafts[name]
        for column in ("accept", "margin", "entropy"):
            assert np.allclose(getattr(ours, column), getattr(theirs, column), atol=tolerance), (name, column)
        assert ours.rank.tolist() == theirs.rank.tolist()
    for name, offer in one.offers.items():
        for column in ("num_tokens", "num_right", "match_length"):
            assert getattr(offer, column).tolist() == getattr(other.offers[name], column).tolist()
        assert offer.scores == other.offers[name].scores


class Forwards:
    """Counts the forwards of a model, and keeps the shapes of what they were given."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.logits: list[tuple[int, ...]] = []
        model.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))
        self.logits.append(tuple(output.logits.shape))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches, and several forwards for each."""
    monkeypatch.setattr(batches, "ON_HOST", batches.Bounds(8, 200))
    monkeypatch.setattr(batches, "MOST_BYTES", 4 * tiny.VOCAB * 24)


class TestScores:
    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    @pytest.mark.parametrize("name", OPTIONS)
    def test_they_are_those_of_one_by_one(self, name: str, sampling: str) -> None:
        target = tiny.llama()
        requests = answered(target, OPTIONS[name])
        alone = Scorer(target, sources_for(target), sampling=sampling)
        together = Scorer(target, sources_for(target), sampling=sampling)
        expected = [alone.score(each) for each in requests]
        for one, other in zip(expected, together.score_batch(requests), strict=True):
            assert_same(one, other)
        accept = np.concatenate([each.drafts["assistant"].accept for each in expected])
        assert 0.05 < accept.mean() < 0.95  # there is something to tell apart
        assert sum(int(each.offers["suffix"].num_right.sum()) for each in expected) > 0

    @pytest.mark.usefixtures("small")
    def test_greedy_and_sampled_requests_in_one_batch(self) -> None:
        target = tiny.llama(dtype=torch.float32)
        mixed = [
            replace(each, request_id=f"{name} {each.request_id}")
            for name in OPTIONS
            for each in answered(target, OPTIONS[name], LENGTHS[:4])
        ]
        alone, together = (Scorer(target, sources_for(target)) for _ in range(2))
        for each, other in zip(mixed, together.score_batch(mixed), strict=True):
            assert_same(alone.score(each), other, tolerance=1e-4)

    @pytest.mark.usefixtures("small")
    def test_sliding_windows(self) -> None:
        target = tiny.mistral(window=8)
        requests = answered(target, SHAPED)
        alone, together = (Scorer(target, {"assistant": Assistant(tiny.mistral(seed=1, window=8))}) for _ in range(2))
        for each, other in zip(requests, together.score_batch(requests), strict=True):
            assert_same(alone.score(each), other)

    def test_confidences_are_those_that_a_stop_is_asked_with(self) -> None:
        logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
        margins, entropies = confidences(logits)
        for row, margin, entropy in zip(logits, margins.tolist(), entropies.tolist(), strict=True):
            assert (margin, entropy) == pytest.approx(confidence(row), abs=1e-6)
        margin, entropy = confidences(logits[:, :1])
        assert margin.tolist() == [1.0] * 5
        assert entropy.tolist() == [0.0] * 5


class TestForwards:
    def test_there_are_fewer(self) -> None:
        target, draft = tiny.llama(), tiny.llama(seed=1)
        requests = answered(target, SAMPLED)
        scorer = Scorer(target, {"assistant": Assistant(draft)})
        scorer.score_batch(requests[:2])  # tries the models out
        of_target, of_draft = Forwards(target), Forwards(draft)
        for each in requests:
            scorer.score(each)
        alone = len(of_target.shapes), len(of_draft.shapes)
        del of_target.shapes[:], of_draft.shapes[:]
        scorer.score_batch(requests)
        assert all(shape[0] == len(requests) for shape in of_target.shapes)
        assert len(of_target.shapes) * 4 < alone[0]
        assert len(of_draft.shapes) * 4 < alone[1]

    def test_greedy_requests_need_none_of_the_target(self) -> None:
        target = tiny.llama()
        requests = answered(target, GREEDY)
        scorer = Scorer(target, {"assistant": Assistant(tiny.llama(seed=1))})
        of_target = Forwards(target)
        assert all(isinstance(each, ScoredRequest) for each in scorer.score_batch(requests))
        assert not of_target.shapes

    def test_tokens_and_logits_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tiny.llama()
        requests = answered(target, SAMPLED, [*LENGTHS, (150, 40)])
        scorer = Scorer(target, {"assistant": Assistant(tiny.llama(seed=1))})
        scorer.score_batch(requests[:2])
        monkeypatch.setattr(batches, "ON_HOST", batches.Bounds(3, 160))
        monkeypatch.setattr(batches, "MOST_BYTES", 4 * tiny.VOCAB * 10)
        together, groups = batches.score_together, []

        def noting(target: Any, batch: Sequence[batches.Answer], **options: Any) -> None:
            groups.append([each.num_tokens for each in batch])
            together(target, batch, **options)

        monkeypatch.setattr(scorer_module, "score_together", noting)
        of_target = Forwards(target)
        for one, other in zip([scorer.score(each) for each in requests], scorer.score_batch(requests), strict=True):
            assert_same(one, other)
        assert groups == [[3, 17, 18], [42, 44, 50]]  # then 51 and 81, which are too long together
        assert all(rows * kept <= 10 for rows, kept, _ in of_target.logits if rows > 1)
        assert (1, 150) in of_target.shapes  # longer than the bound: alone

    def test_texts_of_about_one_length_go_together(self) -> None:
        target = tiny.llama()
        scorer = Scorer(target, {"assistant": Assistant(tiny.llama(seed=1))})
        answers = [scorer._answer(each, scorer._checked(each)) for each in answered(target, SAMPLED)]
        groups = [[each.num_tokens for each in group] for group in batches.packed([a for a in answers if a])]
        assert groups == [sorted(sum(each) - 1 for each in LENGTHS)]


def stored(folder: ScoreFolder) -> list[str]:
    """Ids in the order of the file."""
    return [each.request_id for each in folder._stored()]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def requests(target: Any) -> list[TrafficRequest]:
    found = answered(target, SHAPED, LENGTHS * 3)
    waiting = replace(found[4], request_id="waiting", output=())
    return [*found[:9], waiting, *found[9:]]


@pytest.fixture(scope="module")
def expected(target: Any, requests: list[TrafficRequest]) -> dict[str, ScoredRequest]:
    scorer = Scorer(target, sources_for(target))
    return {each.request_id: scorer.score(each) for each in requests if len(each.output) > 1}


class TestTraffic:
    def check(self, folder: ScoreFolder, expected: dict[str, ScoredRequest]) -> None:
        found = folder.read()
        assert [each.request_id for each in found] == list(expected)
        for each in found:
            assert_same(expected[each.request_id], each, tolerance=2e-5)  # five digits are kept

    @pytest.mark.parametrize("batch", [1, 5, 32])
    def test_arrival_is_kept(
        self,
        target: Any,
        requests: list[TrafficRequest],
        expected: dict[str, ScoredRequest],
        tmp_path: Path,
        batch: int,
    ) -> None:
        folder = ScoreFolder(tmp_path, {})
        scorer = Scorer(target, sources_for(target))
        given = list(score_traffic(requests, scorer, folder, batch=batch))
        assert [each for each, _ in given] == requests
        left_out = {each.request_id: why for each, why in given if why is not None}
        assert left_out == {
            "waiting": "no answer yet (autospec traffic complete)",
            **{each.request_id: "an answer of one token" for each in requests if len(each.output) == 1},
        }
        assert stored(folder) == list(expected)
        self.check(folder, expected)

    def test_nothing_waits_longer_than_the_bound(
        self, target: Any, requests: list[TrafficRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("autospec.tune.scoring.BATCH_TOKENS", 120)
        scorer = Scorer(target, {"ngram": NGram()})
        seen: list[list[int]] = []
        monkeypatch.setattr(
            scorer, "score_batch", lambda batch: seen.append([len(e.prompt) + len(e.output) for e in batch]) or []
        )
        with pytest.raises(RuntimeError):  # the first answer that is not there
            list(score_traffic(requests, scorer, ScoreFolder(tmp_path, {})))
        assert seen[0] == [43, 52, 18]
        del seen[:]
        monkeypatch.setattr(
            scorer, "score_batch", lambda batch: seen.append([len(e.output) for e in batch]) or [OSError()] * len(batch)
        )
        assert len(list(score_traffic(requests, scorer, ScoreFolder(tmp_path, {}), batch=4))) == len(requests)
        assert all(len(each) <= 4 for each in seen)

    @pytest.mark.parametrize("lost_after", [0, 3, 7, 12])
    def test_it_goes_on_in_the_middle_of_a_batch(
        self,
        target: Any,
        requests: list[TrafficRequest],
        expected: dict[str, ScoredRequest],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        lost_after: int,
    ) -> None:
        folder = ScoreFolder(tmp_path, {})
        add, kept = folder.add, []

        def dying(scored: ScoredRequest) -> None:
            if len(kept) == lost_after:
                raise AutospecError("the disk is full")
            kept.append(scored.request_id)
            add(scored)

        monkeypatch.setattr(folder, "add", dying)
        with pytest.raises(AutospecError, match="the disk is full"):
            list(score_traffic(requests, Scorer(target, sources_for(target)), folder, batch=6))
        again = ScoreFolder(tmp_path, {})
        assert stored(again) == list(expected)[:lost_after] == kept
        of_target = Forwards(target)
        given = list(score_traffic(requests, Scorer(target, sources_for(target)), again, batch=6))
        assert of_target.shapes
        assert [each for each, _ in given] == requests
        assert stored(again) == list(expected)
        self.check(again, expected)

    def test_a_reader_that_leaves_loses_nothing_of_its_batch(
        self, target: Any, requests: list[TrafficRequest], expected: dict[str, ScoredRequest], tmp_path: Path
    ) -> None:
        folder = ScoreFolder(tmp_path, {})
        scoring = score_traffic(requests, Scorer(target, sources_for(target)), folder, batch=6)
        next(scoring)
        scoring.close()
        assert stored(folder) == list(expected)[:6]

    def test_pools_know_the_past_though_parts_of_it_are_damaged(
        self, target: Any, requests: list[TrafficRequest], expected: dict[str, ScoredRequest], tmp_path: Path
    ) -> None:
        folder = ScoreFolder(tmp_path, {})
        list(score_traffic(requests, Scorer(target, sources_for(target)), folder))
        assert folder.damage is None
        path = tmp_path / "scores.jsonl.zst"
        data = bytearray(path.read_bytes())
        places = [frame.position + frame.num_bytes // 2 for frame in frames(memoryview(bytes(data)))]
        for place in (places[2], places[5], places[10]):
            data[place] ^= 0xFF
        path.write_bytes(bytes(data))
        again = ScoreFolder(tmp_path, {})
        list(score_traffic(requests, Scorer(target, sources_for(target)), again))
        self.check(again, expected)
        assert again.damage == f"3 damaged parts of {path} left out; their requests were scored again"
        data[places[2] :] = b""
        path.write_bytes(bytes(data))
        assert len(again.done()) == 2
        assert again.damage == f"1 damaged part of {path} left out; their requests were scored again"


class TestWhatCannotBeScored:
    def test_it_costs_itself_alone(self) -> None:
        target, draft = tiny.llama(), tiny.llama(seed=1, max_position_embeddings=64)
        good = answered(target, SAMPLED, LENGTHS[:4])
        bad = {
            1: request(10, [1, 2**32 - 1], [1, 2], **SAMPLED),
            2: request(11, [1, 2], [1, 700], **SAMPLED),
            5: request(13, [1, 2], [1, 2], attention_mask=[[1]]),
            6: request(14, [1, 2], []),
            7: request(15, [1, 2], [3, 4, 5, 6], **{**SAMPLED, "temperature": -1.0}),
        }
        places = iter(good)
        batch = [bad[index] if index in bad else next(places) for index in range(len(good) + len(bad))]
        alone, together = (Scorer(target, {"assistant": Assistant(draft), "suffix": Suffix()}) for _ in range(2))
        found = together.score_batch(batch)
        for index, (each, other) in enumerate(zip(batch, found, strict=True)):
            if index not in bad:
                assert_same(alone.score(each), other)
                continue
            with pytest.raises((ConfigurationError, TypeError, ValueError)) as caught:
                alone.score(each)
            assert type(other) is caught.type, index
            assert str(other) == str(caught.value)
        assert isinstance(found[1], ConfigurationError)
        assert str(found[2]) == "token ids that the target does not know"

    def test_a_text_beyond_a_drafts_window_costs_that_draft_alone(self) -> None:
        """As in service, where the source is off for the request and the others go on."""
        target, draft = tiny.llama(), tiny.llama(seed=1, max_position_embeddings=64)
        good = answered(target, SAMPLED, LENGTHS[:2])
        batch = [good[0], request(12, [1] * 60, [2] * 20, **SAMPLED), good[1]]
        alone, together = (Scorer(target, {"assistant": Assistant(draft), "suffix": Suffix()}) for _ in range(2))
        for each, other in zip(batch, together.score_batch(batch), strict=True):
            assert isinstance(other, ScoredRequest)
            assert_same(alone.score(each), other)
            assert set(other.drafts) == (set() if each is batch[1] else {"assistant"})
            assert set(other.offers) == {"suffix"}

    def test_a_processor_that_fails_in_the_middle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tiny.llama()
        requests = answered(target, SHAPED, LENGTHS[:4])
        scorer = Scorer(target, {"assistant": Assistant(tiny.llama(seed=1))})
        expected = [scorer.score(each) for each in requests]
        processed, calls = batches.processed, []

        def failing(processors: Any, text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if text.shape[1] >= 30 and text[0, :9].tolist() == list(requests[3].prompt[:9]):
                calls.append(text.shape)
                raise ValueError("no such token")
            return processed(processors, text, scores)

        monkeypatch.setattr(batches, "processed", failing)
        found = scorer.score_batch(requests)
        assert len(calls) == 1
        assert isinstance(found[3], ValueError)
        for one, other in zip(expected[:3], found[:3], strict=True):
            assert_same(one, other)

    def test_a_forward_that_fails_leaves_them_to_be_scored_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = tiny.llama(), tiny.llama(seed=1)
        requests = answered(target, SHAPED)
        scorer = Scorer(target, {"assistant": Assistant(draft)})
        expected = [scorer.score(each) for each in requests]
        forward, rows = draft.forward, []

        def failing(input_ids: torch.Tensor, **kwargs: Any) -> Any:
            rows.append(len(input_ids))
            if len(input_ids) > 2:
                raise RuntimeError("out of memory")
            return forward(input_ids, **kwargs)

        monkeypatch.setattr(draft, "forward", failing)
        for one, other in zip(expected, scorer.score_batch(requests), strict=True):
            assert_same(one, other)
        assert len(requests) in rows
        assert rows[-1] == 1


class TestOneByOne:
    """Where several texts in a forward would be wrong."""

    @pytest.mark.parametrize("family", RECURRENT)
    def test_states_that_are_carried_along(self, family: str) -> None:
        model = make(family, RECURRENT[family], dtype=torch.float32)
        assert why_one_by_one(model, 20) is not None

    def test_short_convolutions(self) -> None:
        model = make("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, dtype=torch.float32)
        assert "layers" in str(why_one_by_one(model, 20))

    def test_positions_that_stretch_with_the_longest_text(self) -> None:
        rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
        model = make("llama", {"rope_parameters": rope, "max_position_embeddings": 40})
        assert why_one_by_one(model, 40) is None
        assert why_one_by_one(model, 41) == "rotary positions stretch beyond 40 tokens"

    def test_what_looks_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.llama()
        forward = model.forward

        def peeking(**kwargs: Any) -> Any:
            output = forward(**kwargs)
            output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
            return output

        monkeypatch.setattr(model, "forward", peeking)
        assert "several tokens" in str(why_one_by_one(model, 20))

    def test_rows_that_change_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.llama()
        forward = model.forward

        def mixing(**kwargs: Any) -> Any:
            output = forward(**kwargs)
            output.logits = output.logits + output.logits.mean(dim=0, keepdim=True)
            return output

        monkeypatch.setattr(model, "forward", mixing)
        assert why_one_by_one(model, 20) == "a text beside another one gives other logits than by itself"

    def test_ordinary_models_need_it_not(self) -> None:
        for family, options in (("llama", {}), ("gpt2", {}), ("opt", {}), ("bloom", {}), ("gemma2", {})):
            assert why_one_by_one(make(family, options), 20) is None, family
        for family, options in (("mixtral", {}), ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2})):
            assert why_one_by_one(make(family, options, dtype=torch.float32), 20) is None, family

    def test_a_model_of_one_row_is_scored_all_the_same(self) -> None:
        target, draft = (SyntheticModel(random_table(seed, 3), 3) for seed in (61, 62))
        assert "one text at a time" in str(why_one_by_one(target, 10))
        requests = [request(n, [0, 1, 0], [1, 2, 0, 1, n % 3], do_sample=True, top_k=0) for n in range(4)]
        alone, together = (Scorer(target, {"assistant": Assistant(draft)}) for _ in range(2))
        for each, other in zip(requests, together.score_batch(requests), strict=True):
            assert_same(alone.score(each), other)

    def test_a_draft_that_reads_other_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, order = tiny.llama(), shuffled(64)
        requests = answered(target, SAMPLED, LENGTHS[:4])
        own = permuted(tiny.near_copy(target), order)
        source = CrossTokenizer(own, tiny.tokenizer(order=order), method="shared")
        source.attach(target, tiny.tokenizer())
        scorer = Scorer(target, {"cross_tokenizer": source})
        expected = [scorer.score(each) for each in requests]
        read = scorer_module.AssistantSession.read

        def as_two(self: Any, prompt: Sequence[int], answer: Sequence[int]) -> Any:
            text = read(self, prompt, answer)
            return replace(text, ids=[0, *text.ids], ends=[end + 1 for end in text.ends])

        of_target = Forwards(target)
        for one, other in zip(expected, scorer.score_batch(requests), strict=True):
            assert_same(one, other)
        assert max(of_target.shapes)[0] == 4  # each token is one of the draft's
        monkeypatch.setattr(scorer_module.AssistantSession, "read", as_two)
        expected = [scorer.score(each) for each in requests]
        del of_target.shapes[:]
        for one, other in zip(expected, scorer.score_batch(requests), strict=True):
            assert_same(one, other)
        assert max(of_target.shapes)[0] == 1


def control(number: int, verify: float, blocks: int = 10, **changes: Any) -> TrafficRequest:
    """Plainly decoded: a correction of 0.02 s, and 0.03 s of other work in each block."""
    made = replace(
        request(number, [1] * 50, [2] * (blocks + 1), **GREEDY),
        is_control=True,
        policy="off",
        seconds=PhaseSeconds(1.0, 0.0, verify * blocks, 0.02 * blocks, 0.0, 0.03 * blocks),
        acceptance_lengths={1: blocks},
    )
    return replace(made, **changes)


class TestCosts:
    """`Costs` has 1.05 s for a plain step."""

    def test_controls_are_compared(self) -> None:
        requests = [control(n, 1.05 * 1.03 + 0.05 * 0.03) for n in range(3)]
        assert host_seconds(requests) == pytest.approx(0.05)
        check = check_costs(requests, Costs(), 0.05)
        assert (check.requests, check.blocks) == (3, 30)
        assert check.predicted_seconds == pytest.approx(30 * 1.10)
        assert check.ratio == pytest.approx(1 / 1.03)
        assert check.note == "plain decoding of 3 control requests took 1.03 times what the cost model says"

    def test_each_context_has_its_own_price(self) -> None:
        class Longer(Costs):
            def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
                return 1.0 if context_tokens < 64 else 2.0

        (check,) = (check_costs([control(0, 1.0, blocks=20)], Longer(), None),)
        assert check.predicted_seconds == pytest.approx(13 * 1.0 + 7 * 2.0)  # contexts of 51 to 70 tokens
        assert check.measured_seconds == pytest.approx(20.0)

    @pytest.mark.parametrize(("factor", "is_asked"), [(1.14, False), (1.16, True), (0.8, True)])
    def test_another_device_is_asked_about(self, factor: float, is_asked: bool) -> None:
        note = check_costs([control(0, 1.05 * factor)], Costs(), None).note
        assert note.startswith(f"plain decoding of 1 control request took {factor:.2f} times what the cost model says")
        assert note.endswith(": recorded on another device, or on a busy one?") is is_asked

    @pytest.mark.parametrize(
        "changes",
        [
            {"is_control": False, "policy": "auto"},
            {"seconds": None},
            {"seconds": PhaseSeconds(other=12.0), "acceptance_lengths": {}},
            {"seconds": PhaseSeconds(prefill=0.1, other=1.0), "acceptance_lengths": {1: 10}, "origin": "import:vllm"},
            {"num_draft_tokens": 4, "acceptance_lengths": {1: 6, 2: 2}},
        ],
    )
    def test_without_controls_that_is_said(self, changes: dict[str, Any]) -> None:
        for requests in ([], [control(0, 1.05, **changes)]):
            check = check_costs(requests, Costs(), 0.05)
            assert (check.requests, check.ratio) == (0, None)
            assert check.note == "no control requests in this traffic: seconds are the cost model's alone"

    def test_plain_requests_count_though_they_were_chosen_by_nobody(self) -> None:
        assert check_costs([control(0, 1.05, is_control=False)], Costs(), 0.05).requests == 1

    def test_phases_of_a_log_are_no_host_seconds(self) -> None:
        """Of a server's metrics all decoding is one phase."""
        log = control(1, 0.0, seconds=PhaseSeconds(prefill=0.1, other=60.0), origin="import:vllm")
        assert host_seconds([log]) is None
        assert host_seconds([log, control(0, 1.0)]) == pytest.approx(0.05)
