"""Policies that are tried: as the parts of a tuned policy's file, drawn from a space of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from autospec.policies.base import CostEstimates, Policy
from autospec.policies.registry import build_policy

Part = Mapping[str, Any]
"""`{"source": ..., "block_length": ...}` or `{"policy": ..., "settings": {...}}`."""

OFF: Part = {"source": "none", "block_length": 0}
KINDS = ("fixed", "goodput", "auto", "hedge", "linucb")


class Suggests(Protocol):
    """An Optuna trial, as far as it is used here."""

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...


def suggest(trial: Suggests, sources: Sequence[str], block_lengths: Sequence[int]) -> Part:
    """A policy of the trial's choice."""
    kind = trial.suggest_categorical("policy", KINDS)
    if kind == "fixed":
        source = trial.suggest_categorical("source", tuple(sources))
        return {"source": source, "block_length": trial.suggest_categorical("block_length", tuple(block_lengths))}
    if kind in ("hedge", "linucb"):
        return {"policy": kind, "settings": {}}
    goodput = {
        "acceptance": {
            "discount": trial.suggest_float("discount", 0.9, 0.999),
            "prior_acceptance": trial.suggest_float("prior_acceptance", 0.2, 0.8),
            "strength": trial.suggest_float("strength", 1.0, 16.0, log=True),
        },
        "minimum_gain": trial.suggest_float("minimum_gain", 0.002, 0.3, log=True),
        "hysteresis": trial.suggest_float("hysteresis", 0.002, 0.3, log=True),
        "exploration": trial.suggest_float("exploration", 0.0005, 0.05, log=True),
        "optimism": trial.suggest_float("optimism", 0.0, 3.0),
    }
    if kind == "goodput":
        return {"policy": "goodput", "settings": goodput}
    guard = {
        "policy": {"policy": "goodput", "settings": goodput},
        "control_share": 0.0,  # what controls cost is no matter of taste
        "minimum_gain": trial.suggest_float("guard_minimum_gain", 0.002, 0.2, log=True),
        "error_rate": trial.suggest_float("error_rate", 0.001, 0.1, log=True),
        "pause_blocks": trial.suggest_int("pause_blocks", 50, 1000, log=True),
    }
    return {"policy": "guard", "settings": guard}


def heuristics(sources: Sequence[str], block_lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
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
    yield {"policy": "auto", **usual, "guard_minimum_gain": 0.02, "error_rate": 0.01, "pause_blocks": 200}
    yield {"policy": "goodput", **usual}
    middle = sorted(block_lengths)[len(block_lengths) // 2]
    yield from ({"policy": "fixed", "source": source, "block_length": middle} for source in sources)
    yield {"policy": "hedge"}


def build(part: Part, costs: CostEstimates) -> Policy:
    """The policy of a part, with nothing learned."""
    if "policy" not in part:
        return build_policy("fixed", dict(part), lambda: costs)
    return build_policy(part["policy"], part.get("settings", {}), lambda: costs)
