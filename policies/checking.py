"""Is a state one that `goodput` or `guard` could have made? Asked before it is merged, and before it is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.policies.brake import Brake
from autospec.policies.confidence import Confidence
from autospec.policies.counts import Counts
from autospec.policies.reading import check_numbers

State = Mapping[str, Any]


def check_guard(state: State) -> None:
    """Not that of the policy inside.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, ArithmeticError: it is no such state.
    """
    for segment in state["segments"].values():
        check_numbers((segment[name] for name in ("blocks", "paused_until", "pause", "trips")), low=0.0)
        check_numbers([segment["paused_until"]], high=segment["blocks"] + segment["pause"])
        Brake.restored(segment["brake"])
        if not isinstance(segment["is_on"], bool):
            raise TypeError(f"{segment['is_on']!r:.40} is neither true nor false")
    check_numbers([*state["plain"], state["plain_ratio"]], low=1e-9)


def check_goodput(state: State) -> None:
    """Raises: LookupError, TypeError, ValueError, AttributeError, ArithmeticError: it is no such state."""
    model = state["acceptance"]
    for found in (model["by_source"], *model["by_segment"].values()):
        for counts in found.values():
            Counts.restored(counts)
    for confidence in model["confidence"].values():
        Confidence.restored(confidence)
    for segment in state["segments"].values():
        check_numbers((segment[name] for name in ("block_length", "tokens", "seconds", "blocks")), low=0.0)
        check_numbers([segment["budget"]])
        for block, evidence in segment["tried"].values():
            check_numbers([block], low=0.0, high=segment["blocks"])
            check_numbers([evidence], low=0.0, high=1.0)
        if not isinstance(segment["source"], str):
            raise TypeError(f"{segment['source']!r:.40} is no source")
    for tokens, seconds in state.get("catch_up", {}).values():
        check_numbers([tokens, seconds], low=0.0)
    if not all(isinstance(source, str) for source in state["offering"]):
        raise TypeError("sources that are no names")
