"""What every policy is: a rule that chooses an action before each block and learns from its outcome. No torch here."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from autospec.errors import ConfigurationError
from autospec.types import Action, BlockContext, BlockOutcome

MAX_SEGMENTS = 10_000
"""Segments that a policy remembers; beyond it the one not seen for longest is forgotten."""


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a setting outside its range.

    Raises:
        ConfigurationError: names the setting, its value and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigurationError(f"{name}={value!r}: a number from {low:g} to {high:g} is needed")


class Policy(Protocol):
    """Chooses draft source and block length. Calls are serialised by the controller.

    It may have:

    - `settings`, the arguments it was made with, as plain JSON values, but for costs, which belong to the device.
    - `wants_offers`: True where `choose` reads `BlockContext.offers`. Retrieval sources are then asked before each
      block. `asks(segment, sources)` where it wants those of some of them, or not in every segment.
    - `verify_width(num_tokens, context_tokens)`: to how many tokens a forward over so many of a block is padded, since
      a wider one costs less on this device; asked after drafting, from any thread.
    - `is_control(request)`, called once before a request's first block: True to have it decoded plainly throughout, as
      a control, by the model's own forwards. Its blocks are observed, too; where others are prepared, and the policy
      reckons with costs, without seconds.
    - `is_off`: True where every action is a plain step and nothing is learned: it is then neither asked nor told.
    - `state()`, what it has learned, as plain JSON values, and `restore(state)`: it then chooses as the other would
      have. Both are there or neither.
    """

    name: str

    def choose(self, context: BlockContext) -> Action:
        """The action for the next block; its source is one of `context.sources` or `none`."""

    def observe(self, outcome: BlockOutcome) -> None:
        """Learn what the last block did."""


def asked(policy: Policy, segment: str, sources: Collection[str]) -> Collection[str]:
    """Of the retrieval sources, those whose offers a policy reads in a segment."""
    chosen = getattr(policy, "asks", None)
    if chosen is not None:
        found: Collection[str] = chosen(segment, sources)
        return found
    return sources if getattr(policy, "wants_offers", False) else ()


class Unmeasured:
    """Stands in for costs where a policy will never choose, as its name is only being checked."""

    block_lengths: tuple[int, ...] = ()
    version = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 1.0

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return math.inf

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return True


class CostEstimates(Protocol):
    """Seconds on the device at hand."""

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Block lengths worth choosing between, ascending, 0 not listed."""

    @property
    def version(self) -> int:
        """Grows whenever an estimate changes: what was reckoned from them stands as long as it is the same."""

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """One target forward over `num_tokens` tokens (drafts + 1) after a context."""

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        """One proposal of `block_length` tokens; infinite where the source cannot be used."""

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        """Does an answer lie beyond what was measured? Of verification, or of a source's `num_tokens` drafts."""
