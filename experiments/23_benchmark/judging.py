"""Greedy answers against plain decoding's, judged as `autospec verify` does; the target is walked along once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autospec.caches import append, new_cache
from autospec.decoding.ties import Difference, first_difference, tolerance
from autospec.verify import kind_of


@torch.no_grad()
def judge(
    target: Any, prompt: Sequence[int], expected: Sequence[int], found: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """A verdict for each of `found`, and where it parts from `expected`.

    Args:
        target: the model that gave all answers.
        expected: plain decoding's answer to `prompt`.
    """
    positions = [first_difference(expected, answer) for answer in found]
    inside = [p for p, answer in zip(positions, found, strict=True) if _is_inside(p, expected, answer)]
    logits = _plain_logits(target, prompt, expected[: max(inside)]) if inside else []
    verdicts = []
    for position, answer in zip(positions, found, strict=True):
        difference = None
        if position is not None and _is_inside(position, expected, answer):
            a, b = expected[position], answer[position]
            row = logits[position].double()
            limit = tolerance(float(row[[a, b]].abs().max()), target.dtype)
            difference = Difference(position, a, b, float(row[a] - row[b]), limit)
        elif position is not None:  # one answer went on after the other's end
            difference = Difference(position, None, None, math.inf, 0.0)
        verdicts.append({"verdict": kind_of(difference), "position": position})
    return verdicts


def _is_inside(position: int | None, expected: Sequence[int], answer: Sequence[int]) -> bool:
    return position is not None and position < min(len(expected), len(answer))


def _plain_logits(target: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[torch.Tensor]:
    """[i]: logits of the token after the prompt and `tokens[:i]`, by one-token forwards."""
    logits, cache = append(target, torch.tensor([list(prompt)]), new_cache(target))
    rows = [logits[0]]
    for token in tokens:
        logits, cache = append(target, torch.tensor([[token]]), cache)
        rows.append(logits[0])
    return rows
