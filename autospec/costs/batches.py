"""What it costs one of several requests to be verified in one step with the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from autospec.costs.correction import winsorised_mean
from autospec.costs.steps import KEPT, LEAST_CHANGE, StepCosts

SAMPLED = "target, sampled"
"""The source of measured costs that are steps in which a request is sampled; greedy ones are under the target's."""


class BatchCosts:
    """Seconds of steps and of drafts, for policies that choose for one of several requests. Not thread-safe.

    Of all the tokens in a step it is the number that counts: a step verifies the drafts of each request and one token
    besides. Steps in which any request is sampled are kept apart from greedy ones: there the whole vocabulary is gone
    through for each draft token. Where nothing was seen of the one kind, the other one stands in for it: scaled by what
    both cost at the nearest width that was.

    Args:
        block_lengths: to choose between, ascending.
        sources: draft sources that can be used.
    """

    depends_on_context = False
    """A step's seconds are seen for contexts as they come."""

    def __init__(self, block_lengths: Sequence[int], sources: Iterable[str]) -> None:
        self._block_lengths = tuple(block_lengths)
        self._sources = frozenset(sources)
        self._steps = {False: StepCosts(), True: StepCosts()}  # by whether any request is sampled
        self._is_sampled = False
        self._draft_seconds: deque[float] = deque(maxlen=KEPT)
        self._draft = 0.0
        self._num_requests = 1
        self._eighths = 8  # of the requests, those that draft in a usual step
        self._drafting = 1.0
        self._version = 0

    @property
    def block_lengths(self) -> tuple[int, ...]:
        return self._block_lengths

    @property
    def version(self) -> int:
        """Grows whenever an estimate changes, and when another batch is served."""
        return self._version

    @property
    def num_steps(self) -> int:
        """Steps seen."""
        return sum(each.num_seen for each in self._steps.values())

    @property
    def num_requests(self) -> int:
        """For which estimates are given where the question names no number."""
        return self._num_requests

    def serve(self, num_requests: int, drafting_share: float = 1.0, *, is_sampled: bool = False) -> None:
        """From now on answer for one request among so many.

        Args:
            num_requests: in the batch. Beyond 8 those that differ by less than an eighth are taken as one.
            drafting_share: of the requests, those that have drafts in a usual step; in eighths, that are kept until it
                is half an eighth beyond.
            is_sampled: any of them, as far as is known.
        """
        num_requests, share = _rounded(num_requests), min(max(drafting_share, 0.0), 1.0)
        if not self._eighths - 1.5 < 8.0 * share <= self._eighths + 0.5:
            self._eighths = math.ceil(8.0 * share)
        drafting = max(1.0, num_requests * self._eighths / 8.0)
        if (num_requests, drafting, is_sampled) != (self._num_requests, self._drafting, self._is_sampled):
            self._num_requests, self._drafting, self._is_sampled = num_requests, drafting, is_sampled
            self._version += 1

    def step_seconds(self, num_tokens: float) -> float:
        """A step over so many tokens, of all requests together."""
        own, other = self._steps[self._is_sampled], self._steps[not self._is_sampled]
        if not own.is_known:
            return other.seconds(num_tokens)
        edge = min(max(num_tokens, own.narrowest), own.widest)
        is_other_nearer = other.narrowest < edge if num_tokens < edge else other.widest > edge
        if num_tokens == edge or not other.is_known or not is_other_nearer:
            return own.seconds(num_tokens)
        return own.seconds(edge) * other.seconds(num_tokens) / other.seconds(edge)

    def verify_seconds(self, num_tokens: int, context_tokens: int, num_requests: int | None = None) -> float:
        """A step in which a request verifies `num_tokens` tokens (drafts + 1), as far as it is this request's doing.

        All requests wait for the tokens of each. Where those that draft do as this one does, the tokens of a step are
        one of each request, and the drafts of these; what they add to a plain step all requests bear, and only those
        that draft gain by it.

        Args:
            num_tokens: of one request.
            context_tokens: not looked at.
            num_requests: in the batch, all of which draft; None: as `serve` was told.
        """
        requests = self._num_requests if num_requests is None else num_requests
        drafting = self._drafting if num_requests is None else float(requests)
        plain = self.step_seconds(requests)
        if num_tokens <= 1:
            return plain
        wide = self.step_seconds(requests + drafting * (num_tokens - 1))
        return max(plain + (wide - plain) * requests / drafting, min(plain, wide))

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        """One proposal, for one request; infinite for a source that is not there."""
        return self._draft if source in self._sources else math.inf

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        """Was no step seen that wide?"""
        if source is not None:
            return source not in self._sources
        return self._num_requests + self._drafting * (num_tokens - 1) > max(
            each.widest for each in self._steps.values()
        )

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn what a step took, drafting left out. Args: num_tokens: of all requests, which are as last served."""
        if num_tokens < 1 or not 0.0 < seconds < math.inf:
            return
        if self._steps[self._is_sampled].observe(num_tokens, seconds):
            self._settle()

    def observe_draft(self, seconds: float) -> None:
        """Learn what drafting for one request took."""
        if 0.0 < seconds < math.inf:
            self._draft_seconds.append(seconds)

    def points(self, *, is_sampled: bool = False) -> list[tuple[int, float]]:
        """Tokens and seconds of the widths that are believed, ascending, of one kind of steps."""
        return self._steps[is_sampled].points()

    def begin_with(self, points: Iterable[tuple[int, float]], *, is_sampled: bool = False) -> None:
        """Take over what another one has seen, as `points` gives it; it counts as a few steps of each width.

        Args:
            points: tokens and seconds; such as cannot be are left out.
            is_sampled: of which kind of steps.
        """
        self._steps[is_sampled].begin_with(points)
        self._version += 1

    def _settle(self) -> None:
        draft = winsorised_mean(self._draft_seconds) if self._draft_seconds else 0.0
        is_other_draft = abs(draft - self._draft) > LEAST_CHANGE * self.step_seconds(1)
        if self._steps[self._is_sampled].settle() or is_other_draft:
            self._draft = draft
            self._version += 1


def _rounded(num_requests: int) -> int:
    """Numbers of requests that differ by less than an eighth are taken as one."""
    if num_requests <= 8:
        return max(1, num_requests)
    step: int = 1 << (num_requests.bit_length() - 4)
    return int(num_requests // step * step)
