"""Which engines there are: without speculation, with vLLM's own drafting at settings to be tried, with autospec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NONE = "none"
COLD, WARM = "autospec, cold", "autospec, warm"
AUTOS = (COLD, WARM)


@dataclass(frozen=True)
class Arm:
    """An engine: vLLM's speculative config is fixed when it starts."""

    name: str
    speculative: Mapping[str, Any] | None
    learns: bool = False  # what it takes for an answer depends on those before
    is_rehearsed: bool = False  # it has answered the other prompts before it is measured


def _ngram(tokens: int, shortest: int, longest: int) -> dict[str, Any]:
    return {
        "method": "ngram",
        "num_speculative_tokens": tokens,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


def _suffix(tokens: int, factor: float) -> dict[str, Any]:
    return {"method": "suffix", "num_speculative_tokens": tokens, "suffix_decoding_max_spec_factor": factor}


FAMILIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ngram": {
        "4, n-grams of 2 to 4": _ngram(4, 2, 4),
        "4, n-grams of 1 to 3": _ngram(4, 1, 3),
        "8, n-grams of 2 to 4": _ngram(8, 2, 4),
        "2, n-grams of 1 to 3": _ngram(2, 1, 3),
    },
    "suffix": {
        "16, factor 1": _suffix(16, 1.0),
        "8, factor 1": _suffix(8, 1.0),
        "8, factor 4": _suffix(8, 4.0),
    },
}
"""vLLM's own drafting: settings by name, the first of which stands where none are tried."""

NAMES = (NONE, *FAMILIES, COLD, WARM)
"""Of what is measured, as tables show it."""

NEEDS = {"suffix": "arctic-inference"}
"""Packages without which vLLM refuses a family."""

_OURS = {"method": "custom_class", "model": "autospec.integrations.vllm.Proposer", "num_speculative_tokens": 8}


def single() -> Iterator[Arm]:
    """Arms without settings to be tried."""
    yield Arm(NONE, None)
    yield Arm(COLD, _OURS, learns=True)
    yield Arm(WARM, _OURS, learns=True, is_rehearsed=True)


def fixed(family: str, setting: str) -> Arm:
    """vLLM's own drafting at one setting. Suffix trees keep earlier answers, so it is rehearsed as autospec is."""
    learns = family == "suffix"
    return Arm(f"{family} {setting}", FAMILIES[family][setting], learns=learns, is_rehearsed=learns)
