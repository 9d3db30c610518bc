"""What the states of policies look like: bounded to the segments seen last, and checked before they are merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from autospec.errors import ConfigurationError
from autospec.policies.base import Policy
from autospec.policies.confidence import Confidence
from autospec.policies.counts import Counts
from autospec.policies.goodput import Goodput
from autospec.policies.guard import Guard

State = Mapping[str, Any]

_BY_SEGMENT = ("segments", "by_segment", "weights")  # where policies keep what belongs to one, seen last at the end


def newest_segments(state: Any, limit: int) -> Any:
    """The state without the segments that were not among the `limit` seen last."""
    if not isinstance(state, Mapping):
        return state
    bounded = {
        name: newest_segments(_last(value, limit) if name in _BY_SEGMENT else value, limit)
        for name, value in state.items()
    }
    if _are_pairs(bounded.get("parts")):  # of a policy that consists of several
        bounded["parts"] = [[name, newest_segments(part, limit)] for name, part in bounded["parts"]]
    return bounded


def check(policy: Policy, state: Any) -> None:
    """Is this a state that the policy could have made? Only asked of policies whose states are merged.

    Raises:
        ConfigurationError: it is not.
    """
    try:
        if type(policy) is Guard:
            _check_guard(state)
            if hasattr(policy.policy, "restore"):
                check(policy.policy, state["policy"])
        elif type(policy) is Goodput:
            _check_goodput(state)
    except ConfigurationError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"this is no state of policy {policy.name!r}: {type(error).__name__}: {error}"
        ) from error


def _last(kept: Any, limit: int) -> Any:
    if isinstance(kept, Mapping) and len(kept) > limit:
        return dict(list(kept.items())[-limit:])
    return kept[-limit:] if _are_pairs(kept) else kept


def _are_pairs(kept: Any) -> bool:
    """Of a name and what belongs to it."""
    return isinstance(kept, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) for each in kept
    )


def _check_guard(state: State) -> None:
    for segment in state["segments"].values():
        _check_numbers(segment[name] for name in ("blocks", "paused_until", "pause", "trips"))
        _check_numbers(segment["brake"].values())
    _check_numbers(state["plain"])
    _check_numbers([state["plain_ratio"]], above=0.0)


def _check_goodput(state: State) -> None:
    model = state["acceptance"]
    for found in (model["by_source"], *model["by_segment"].values()):
        for counts in found.values():
            _check_counts(counts)
    for confidence in model["confidence"].values():
        Confidence.restored(confidence)
        np.linalg.cholesky(confidence["precision"])  # it is one of a Gaussian
        _check_numbers(confidence["weights"])
    for segment in state["segments"].values():
        _check_numbers(segment[name] for name in ("block_length", "tokens", "seconds", "budget", "blocks"))
        for block, evidence in segment["tried"].values():
            _check_numbers([block, evidence])
        if not isinstance(segment["source"], str):
            raise TypeError(f"{segment['source']!r:.40} is no source")
    if not all(isinstance(source, str) for source in state["offering"]):
        raise TypeError("sources that are no names")


def _check_counts(counts: State) -> None:
    Counts.restored(counts)
    _check_numbers([*counts["at_risk"], counts["asked"], counts["proposed"], counts["seen"], *counts["late"]], low=0.0)
    _check_numbers([*counts["accepted"], *counts["features"], counts["score"]])


def _check_numbers(values: Iterable[Any], low: float = -math.inf, above: float = -math.inf) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TypeError(f"{value!r:.40} is no number")
        if value < low or value <= above:
            raise ValueError(f"{value!r} is too small")
