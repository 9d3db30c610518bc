"""Which format a file is in, by its first entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autospec.errors import ConfigurationError
from autospec.traffic.importers.base import Importer
from autospec.traffic.importers.openai import OpenAI
from autospec.traffic.importers.plain import Plain
from autospec.traffic.importers.sharegpt import ShareGPT
from autospec.traffic.importers.spec_bench import SpecBench
from autospec.traffic.importers.vllm import Vllm

IMPORTERS: tuple[Importer, ...] = (Vllm(), ShareGPT(), SpecBench(), OpenAI(), Plain())
"""The first that matches reads: a vLLM response is an OpenAI-style one, too."""

LOOKED_AT = 50


def importer_named(name: str) -> Importer:
    """The importer of a format.

    Raises:
        ConfigurationError: the name is unknown.
    """
    found = next((each for each in IMPORTERS if each.name == name), None)
    if found is None:
        raise ConfigurationError(f"format {name!r}: known are auto, {', '.join(each.name for each in IMPORTERS)}")
    return found


def detect(entries: Sequence[Mapping[str, Any]]) -> Importer:
    """The format that most of the entries are in.

    Raises:
        ConfigurationError: none is in a known one.
    """
    counts = {each.name: 0 for each in IMPORTERS}
    for entry in entries:
        found = next((each for each in IMPORTERS if each.matches(entry)), None)
        if found is not None:
            counts[found.name] += 1
    name = max(counts, key=lambda each: counts[each])
    if counts[name] == 0:
        keys = ", ".join(sorted({str(key) for entry in entries for key in entry})[:8]) or "nothing"
        known = "; ".join(f"{each.name} ({each.keys})" for each in IMPORTERS)
        raise ConfigurationError(f"the format is not recognised: entries have {keys}; known are {known}")
    return importer_named(name)
