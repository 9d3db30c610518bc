"""Every branch of every random draw, with its probability: the other backend of `Randomness`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Branch:
    """Follows one prescribed path of draws, and notes what else could have been drawn."""

    def __init__(self, path: list[int]) -> None:
        self._path = path
        self._step = 0
        self.probability = 1.0
        self.alternatives: list[list[int]] = []  # of the draws made beyond the prescribed path

    def categorical(self, probs: Tensor) -> int:
        return self._choose([float(p) for p in probs])

    def bernoulli(self, probability: float) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def fork(self) -> Branch:
        raise NotImplementedError("coupled noise cannot be enumerated draw by draw")

    def _choose(self, probs: list[float]) -> int:
        possible = [index for index, p in enumerate(probs) if p > 0.0]
        if self._step == len(self._path):
            self.alternatives.extend([*self._path, other] for other in possible[1:])
            self._path = [*self._path, possible[0]]
        choice = self._path[self._step]
        self._step += 1
        self.probability *= probs[choice]
        return choice


def every_branch(run: Callable[[Branch], T]) -> Iterator[tuple[float, T]]:
    """(probability, result) of `run` for every sequence of draws it can make."""
    waiting: list[list[int]] = [[]]
    while waiting:
        branch = Branch(waiting.pop())
        result = run(branch)
        waiting.extend(branch.alternatives)
        yield branch.probability, result
