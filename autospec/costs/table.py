"""Measured seconds by tokens verified and by context, read off between the measured points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Curve:
    """Median seconds on a grid: one row per context, one column per number of tokens. No smoothing across steps."""

    contexts: tuple[int, ...]  # ascending
    tokens: tuple[int, ...]  # ascending
    seconds: tuple[tuple[float, ...], ...]  # [contexts][tokens]

    def at(self, num_tokens: int, context_tokens: int) -> float:
        """Linear between grid points; at the edges the nearest context and, in tokens, the last slope."""
        by_tokens = [
            float(np.interp(context_tokens, self.contexts, [row[i] for row in self.seconds]))
            for i in range(len(self.tokens))
        ]
        if num_tokens > self.tokens[-1] and len(self.tokens) > 1:
            slope = (by_tokens[-1] - by_tokens[-2]) / (self.tokens[-1] - self.tokens[-2])
            return by_tokens[-1] + max(0.0, slope) * (num_tokens - self.tokens[-1])
        return float(np.interp(num_tokens, self.tokens, by_tokens))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of verification and of each draft source; what a policy asks."""

    block_lengths: tuple[int, ...]
    verify: Curve  # tokens = drafts + 1
    drafts: Mapping[str, Curve]  # tokens = block length

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """One target forward over `num_tokens` tokens (drafts + 1) after `context_tokens` tokens."""
        return self.verify.at(num_tokens, context_tokens)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        """One proposal of `block_length` tokens; infinite for a source that could not be timed."""
        curve = self.drafts.get(source)
        return curve.at(block_length, context_tokens) if curve is not None else math.inf
