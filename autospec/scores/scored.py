"""One recorded answer, and for each of its positions what each draft source would have made of it.

Conditional on the answer y being what the target said, the draft token at a position was accepted with a probability
that follows from the target's and the draft's distributions there, independently of the other positions given y. So
these numbers price every block length and every policy that looks at nothing later than what it decides on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Counts = NDArray[np.int16]


@dataclass(frozen=True)
class DraftScores:
    """A model draft along one answer. Index i is the answer's i-th token; the first comes from the prompt's forward."""

    accept: Floats  # [n], probability that the draft's token was accepted, given the answer
    margin: Floats  # [n], of the draft's two largest probabilities, the difference
    entropy: Floats  # [n], of the draft's distribution, nats
    rank: Counts  # [n], tokens that the draft thought likelier than the answer's own


@dataclass(frozen=True)
class OfferScores:
    """A retrieval source along one answer: what it would have proposed after i tokens of it, and how much came true."""

    num_tokens: Counts  # [n], proposed; 0: a miss
    num_right: Counts  # [n], of these, the first ones that the answer goes on with
    match_length: Counts  # [n], last tokens that were found again
    scores: tuple[tuple[float, ...], ...]  # [n][num_tokens], how likely each and all before it are; () where unsaid


@dataclass(frozen=True)
class ScoredRequest:
    """What a walk along one recorded answer needs."""

    request_id: str
    started_at: datetime  # UTC
    segment: str
    prompt_tokens: int
    output_tokens: int  # n
    max_new_tokens: int
    do_sample: bool
    temperature: float  # 0 when greedy
    drafts: Mapping[str, DraftScores] = field(default_factory=dict)
    offers: Mapping[str, OfferScores] = field(default_factory=dict)
    conversation: str | None = None
    turn: int = 0  # of those that were asked one after the other, and have one time
    prefill_seconds: float | None = None  # as measured when it was recorded

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Those that were scored."""
        return (*self.offers, *self.drafts)
