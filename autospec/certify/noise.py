"""Every branch of every random draw, weighted by its probability: the second backend of `Randomness`.

The generator's stream is a sequence of independent uniform numbers, one for each draw. A draw looks up in which segment
of the cumulative distribution its number lies. Here a number is not drawn but known only to lie in an interval; a draw
splits the interval and every part is followed. A fork reads the same numbers ahead of time, as a copied torch generator
does, so that what a coupled draft learns of the noise and what the target makes of it later are enumerated jointly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Path:
    """One sequence of choices through the tree of draws: a prescribed beginning, then always the first possibility."""

    def __init__(self, prescribed: list[int]) -> None:
        self._prescribed = prescribed
        self._taken: list[int] = []
        self.probability = 1.0
        self.alternatives: list[list[int]] = []  # beginnings of the paths that branch off after the prescribed part
        self.intervals: list[tuple[float, float]] = []  # [position in the stream], what is known of each number

    def choose(self, weights: list[float]) -> int:
        """An index, and its weight (they sum to 1) into the path's probability."""
        depth = len(self._taken)
        if depth < len(self._prescribed):
            choice = self._prescribed[depth]
        else:
            choice = 0
            self.alternatives.extend([*self._taken, other] for other in range(1, len(weights)))
        self._taken.append(choice)
        self.probability *= weights[choice]
        return choice


class EnumeratedNoise:
    """Draws along one path. Args: path: shared by all forks; position: of the next number in the stream."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self._position = position
        self._walk_started = position

    def categorical(self, probs: Tensor) -> int:
        edges = torch.cumsum(probs.to(torch.float64), dim=-1)
        return self._draw([0.0, *(edges / edges[-1]).tolist()])

    def category(self, probs: Tensor) -> Tensor:
        return torch.tensor(self.categorical(probs))

    def walk(self, probs: Tensor, expected: Sequence[int]) -> list[int]:
        self._walk_started = self._position
        tokens: list[int] = []
        for row, wanted in zip_longest(probs, expected):
            tokens.append(self.categorical(row))
            if tokens[-1] != wanted:
                break
        return tokens

    def rewind(self, num_draws: int) -> None:
        self._position = self._walk_started + num_draws

    def num_successes(self, probabilities: Tensor) -> Tensor:
        count = 0
        for probability in probabilities.tolist():
            if self._draw([0.0, probability, 1.0]) == 1:
                break
            count += 1
        return torch.tensor(count)

    def fork(self) -> EnumeratedNoise:
        return EnumeratedNoise(self._path, self._position)

    def _draw(self, edges: list[float]) -> int:
        """The segment between two neighbouring edges in which the next number lies."""
        intervals = self._path.intervals
        if self._position == len(intervals):
            intervals.append((0.0, 1.0))
        low, high = intervals[self._position]
        parts = []
        for segment, (left, right) in enumerate(pairwise(edges)):
            left, right = max(left, low), min(right, high)
            if right > left:
                parts.append((segment, left, right))
        choice = self._path.choose([(right - left) / (high - low) for _, left, right in parts])
        segment, left, right = parts[choice]
        intervals[self._position] = (left, right)
        self._position += 1
        return segment


def every_branch(run: Callable[[EnumeratedNoise], T]) -> Iterator[tuple[float, T]]:
    """(probability, result) of `run` for every sequence of draws it can make; `run` must start afresh each time."""
    waiting: list[list[int]] = [[]]
    while waiting:
        path = Path(waiting.pop())
        result = run(EnumeratedNoise(path))
        waiting.extend(path.alternatives)
        yield path.probability, result
