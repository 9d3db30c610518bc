"""Requests recognised by their text, and by nothing less."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from autospec.integrations.vllm.rows import History, match


@dataclass(eq=False)
class Kept:
    history: History


def kept(*tokens: int) -> Kept:
    return Kept(History(np.array(tokens, dtype=np.int32)))


def rows(*texts: list[int]) -> np.ndarray:
    found = np.full((len(texts) + 2, 64), 99, dtype=np.int32)  # stale tokens behind each text
    for row, text in enumerate(texts):
        found[row, : len(text)] = text
    return found


def test_histories_grow_and_shrink() -> None:
    chance = random.Random(0)
    history, text = History(np.array([1, 2], dtype=np.int32)), [1, 2]
    for _ in range(200):
        new = [chance.randrange(100) for _ in range(chance.randrange(1, 9))]
        history.append(new)
        text += new
        if chance.random() < 0.2:
            history.cut(1)
            text.pop()
        assert history.text == text
        assert history.is_begin_of(np.array([*text, 5], dtype=np.int32), len(text))
        assert not history.is_begin_of(np.array([*text, 5], dtype=np.int32), len(text) + 1)


def test_a_row_that_goes_on_is_the_same_request() -> None:
    a, b = kept(1, 2, 3), kept(4, 5)
    found = match([a, b], [], [3, 2], rows([1, 2, 3, 7], [4, 5, 8]))
    assert found.found == [a, b]
    assert found.is_sure == [True, True]
    assert found.gone == []


def test_requests_that_moved_are_found_and_those_that_left_are_gone() -> None:
    a, b, c = kept(1, 2, 3), kept(4, 5, 6), kept(7, 8)
    found = match([a, b, c], [], [2, 3], rows([7, 8, 1], [4, 5, 6, 1]))
    assert found.found == [c, b]
    assert found.gone == [a]
    assert found.is_sure == [True, True]


def test_one_token_that_differs_is_another_request() -> None:
    a = kept(1, 2, 3, 4)
    for text in ([9, 2, 3, 4, 5], [1, 2, 9, 4, 5], [1, 2, 3, 9, 5]):
        found = match([a], [], [4], rows(text))
        assert found.found == [None]
        assert found.gone == [a]
    assert match([a], [], [5], rows([1, 2, 3, 4, 5, 6])).found == [None]  # a conversation that goes on
    assert match([a], [], [3], rows([1, 2, 3, 4])).found == [None]


def test_one_that_was_away_comes_back_to_any_row() -> None:
    a, b = kept(1, 2, 3), kept(4, 5)
    found = match([b], [a], [2, 3], rows([4, 5, 1], [1, 2, 3, 1]))
    assert found.found == [b, a]


def test_twins_are_sure_as_long_as_nothing_moves() -> None:
    a, b, c = kept(1, 2), kept(1, 2), kept(3, 4)
    assert match([a, b, c], [], [2, 2, 2], rows([1, 2, 9], [1, 2, 9], [3, 4, 9])).is_sure == [True, True, True]
    found = match([c, a, b], [], [2, 2], rows([1, 2, 9], [1, 2, 9]))
    assert sorted(map(id, filter(None, found.found))) == sorted(map(id, (a, b)))
    assert found.is_sure == [False, False]
    found = match([a, b], [], [2], rows([1, 2, 9]))  # one of them left: which one, nobody can tell
    assert found.is_sure == [False]
    assert match([a, c], [b], [2, 2], rows([1, 2, 9], [3, 4, 9])).is_sure == [True, True]


def test_steps_without_a_call_are_steps_of_all_rows() -> None:
    a, b = kept(1, 2), kept(3, 4)
    found = match([a, b], [], [4, 3], rows([1, 2, 8, 9, 5], [3, 4, 7, 5]))
    assert found.found == [a, b]
    assert found.num_missed == [2, 1]
    assert match([a], [], [4], rows([1, 2, 8, 9, 5])).found == [None]  # it may be a conversation that goes on
    assert match([a], [], [4], rows([1, 2, 8, 9, 5]), may_have_missed=True).found == [a]
    assert match([a], [], [4], rows([1, 2, 8, 9, 5]), may_have_missed=True, ends={8}).found == [None]
    assert match([a, b], [], [2, 3], rows([1, 2, 8], [3, 4, 7, 5])).found == [a, None]
