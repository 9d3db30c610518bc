"""The suffix source: its automaton and pool against brute force, what it proposes, and what it keeps."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_drafts import request

import autospec
from autospec.drafts import Suffix, SuffixPool
from autospec.drafts.automaton import SuffixAutomaton
from autospec.drafts.pool import DEPTH, END
from autospec.errors import ConfigurationError, DraftError

pytestmark = pytest.mark.compat


def occurrences(part: list[int], *texts: list[int]) -> int:
    return sum(text[i : i + len(part)] == part for text in texts for i in range(len(text) - len(part) + 1))


def random_text(rng: random.Random, longest: int) -> list[int]:
    kinds = rng.choice([2, 3, 6])
    return [rng.randrange(kinds) for _ in range(rng.randrange(1, longest))]


class TestAutomaton:
    @pytest.mark.parametrize("seed", range(40))
    def test_counts_and_matches_are_those_of_brute_force(self, seed: int) -> None:
        text = random_text(random.Random(seed), 60)
        automaton = SuffixAutomaton()
        for end, token in enumerate(text, start=1):
            automaton.extend([token])
            so_far = text[:end]
            earlier = [n for n in range(1, end) if occurrences(so_far[end - n :], so_far[:-1])]
            assert automaton.longest_match(1)[1] == max(earlier, default=0)
        parts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, min(len(text), i + 12) + 1)}
        for part in parts:
            assert automaton.occurrences(part) == occurrences(list(part), text)
        assert automaton.occurrences([9]) == 0
        assert automaton.num_states <= 2 * len(text) + 1

    def test_the_most_frequent_continuation_and_its_score(self) -> None:
        automaton = SuffixAutomaton()
        automaton.extend([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 8, 1, 2])
        state, length = automaton.longest_match(2)
        assert length == 2
        assert automaton.continuation(state, 2, 0.01) == ([3, 4], pytest.approx([1.0, 2 / 3]))
        assert automaton.continuation(state, 5, 0.9)[0] == [3]

    def test_a_repetition_goes_on_into_its_own_draft(self) -> None:
        automaton = SuffixAutomaton()
        automaton.extend([1, 2, 3] * 3)
        state, _ = automaton.longest_match(2)
        assert automaton.continuation(state, 7, 0.1)[0] == [1, 2, 3, 1, 2, 3, 1]

    def test_work_for_each_token_is_bounded_in_a_text_of_one_token(self) -> None:
        automaton = SuffixAutomaton()
        automaton.extend([7] * 20_000)
        assert automaton.num_states == 20_001
        assert 0 < automaton.occurrences([7]) <= 20_000


class TestPool:
    @pytest.mark.parametrize("seed", range(40))
    def test_matches_are_those_of_brute_force(self, seed: int, tmp_path: Path) -> None:
        rng = random.Random(seed)
        texts = [random_text(rng, 30) for _ in range(rng.randrange(1, 6))]
        pool = SuffixPool()
        for text in texts:
            pool.add(text)
        pool.save(tmp_path / "pool.npz")
        last = random_text(rng, 14)
        for index in (pool.index, SuffixPool.load(tmp_path / "pool.npz").index):
            runs = [tuple(index.texts[start : start + DEPTH]) for start in index.starts]
            assert runs == sorted(runs)
            length, first, end = index.longest_match(last, 1)
            assert length == max((n for n in range(1, len(last) + 1) if occurrences(last[-n:], *texts)), default=0)
            if not length:
                continue
            run = last[-length:]
            assert end - first == occurrences(run, *texts)
            tokens, scores = index.continuation(length, first, end, 8, 0.1)
            expected = 1.0
            for token, score in zip(tokens, scores, strict=True):
                expected *= occurrences([*run, token], *texts) / occurrences(run, *texts)
                assert score == pytest.approx(expected)
                run.append(token)

    def test_the_bound_holds_and_evicted_texts_are_gone(self) -> None:
        pool = SuffixPool(max_tokens=2_000)
        largest = 0
        for number in range(10_000):
            pool.add([number % 50_000, number % 97, 3, number % 89, 4])
            largest = max(largest, pool.num_tokens, len(pool.index.texts))
        assert largest <= 2_000
        pool.build()
        assert pool.index.longest_match([17, 17, 3], 2)[0] < 3  # the text of number 17 went long ago
        assert pool.index.longest_match([9_999, 9_999 % 97], 2)[0] == 2
        pool.clear()
        assert pool.num_tokens == 0
        assert pool.index.longest_match([9_999, 9_999 % 97], 1)[0] == 0

    def test_a_text_longer_than_the_bound_keeps_its_end(self) -> None:
        pool = SuffixPool(max_tokens=10)
        pool.add(range(100))
        assert pool.index.texts.tolist() == [*range(91, 100), END]

    def test_no_match_runs_from_one_text_into_the_next(self) -> None:
        pool = SuffixPool()
        pool.add([1, 2])
        pool.add([3, 4])
        pool.build()
        length, first, end = pool.index.longest_match([1, 2], 1)
        assert length == 2
        assert pool.index.continuation(length, first, end, 4, 0.1) == ([], [])

    def test_threads_add_while_others_read(self) -> None:
        pool = SuffixPool(max_tokens=5_000)
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(100):
                    pool.add(random_text(rng, 40))
                    length, first, end = pool.index.longest_match([0, 1, 0], 1)
                    pool.index.continuation(max(length, 1), first, end, 4, 0.1) if length else None
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

    @pytest.mark.parametrize("damage", ["missing", "folder", "short", "text", "other keys", "version", "ids", "pickle"])
    def test_damaged_files_are_named(self, damage: str, tmp_path: Path) -> None:
        path = tmp_path / "pool.npz"
        pool = SuffixPool()
        pool.add(range(50))
        pool.save(path)
        whole = dict(np.load(path, allow_pickle=False))
        if damage == "missing":
            path.unlink()
        elif damage == "folder":
            path.unlink()
            path.mkdir()
        elif damage == "short":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif damage == "text":
            path.write_text("not a pool", encoding="utf-8")
        elif damage == "other keys":
            np.savez(path, texts=whole["texts"])
        elif damage == "version":
            np.savez(path, **{**whole, "format": np.asarray(99)})
        elif damage == "ids":
            np.savez(path, **{**whole, "starts": whole["starts"] + 1})
        else:
            np.savez(path, **{**whole, "texts": np.asarray([{}], dtype=object)})
        with pytest.raises(DraftError, match=r"pool\.npz: "):
            SuffixPool.load(path)
        if not path.is_file():
            with pytest.raises(DraftError, match=r"pool\.npz: "):
                Suffix(path)
            return
        with pytest.warns(UserWarning, match=r"suffix will not draft: .*pool\.npz: "):
            source = Suffix(path)
        target = tiny.llama()
        plain = target.generate(tiny.prompt(20), max_new_tokens=8, do_sample=False)
        for policy in ("fixed:suffix:3", "fixed:ngram:3", "off"):  # said also where it is never chosen
            with autospec.wrap(target, drafts=["ngram", source], policy=policy) as speculator:
                with pytest.warns(UserWarning, match="suffix switched off: "):
                    assert torch.equal(target.generate(tiny.prompt(20), max_new_tokens=8, do_sample=False), plain)
                assert speculator.last_request is not None
                assert str(path) in (speculator.last_request.notes or "")

    def test_a_large_pool_is_sorted_beside_the_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.drafts.pool._SMALL", 30)
        builders: list[str] = []
        build = SuffixPool.build

        def seen(self: SuffixPool) -> None:
            builders.append(threading.current_thread().name)
            build(self)

        monkeypatch.setattr(SuffixPool, "build", seen)
        pool = SuffixPool()
        pool.add(range(20))
        pool.add(range(20, 60))
        while any(thread.name == "autospec-pool" for thread in threading.enumerate()):
            time.sleep(0.001)
        assert builders == ["MainThread", "autospec-pool"]
        assert pool.index.longest_match([7, 25, 26], 2)[0] == 2


class TestSuffix:
    def test_drafts_from_the_pool_where_that_promises_more(self) -> None:
        source = Suffix()
        source.learn(request(), [5, 6, 7, 8, 9, 10])
        source.pools[""].build()
        assert source.start(request()).propose([1, 2, 5, 6], 8).tokens == [7, 8, 9, 10]
        assert source.start(request()).propose([1, 2, 3, 4, 1, 2], 2).tokens == [3, 4]
        assert source.start(request(vocab_size=9)).propose([1, 2, 5, 6], 8).tokens == [7, 8]
        assert source.start(request()).propose([1, 2, 3], 8).tokens == []

    def test_a_running_request_does_not_see_later_answers(self) -> None:
        source = Suffix()
        session = source.start(request())
        source.learn(request(), [5, 6, 7, 8])
        source.pools[""].build()
        assert session.propose([1, 5, 6], 4).tokens == []

    def test_segments_keep_to_themselves(self) -> None:
        source = Suffix(per_segment=True)
        mine, other = (request(segment=name) for name in ("mine", "other"))
        source.learn(mine, [5, 6, 7, 8])
        source.pools["mine"].build()
        assert source.start(mine).propose([1, 5, 6], 4).tokens == [7, 8]
        assert source.start(other).propose([1, 5, 6], 4).tokens == []

    def test_pools_of_many_segments_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.drafts.suffix.MAX_SEGMENT_POOLS", 3)
        source = Suffix(per_segment=True)
        for name in ("a", "b", "c", "a", "d", "e"):
            source.learn(request(segment=name), [5, 6, 7, 8])
        assert list(source.pools) == ["", "a", "d", "e"]

    def test_learning_can_be_switched_off(self) -> None:
        source = Suffix(learns=False)
        source.learn(request(), [5, 6, 7, 8])
        assert source.pools[""].num_tokens == 0

    def test_the_second_answer_comes_from_the_first(self) -> None:
        """Through the decoder: answers are learnt when requests end, prompts are not."""
        target, source = tiny.llama(), Suffix()
        ids = tiny.prompt(11, period=11)
        accepted = []
        plain = target.generate(ids, max_new_tokens=24, do_sample=False)
        with autospec.wrap(target, drafts=[source], policy="fixed:suffix:6") as speculator:
            for _ in range(2):
                assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=False), plain)
                assert speculator.last_request is not None
                accepted.append(speculator.last_request.num_accepted_tokens)
                source.pools[""].build()
        assert source.pools[""].num_tokens == 2 * 25
        assert source.pools[""].index.texts.tolist()[:24] == plain[0, 11:].tolist()
        assert accepted[1] > accepted[0]

    def test_what_cannot_be_learnt_costs_no_answer(self) -> None:
        class Full(Suffix):
            def learn(self, request: Any, answer: Any) -> None:
                raise MemoryError("full")

        target = tiny.llama()
        with autospec.wrap(target, drafts=[Full()], policy="fixed:suffix:3") as speculator:
            with pytest.warns(UserWarning, match="suffix did not learn from the answer: MemoryError: full"):
                output = target.generate(tiny.prompt(20), max_new_tokens=5, do_sample=False)
            assert output.shape == (1, 25)
            assert speculator.last_request is not None
            assert "MemoryError" in (speculator.last_request.notes or "")

    def test_a_pool_of_another_tokenizer_is_refused(self, tmp_path: Path) -> None:
        source = Suffix()
        source.attach(tiny.llama(), tiny.tokenizer())
        source.pools[""].add([1, 2, 3])
        source.pools[""].save(tmp_path / "pool.npz")
        Suffix(tmp_path / "pool.npz").attach(tiny.llama(), tiny.tokenizer())
        with pytest.raises(DraftError, match="another tokenizer"):
            Suffix(tmp_path / "pool.npz").attach(tiny.llama(), tiny.tokenizer(order=[1, 0, *range(2, tiny.VOCAB)]))

    @pytest.mark.parametrize(
        "options",
        [
            {"min_match": 0},
            {"min_match": True},
            {"min_score": 0},
            {"min_score": 1.5},
            {"min_score": "high"},
            {"max_pool_tokens": 1},
            {"learns": 1},
            {"per_segment": None},
            {"pool": 7},
        ],
        ids=str,
    )
    def test_settings_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            Suffix(**options)
