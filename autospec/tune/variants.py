"""Draft sources under other settings, tried beside the usual ones. Each is a source with a name of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.drafts.base import DraftSource
from autospec.tuned_files import make_draft

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ngram": {
        "ngram_pairs": {"min_ngram": 2},  # a match of one token is a weak one
        "ngram_newest": {"continuation": "newest"},
        "ngram_by_match": {"max_ngram": 5, "tokens_per_match": 2},
    },
    "suffix": {
        "suffix_sure": {"min_score": 0.4},
        "suffix_long": {"min_match": 3},
    },
}
"""By the usual source's name: name and settings of each other one."""


def make_variants(sources: Mapping[str, DraftSource]) -> dict[str, DraftSource]:
    """Those of the sources that have any and are as usual themselves."""
    return {
        name: make_draft(name, usual, settings, "variants")
        for usual, variants in VARIANTS.items()
        if usual in sources
        for name, settings in variants.items()
        if name not in sources
    }


def families(sources: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Each usual source with the names of its variants, of which a policy uses one at most."""
    grouped = {name for variants in VARIANTS.values() for name in variants}
    return {
        name: (name, *(other for other in VARIANTS.get(name, {}) if other in sources))
        for name in sources
        if name not in grouped
    }


def draft_table(used: set[str]) -> dict[str, dict[str, Any]]:
    """Of the sources that a policy uses, those that need no model: how a policy's file has them made."""
    known: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in VARIANTS}
    for usual, variants in VARIANTS.items():
        known |= {name: (usual, dict(settings)) for name, settings in variants.items()}
    return {
        name: {"source": known[name][0], **({"settings": known[name][1]} if known[name][1] else {})}
        for name in sorted(used & set(known))
    }
