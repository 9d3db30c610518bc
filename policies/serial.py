"""Policies as plain JSON values: what they are, how they were made, and what they have learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.base import CostEstimates, Policy
from autospec.policies.guard import Guard
from autospec.policies.registry import build_policy, kind_of


def dump(policy: Policy) -> dict[str, Any]:
    """A policy as plain JSON values. Costs are not among them: they belong to the device.

    Raises:
        ConfigurationError: it is of no kind that `load` could make.
    """
    kind = kind_of(policy)
    learned = getattr(policy, "state", None)
    settings = dict(getattr(policy, "settings", {}))
    if isinstance(policy, Guard):
        inner = dump(policy.policy)
        settings |= {"name": policy.name, "policy": {name: inner[name] for name in ("policy", "settings")}}
    return {
        "policy": kind,
        "settings": settings,
        "state": learned() if learned is not None else None,
    }


def load(values: Mapping[str, Any], costs: CostEstimates) -> Policy:
    """The policy that `dump` wrote; it chooses as the other one would have.

    Args:
        values: what `dump` gave; without `state`, or with None, it begins with nothing learned.
        costs: of the device at hand.

    Raises:
        ConfigurationError: unknown policy, setting or state.
    """
    if not isinstance(values, Mapping) or not {"policy", "settings"} <= set(values) <= {"policy", "settings", "state"}:
        found = ", ".join(sorted(map(str, values))) if isinstance(values, Mapping) else type(values).__name__
        raise ConfigurationError(f"no stored policy: policy, settings and state are needed, found {found}")
    policy = build_policy(values["policy"], values["settings"], lambda: costs)
    state = values.get("state")
    if state is not None:
        restore = getattr(policy, "restore", None)
        if restore is None:
            raise ConfigurationError(f"policy {policy.name!r} learns nothing, and a state was stored with it")
        restore(state)
    return policy
