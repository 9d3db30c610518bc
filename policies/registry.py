"""From a policy as users write it to a policy object."""

from __future__ import annotations

from collections.abc import Callable, Collection

from autospec.errors import ConfigurationError
from autospec.policies.base import CostEstimates, Policy
from autospec.policies.fixed import Fixed
from autospec.policies.goodput import Goodput
from autospec.types import NONE

FORMS = "'auto', 'off', 'fixed:SOURCE:BLOCK_LENGTH', or an object with name, choose and observe"


def make_policy(policy: str | Policy, sources: Collection[str], measure_costs: Callable[[], CostEstimates]) -> Policy:
    """The policy object for a name, or the object itself.

    Args:
        policy: `auto`, `off`, `fixed:ngram:5`, or a policy object.
        sources: names of the draft sources at hand.
        measure_costs: called only when the policy needs costs; may take seconds.

    Raises:
        ConfigurationError: an unknown policy or source, or a block length that is no whole number >= 0.
    """
    if not isinstance(policy, str):
        is_one = callable(getattr(policy, "choose", None)) and callable(getattr(policy, "observe", None))
        if isinstance(policy, type) or not is_one or not isinstance(getattr(policy, "name", None), str):
            raise ConfigurationError(f"policy={policy!r:.80} is no policy: known are {FORMS}")
        _check_source(policy, sources)
        return policy
    if policy == "auto":
        return Goodput(measure_costs()) if sources else Fixed()
    if policy == "off":
        return Fixed()
    if policy.startswith("fixed:"):
        fixed = _parse_fixed(policy)
        _check_source(fixed, sources)
        return fixed
    raise ConfigurationError(f"unknown policy {policy!r}: known are {FORMS}")


def _parse_fixed(text: str) -> Fixed:
    parts = text.split(":")
    if len(parts) != 3:
        raise ConfigurationError(f"policy {text!r}: the form is fixed:SOURCE:BLOCK_LENGTH, as in fixed:ngram:5")
    _, source, length = parts
    try:
        block_length = int(length)
    except ValueError:
        raise ConfigurationError(f"policy {text!r}: block length {length!r} is not a whole number") from None
    return Fixed(source, block_length=block_length)


def _check_source(policy: Policy, sources: Collection[str]) -> None:
    if isinstance(policy, Fixed) and policy.source not in (NONE, *sources):
        known = ", ".join([NONE, *sorted(sources)])
        raise ConfigurationError(
            f"policy {policy.name!r} needs draft source {policy.source!r}, which is not among drafts={known}"
        )
