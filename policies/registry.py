"""From a policy as users write it, or as it was stored, to a policy object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.base import CostEstimates, Policy
from autospec.policies.epsilon_greedy import EpsilonGreedy
from autospec.policies.exp3 import Exp3
from autospec.policies.fixed import Fixed
from autospec.policies.goodput import Goodput
from autospec.policies.guard import Guard
from autospec.policies.hedge import Hedge
from autospec.policies.linucb import LinUCB
from autospec.policies.scoped import Scoped
from autospec.policies.thompson import Thompson
from autospec.policies.transformers_constant import TransformersConstant
from autospec.policies.transformers_heuristic import TransformersHeuristic
from autospec.policies.tuned import Tuned, make_tuned, read_tuned
from autospec.policies.ucb import UCB
from autospec.types import NONE

KINDS: dict[str, type[Any]] = {
    "fixed": Fixed,
    "goodput": Goodput,
    "guard": Guard,
    "epsilon_greedy": EpsilonGreedy,
    "ucb": UCB,
    "thompson": Thompson,
    "exp3": Exp3,
    "linucb": LinUCB,
    "hedge": Hedge,
    "transformers_constant": TransformersConstant,
    "transformers_heuristic": TransformersHeuristic,
    "tuned": Tuned,
}
"""Policies that can be stored and made again, by the name under which they are."""

LEARNING = ("epsilon_greedy", "ucb", "thompson", "exp3", "linucb", "hedge")
"""Bandits; a name alone makes them."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "transformers_constant": {},
    "transformers_heuristic": {},
    "transformers_heuristic_transient": {"transient": True},
}
"""Those that a name and a draft source make, with the settings that the name stands for."""

FORMS = (
    "'auto', 'off', 'fixed:SOURCE:BLOCK_LENGTH', "
    + "".join(f"{name!r}, " for name in ("goodput", *LEARNING))
    + "".join(f"'{name}:SOURCE[:BLOCK_LENGTH]', " for name in SCHEDULES)
    + "'tuned:FILE', or an object with name, choose and observe"
)


def make_policy(policy: str | Policy, sources: Collection[str], measure_costs: Callable[[], CostEstimates]) -> Policy:
    """The policy object for a name, or the object itself.

    Args:
        policy: `auto`, `off`, `fixed:ngram:5`, another of `FORMS`, or a policy object.
        sources: names of the draft sources at hand.
        measure_costs: called only when the policy needs costs; may take seconds.

    Raises:
        ConfigurationError: an unknown policy or source, a block length that is no whole number >= 0, or a policy file
            that cannot be used.
    """
    if not isinstance(policy, str):
        is_one = callable(getattr(policy, "choose", None)) and callable(getattr(policy, "observe", None))
        if isinstance(policy, type) or not is_one or not isinstance(getattr(policy, "name", None), str):
            raise ConfigurationError(f"policy={policy!r:.80} is no policy: known are {FORMS}")
        made: Policy = policy
    elif policy == "auto":
        made = _auto(measure_costs()) if sources else Fixed()
    elif policy == "off":
        made = Fixed()
    elif policy in ("goodput", *LEARNING):
        made = build_policy(policy, {}, measure_costs) if sources else Fixed()
    else:
        made = _parse(policy, measure_costs)
    _check_sources(policy if isinstance(policy, str) else policy.name, made, sources)
    return made


def _auto(costs: CostEstimates) -> Policy:
    # each process draws its controls anew: a fleet that starts together would else measure the same requests
    return Guard(Goodput(costs), costs, name="auto", seed=None)


def _make_guard(settings: Mapping[str, Any], costs: CostEstimates) -> Policy:
    inner = settings["policy"]
    if not isinstance(inner, Mapping) or set(inner) != {"policy", "settings"}:
        raise ConfigurationError("setting 'policy' of policy 'guard': an object with policy and settings is needed")
    policy = build_policy(inner["policy"], inner["settings"], lambda: costs)
    return Guard(policy, costs, **{name: value for name, value in settings.items() if name != "policy"})


