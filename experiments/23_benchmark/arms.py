"""Which ways to answer are measured, and which settings of each are tried first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from environments import OWN, PEERS

BASE = "generate"
"""The arm that speed-ups are over."""
COLD, WARM = "autospec auto, cold", "autospec auto, warm"
AUTOS = (COLD, WARM)
EAGER = "autospec auto, warm, eager forwards"
REHEARSED = (WARM, EAGER)


@dataclass(frozen=True)
class Arm:
    """One way to answer, as its worker is asked for it."""

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: str = OWN
    learns: bool = False
    """Its answers depend on those before, in what they take."""


@dataclass(frozen=True)
class Family:
    """A way with settings: its default, and others to be tried. The best on other prompts is measured beside it."""

    name: str
    kind: str
    default: str
    settings: Mapping[str, Mapping[str, Any]]
    environment: str = OWN
    is_peer: bool = True
    learns: bool = False

    def arm(self, setting: str, name: str | None = None) -> Arm:
        return Arm(
            name or f"{self.name} {setting}", self.kind, self.settings[setting], self.environment, learns=self.learns
        )


def _lookup(tokens: int, ngram: int) -> dict[str, int]:
    return {"prompt_lookup_num_tokens": tokens, "max_matching_ngram_size": ngram}


def _constant(tokens: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


SINGLE = (
    Arm(BASE, "generate"),
    *(Arm(f"generate beside {name}", "generate", environment=name) for name in PEERS),
    Arm("autospec off", "autospec", {"policy": "off"}),
    Arm(COLD, "autospec", {"policy": "auto"}, learns=True),
    Arm(WARM, "autospec", {"policy": "auto"}, learns=True),
    Arm("autospec off, eager forwards", "autospec", {"policy": "off", "backend": "eager"}),
    Arm(EAGER, "autospec", {"policy": "auto", "backend": "eager"}, learns=True),
)

FAMILIES = (
    Family(
        "transformers lookup",
        "lookup",
        "10, n-grams of 2",
        {
            "10, n-grams of 2": _lookup(10, 2),
            "4, n-grams of 2": _lookup(4, 2),
            "16, n-grams of 2": _lookup(16, 2),
            "10, n-grams of 3": _lookup(10, 3),
        },
    ),
    Family(
        "transformers assistant",
        "assistant",
        "20, threshold 0.4",
        {
            "20, threshold 0.4": {},
            "1": _constant(1),
            "2": _constant(2),
            "4, threshold 0.4": {**_constant(4), "assistant_confidence_threshold": 0.4},
        },
    ),
    Family(
        "flashspec",
        "flashspec",
        "auto",
        {
            "auto": {"strategy": "auto", "drafter": "model"},
            "composite-g4": {"strategy": "composite-g4", "drafter": "model"},
            "assistant of 2": {"strategy": "bandit", "drafter": "model", "gamma": 2},
            "lookup of 4": {"strategy": "bandit", "drafter": "lookup", "gamma": 4},
            "lookup of 8": {"strategy": "bandit", "drafter": "lookup", "gamma": 8},
        },
        environment="flashspec",
    ),
    Family(
        "economize",
        "economize",
        "lookup, cycles of 4",
        {
            "lookup, cycles of 4": {"drafter": "lookup"},
            "lookup, cycles of 9": {"drafter": "lookup", "cycle_length": 9},
            "lookup, cycles of 9, decode": {"drafter": "lookup", "cycle_length": 9, "entry": "decode"},
            "latest lookup, cycles of 9, decode": {
                "drafter": "lookup",
                "cycle_length": 9,
                "match": "latest",
                "entry": "decode",
            },
            "hybrid, cycles of 7": {"drafter": "hybrid", "cycle_length": 7, "max_drafts": 2},
            "hybrid, cycles of 7, decode": {
                "drafter": "hybrid",
                "cycle_length": 7,
                "max_drafts": 2,
                "entry": "decode",
            },
            "plain, decode": {"drafter": "none", "entry": "decode"},
        },
        environment="economize",
    ),
    Family(
        "autospec fixed",
        "autospec",
        "ngram:5",
        {
            "ngram:5": {"policy": "fixed:ngram:5"},
            "suffix:4": {"policy": "fixed:suffix:4"},
            "suffix:8": {"policy": "fixed:suffix:8"},
            "blend:4": {"policy": "fixed:blend:4"},
        },
        is_peer=False,
        learns=True,
    ),
)
