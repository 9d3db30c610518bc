"""From names and objects, as users write them, to draft sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

from autospec.drafts.base import DraftSource
from autospec.drafts.ngram import NGram
from autospec.drafts.suffix import Suffix
from autospec.errors import ConfigurationError
from autospec.types import NONE

GROUP = "autospec.drafts"
"""Entry points by which other packages offer draft sources."""

BY_NAME: dict[str, Callable[[], DraftSource]] = {"ngram": NGram, "suffix": Suffix}
NEEDS_OBJECT = {
    "assistant": "autospec.drafts.Assistant(model)",
    "cross_tokenizer": "autospec.drafts.CrossTokenizer(model, tokenizer)",
    "blend": "autospec.drafts.Blend(model_draft, retrieval)",
    "early_exit": "autospec.drafts.EarlyExit(num_layers)",
    "heads": "autospec.drafts.Heads() or Heads(dflash_model)",
}


def make_sources(drafts: Iterable[str | DraftSource]) -> dict[str, DraftSource]:
    """The draft sources by name; `none` is always there and needs no entry.

    Raises:
        ConfigurationError: an unknown name, a name that needs an object, something that is no source, or two of a name.
    """
    if isinstance(drafts, str) or not isinstance(drafts, Iterable):
        drafts = [drafts]
    sources: dict[str, DraftSource] = {}
    for draft in drafts:
        source = _make(draft)
        if source is None:
            continue
        if source.name in sources:
            raise ConfigurationError(f"two draft sources are called {source.name!r}: give each its own name")
        sources[source.name] = source
    return sources


def _from_plug_in(entry: EntryPoint) -> DraftSource | None:
    """What a package offers under a name: something to call that returns a source of that name."""
    try:
        made = entry.load()()
    except Exception as error:
        raise ConfigurationError(
            f"draft source {entry.name!r} of {entry.value} cannot be made: {type(error).__name__}: {error}"
        ) from error
    source = None if isinstance(made, str) else _make(made)
    if source is None or source.name != entry.name:
        raise ConfigurationError(f"draft source {entry.name!r} of {entry.value}: it made {made!r:.60}, of another name")
    return source


def _make(draft: str | DraftSource) -> DraftSource | None:
    if isinstance(draft, str):
        if draft == NONE:
            return None
        if draft in NEEDS_OBJECT:
            raise ConfigurationError(f"draft source {draft!r} needs settings: pass {NEEDS_OBJECT[draft]}")
        if draft in BY_NAME:
            return BY_NAME[draft]()
        plug_ins = {entry.name: entry for entry in entry_points(group=GROUP)}
        if draft not in plug_ins:
            known = ", ".join([NONE, *sorted(BY_NAME), *sorted(plug_ins), *NEEDS_OBJECT.values()])
            raise ConfigurationError(f"unknown draft source {draft!r}: known are {known}")
        return _from_plug_in(plug_ins[draft])
    name = getattr(draft, "name", None)
    methods = all(callable(getattr(draft, method, None)) for method in ("attach", "start"))
    if callable(getattr(draft, "generate", None)) and not methods:
        raise ConfigurationError(
            f"{type(draft).__name__} is a model, not a draft source: pass autospec.drafts.Assistant(model)"
        )
    if isinstance(draft, type) or not isinstance(name, str) or not methods:
        raise ConfigurationError(
            f"{draft!r:.60} is not a draft source: an object with a name and the methods attach and start is needed "
            "(autospec.drafts.base)"
        )
    if name == NONE or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigurationError(f"draft source name {name!r}: lower-case letters, digits and _, and not {NONE!r}")
    return draft
