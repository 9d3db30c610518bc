"""The proposer of `autospec calibrate --vllm`: which steps it takes for pure ones, and which it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autospec.errors import ConfigurationError
from autospec.integrations.vllm.engine import ShapeError
from autospec.integrations.vllm.widths import BLOCK_LENGTHS, HELD, Widths, block_lengths
from tests.vllm_driver import VOCAB_SIZE, config


class Steps:
    """Calls a proposer as vLLM does, for requests of given lengths. Args: longest: draft tokens, at most."""

    def __init__(self, path: Path, longest: int = 8) -> None:
        self.path = path
        made = config(
            speculative_config__num_speculative_tokens=longest, additional_config={"autospec_steps": str(path)}
        )
        self.proposer = Widths(made)
        self.proposer.load_model(None)
        self.drafts: list[list[int]] = []

    def step(self, lengths: list[int], sampled: list[list[int]], num_tokens: int | None = None) -> list[list[int]]:
        """Args: lengths: of each request, the tokens sampled included; num_tokens: of the step, as vLLM tells."""
        padded = np.array([*lengths, 99, 99], dtype=np.int32)  # rows that are stale
        mapping = None if num_tokens is None else {"layer.0": np.zeros(num_tokens)}
        self.drafts = self.proposer.propose(
            sampled, padded, np.zeros((len(padded), 256), dtype=np.int32), slot_mappings=mapping
        )
        return self.drafts

    def written(self) -> list[int]:
        return [json.loads(line)["tokens"] for line in self.path.read_text(encoding="utf-8").splitlines()[1:]]

    @property
    def verified(self) -> int:
        return sum(len(tokens) + 1 for tokens in self.drafts)


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    found = Steps(tmp_path / "steps.jsonl")
    yield found
    found.proposer.close()


def test_steps_that_verify_what_was_drafted_are_written_down(steps: Steps) -> None:
    steps.step([5, 7], [[1], [2]])  # both prompts have been read
    expected = []
    for number in range(1, 30):
        expected.append(steps.verified)
        steps.step([5 + number, 7 + number], [[1], [VOCAB_SIZE - 1]], steps.verified)
        assert len({len(tokens) for tokens in steps.drafts}) == 1
        assert all(0 <= token < VOCAB_SIZE for tokens in steps.drafts for token in tokens)
    assert steps.written() == expected
    assert set(expected) == {2, 4, 6, 10, 18}
    lines = [json.loads(line) for line in steps.path.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["deployment"]["device"].startswith("vllm: cpu")
    assert all(0.0 < line["seconds"] < 60.0 for line in lines[1:])


def test_rows_may_move_and_accept_drafts(steps: Steps) -> None:
    steps.step([5, 7], [[1], [2]])
    verified = steps.verified
    steps.step([9, 6], [[1, 4], [2]])  # the other way round, one with a draft accepted
    assert steps.written() == [verified]


@pytest.mark.parametrize(
    ("lengths", "sampled", "cut"),
    [
        ([6, 8, 4], [[1], [2], [3]], 0),  # one more request
        ([6], [[1]], 0),  # one less
        ([6, 4], [[1], [3]], 0),  # another one in its place
        ([6, 7], [[1], []], 0),  # one that was not in the step
        ([6, 8], [[1], [2]], 1),  # drafts that were cut
    ],
)
def test_other_steps_are_not(steps: Steps, lengths: list[int], sampled: list[list[int]], cut: int) -> None:
    before = [5, 7]
    steps.step(before, [[1], [2]])
    while steps.verified == 2:  # until there are drafts
        before = [each + 1 for each in before]
        steps.step(before, [[1], [2]])
    num_written = len(steps.written())
    now = [each + before[0] - 5 for each in lengths]
    steps.step(now, sampled, steps.verified - cut)
    assert len(steps.written()) == num_written


def test_nothing_is_known_of_the_step_after_a_prompt_is_read(steps: Steps) -> None:
    steps.step([5, 7], [[1], []])  # the second prompt goes on
    assert steps.drafts[1] == []
    steps.step([6, 8], [[1], [2]])
    assert steps.written() == []


def test_lengths_are_tried_alike_and_up_to_the_longest(tmp_path: Path) -> None:
    found = list(islice(block_lengths(BLOCK_LENGTHS), 4 * HELD * len(BLOCK_LENGTHS)))
    assert {found.count(length) for length in BLOCK_LENGTHS} == {4 * HELD}
    steps = Steps(tmp_path / "s.jsonl", longest=3)
    steps.step([5], [[1]])
    seen = set()
    for number in range(40):
        steps.step([6 + number], [[1]])
        seen.add(len(steps.drafts[0]))
    steps.proposer.close()
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("additional", [None, {}, {"autospec_steps": ""}, []])
def test_a_file_is_needed(additional: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no autospec_steps"):
        Widths(config(additional_config=additional))


def test_calls_of_another_shape_end_it(steps: Steps) -> None:
    with pytest.raises(ShapeError):
        steps.proposer.propose("tokens")
