"""Which forwards of fixed shape run a number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One forward."""

    num_tokens: int  # that are wanted
    width: int  # that are run, padding behind them included
    capacity: int  # of the cache that it looks at


def plan(num_tokens: int, length: int, widths: Sequence[int], capacities: Sequence[int]) -> list[Step]:
    """The forwards that append tokens to a cache, as few as the widths allow.

    Args:
        num_tokens: to append; they must fit into the largest capacity.
        length: tokens in the cache.
        widths: rising, 1 among them.
        capacities: rising.
    """
    steps = []
    while num_tokens > 0:
        room = capacities[-1] - length
        index = bisect_left(widths, num_tokens)
        if index == len(widths) or widths[index] > room:  # padding must not reach beyond the cache either
            index = bisect_left(widths, min(num_tokens, room) + 1) - 1
        width = widths[index]
        real = min(width, num_tokens)
        steps.append(Step(real, width, capacities[bisect_left(capacities, length + width)]))
        num_tokens -= real
        length += real
    return steps
