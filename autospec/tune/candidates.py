"""Policies that are tried: as the parts of a tuned policy's file, drawn from a space of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autospec.policies.base import CostEstimates, Policy
from autospec.policies.registry import build_policy
from autospec.policies.tuned import make_part

Part = Mapping[str, Any]
"""`{"source": ..., "block_length": ...}` or `{"policy": ..., "settings": {...}}`, see autospec/policies/tuned.py."""

OFF: Part = {"source": "none", "block_length": 0}
KINDS = ("fixed", "goodput", "auto", "hedge", "linucb")
NOT_USED = "not used"


class Suggests(Protocol):
    """An Optuna trial, as far as it is used here."""

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...


@dataclass(frozen=True, slots=True)
class Space:
    """What candidates are made of."""

    families: Mapping[str, Sequence[str]]  # usual source -> it and its variants, of which a policy uses one at most
    block_lengths: Sequence[int]
    models: frozenset[str] = field(default_factory=frozenset)  # sources whose blocks may end by confidence

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them, the usual ones first."""
        variants = [name for names in self.families.values() for name in names[1:]]
        return (*self.families, *variants)


def suggest(trial: Suggests, space: Space) -> Part:
    """A policy of the trial's choice."""
    kind = trial.suggest_categorical("policy", KINDS)
    if kind == "fixed":
        return _fixed(trial, space)
    part = {"hedge": _plain, "linucb": _plain, "goodput": _goodput, "auto": _auto}[kind](trial, kind)
    used = [trial.suggest_categorical(_param(usual), (*names, NOT_USED)) for usual, names in space.families.items()]
    sources = [name for name in used if name != NOT_USED] or list(space.families)
    return {**part, "sources": sources, "pooled": trial.suggest_categorical("pooled", (False, True))}


def _param(usual: str) -> str:
    """A plug-in may be called as any other parameter is."""
    return f"uses {usual}"


def _fixed(trial: Suggests, space: Space) -> Part:
    source = trial.suggest_categorical("source", space.sources)
    part = {"source": source, "block_length": trial.suggest_categorical("block_length", tuple(space.block_lengths))}
    if source not in space.models:
        return part
    ends = trial.suggest_categorical("block_ends_by", ("length", "margin", "entropy"))
    if ends == "margin":
        part["least_margin"] = trial.suggest_float("least_margin", 0.05, 0.95)
    elif ends == "entropy":
        part["most_entropy"] = trial.suggest_float("most_entropy", 0.1, 5.0, log=True)
    return part


def _plain(trial: Suggests, kind: str) -> Part:
    return {"policy": kind, "settings": {}}


def _goodput(trial: Suggests, kind: str) -> Part:
    return {
        "policy": "goodput",
        "settings": {
            "acceptance": {
                "discount": trial.suggest_float("discount", 0.9, 0.999),
                "prior_acceptance": trial.suggest_float("prior_acceptance", 0.2, 0.8),
                "strength": trial.suggest_float("strength", 1.0, 16.0, log=True),
            },
            "minimum_gain": trial.suggest_float("minimum_gain", 0.002, 0.3, log=True),
            "hysteresis": trial.suggest_float("hysteresis", 0.002, 0.3, log=True),
            "exploration": trial.suggest_float("exploration", 0.0005, 0.05, log=True),
            "optimism": trial.suggest_float("optimism", 0.0, 3.0),
        },
    }


def _auto(trial: Suggests, kind: str) -> Part:
    return {
        "policy": "guard",
        "settings": {
            "policy": _goodput(trial, kind),
            "control_share": 0.0,  # what controls cost is no matter of taste
            "minimum_gain": trial.suggest_float("guard_minimum_gain", 0.002, 0.2, log=True),
            "error_rate": trial.suggest_float("error_rate", 0.001, 0.1, log=True),
            "pause_blocks": trial.suggest_int("pause_blocks", 50, 1000, log=True),
        },
    }


def heuristics(space: Space) -> Iterator[dict[str, Any]]:
    """Parameters of the first trials: `auto` as it is, and each source at a middle length."""
    usual = {
        "discount": 0.99,
        "prior_acceptance": 0.5,
        "strength": 4.0,
        "minimum_gain": 0.02,
        "hysteresis": 0.03,
        "exploration": 0.0075,
        "optimism": 1.0,
    }
    everything = {**{_param(name): name for name in space.families}, "pooled": False}
    guard = {"guard_minimum_gain": 0.02, "error_rate": 0.01, "pause_blocks": 200}
    yield {"policy": "auto", **usual, **guard, **everything}
    yield {"policy": "goodput", **usual, **everything}
    middle = sorted(space.block_lengths)[len(space.block_lengths) // 2]
    for source in space.sources:
        ends = {"block_ends_by": "length"} if source in space.models else {}
        yield {"policy": "fixed", "source": source, "block_length": middle, **ends}
    yield {"policy": "hedge", **everything}


def sources_in(part: Part) -> frozenset[str]:
    """Draft sources that a candidate uses."""
    if "policy" in part:
        return frozenset(part.get("sources", ()))
    return frozenset({part["source"]} if part["block_length"] else ())


def build(part: Part, costs: CostEstimates) -> Policy:
    """The policy of a part, with nothing learned."""
    return make_part(part, lambda name, settings: build_policy(name, settings, lambda: costs), "candidate")
