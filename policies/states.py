"""What the states of policies look like: bounded to the segments seen last, and checked before they are merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.base import Policy
from autospec.policies.checking import check_goodput, check_guard
from autospec.policies.goodput import Goodput
from autospec.policies.guard import Guard

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
            check_guard(state)
            if hasattr(policy.policy, "restore"):
                check(policy.policy, state["policy"])
        elif type(policy) is Goodput:
            check_goodput(state)
    except ConfigurationError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
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
