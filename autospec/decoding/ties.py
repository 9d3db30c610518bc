"""Is a differing greedy token a numerical tie or a fault?

A forward over k + 1 tokens rounds differently from k + 1 forwards over one token, so that the argmax of two nearly
equal logits may flip. A difference counts as a tie only if the target's own plain forward, one token at a time, puts
both tokens within a stated tolerance of each other; anything else is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autospec.caches import append, new_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# in units of the last place of the larger logit, from experiments/03_rounding_noise: a little above the largest change
# seen there between one forward over a block and forwards over one token each
_UNITS = {torch.bfloat16: 8.0, torch.float16: 8.0, torch.float32: 128.0, torch.float64: 128.0}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy answers part, and how far apart the target sees the two tokens there."""

    position: int  # in the answer
    expected: int | None  # plain decoding's token; None where its answer had ended
    found: int | None
    logit_gap: float  # the target's logit of the expected token less that of the found one
    tolerance: float

    @property
    def is_tie(self) -> bool:
        return abs(self.logit_gap) <= self.tolerance


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which two answers differ, a missing token included; None when they are the same."""
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(found) else min(len(expected), len(found))


@torch.no_grad()
def examine(
    target: PreTrainedModel, prompt: Tensor, expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    """Judge the first difference of two greedy answers by the target's own plain forwards.

    Args:
        target: the model that gave both answers.
        prompt: [1, n], without padding.
        expected: plain decoding's answer.
        found: the answer to judge.

    Returns:
        None when the answers are the same.
    """
    position = first_difference(expected, found)
    if position is None:
        return None
    if position >= min(len(expected), len(found)):  # one answer went on after the other's end: never a tie
        longer = expected if len(expected) > len(found) else found
        token, is_expected = longer[position], longer is expected
        return Difference(
            position,
            expected=token if is_expected else None,
            found=None if is_expected else token,
            logit_gap=math.inf,
            tolerance=0.0,
        )
    logits, cache = append(target, prompt, new_cache(target))
    for token in expected[:position]:
        logits, cache = append(target, prompt.new_tensor([[token]]), cache)
    a, b = expected[position], found[position]
    gap = float(logits[0, a].double() - logits[0, b].double())
    return Difference(position, a, b, gap, tolerance(float(logits[0, [a, b]].abs().max()), target.dtype))


def tolerance(logit: float, dtype: torch.dtype) -> float:
    """How far apart two logits of about this size may lie and still count as tied in this dtype."""
    unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1.0)))
    return _UNITS[dtype] * unit
