"""Which prompts are answered where: no two cells have one in common, as sources may remember answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """Prompts that are answered so many at once, in one way of choosing tokens."""

    concurrency: int
    decoding: str
    prompts: tuple[Any, ...]  # prompts.Prompt of 23_benchmark

    @property
    def chunks(self) -> list[tuple[Any, ...]]:
        """Between two of them arms take turns: single prompts where they are answered alone, else all together."""
        return [(prompt,) for prompt in self.prompts] if self.concurrency == 1 else [self.prompts]


@dataclass(frozen=True)
class Plan:
    rehearsed: tuple[Cell, ...]  # to try settings on, and to learn on
    measured: tuple[Cell, ...]


def make_plan(
    segments: Mapping[str, Sequence[Any]],
    concurrencies: Sequence[int],
    decodings: Sequence[str],
    limits: Sequence[int],
    other_limits: Sequence[int],
    seed: int = 0,
) -> Plan:
    """Deal the prompts out.

    Args:
        segments: prompts of each.
        limits: prompts of each segment in a cell, for each concurrency; `other_limits`: the same of those rehearsed.

    Raises:
        ValueError: a segment has too few.
    """
    needed = len(decodings) * (sum(limits) + sum(other_limits))
    shuffled: dict[str, list[Any]] = {}
    for segment, prompts in segments.items():
        if len(prompts) < needed:
            raise ValueError(f"segment {segment} has {len(prompts)} prompts, {needed} are needed: lower the limits")
        shuffled[segment] = random.Random(f"{seed} {segment}").sample(list(prompts), needed)
    decks = [iter(prompts) for prompts in shuffled.values()]

    def deal(counts: Sequence[int]) -> Iterator[Cell]:
        for concurrency, count in zip(concurrencies, counts, strict=True):
            for decoding in decodings:
                prompts = tuple(next(deck) for _ in range(count) for deck in decks)  # segments in turn
                if prompts:
                    yield Cell(concurrency, decoding, prompts)

    measured = tuple(deal(limits))
    return Plan(rehearsed=tuple(deal(other_limits)), measured=measured)