def build_policy(kind: Any, settings: Any, measure_costs: Callable[[], CostEstimates]) -> Policy:
    """A policy from one of the names of `KINDS` and its settings.

    Args:
        kind: as in `ucb`.
        settings: plain JSON values, those left out as they are by default.
        measure_costs: called only when the policy needs costs.

    Raises:
        ConfigurationError: unknown name, or unknown, missing or bad settings.
    """
    make = KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ConfigurationError(f"unknown policy {kind!r}: known are {', '.join(KINDS)}")
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f"settings of policy {kind!r}: an object is needed, not {settings!r:.60}")
    measured = cache(measure_costs)
    if make is Tuned:
        return make_tuned(settings, lambda name, inner: build_policy(name, inner, measured))
    parameters = dict(inspect.signature(make).parameters)
    needs_costs = parameters.pop("costs", None) is not None
    if unknown := sorted(set(map(str, settings)) - set(parameters)):
        known = ", ".join(parameters) or "none"
        raise ConfigurationError(f"unknown setting {unknown[0]!r} of policy {kind!r}: known are {known}")
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing := [name for name in needed if name not in settings]:
        raise ConfigurationError(f"setting {missing[0]!r} of policy {kind!r} is missing")
    if make is Guard:
        return _make_guard(settings, measured())
    made: Policy = make(**({"costs": measured()} if needs_costs else {}), **settings)
    return made


def kind_of(policy: Policy) -> str:
    """The name in `KINDS` of a policy's class.

    Raises:
        ConfigurationError: it is not there.
    """
    found = next((kind for kind, each in KINDS.items() if type(policy) is each), None)
    if found is None:
        raise ConfigurationError(
            f"policy {policy.name!r} ({type(policy).__name__}) cannot be stored: known are {', '.join(KINDS)}"
        )
    return found


def _parse(text: str, measure_costs: Callable[[], CostEstimates]) -> Policy:
    head, *rest = text.split(":")
    if head == "fixed":
        if len(rest) != 2:
            raise ConfigurationError(f"policy {text!r}: the form is fixed:SOURCE:BLOCK_LENGTH, as in fixed:ngram:5")
        return Fixed(rest[0], block_length=_block_length(text, rest[1]))
    if head == "tuned":
        file = text.removeprefix("tuned").removeprefix(":")
        if not file:
            raise ConfigurationError(f"policy {text!r}: the form is tuned:FILE, as in tuned:policy.json")
        measured = cache(measure_costs)
        return read_tuned(file, lambda name, settings: build_policy(name, settings, measured))
    if head in SCHEDULES:
        if not 1 <= len(rest) <= 2:
            raise ConfigurationError(
                f"policy {text!r}: the form is {head}:SOURCE[:BLOCK_LENGTH], as in {head}:assistant"
            )
        settings = {**SCHEDULES[head], "source": rest[0]}
        if len(rest) == 2:
            settings["num_assistant_tokens"] = _block_length(text, rest[1])
        return build_policy(head.removesuffix("_transient"), settings, measure_costs)
    raise ConfigurationError(f"unknown policy {text!r}: known are {FORMS}")


def _block_length(text: str, length: str) -> int:
    try:
        return int(length)
    except ValueError:
        raise ConfigurationError(f"policy {text!r}: block length {length!r} is not a whole number") from None


def _check_sources(said: str, policy: Policy, sources: Collection[str]) -> None:
    parts = list(policy.parts()) if isinstance(policy, Tuned) else [("", policy)]
    for field, part in parts:
        for needed in sorted(sources_of(part)):
            if needed not in (NONE, *sources):
                known = ", ".join([NONE, *sorted(sources)])
                raise ConfigurationError(
                    f"policy {said!r}{field and f', {field},'} needs draft source {needed!r}, "
                    f"which is not among drafts={known}"
                )


def sources_of(policy: Policy) -> frozenset[str]:
    """Names of the draft sources that a policy names; those of one that takes what there is are none."""
    if isinstance(policy, Tuned):
        return frozenset().union(*(sources_of(part) for _, part in policy.parts()))
    if isinstance(policy, Scoped):
        return policy.sources or frozenset()
    if isinstance(policy, (Fixed, TransformersConstant, TransformersHeuristic)):
        return frozenset({policy.source})
    return frozenset()
