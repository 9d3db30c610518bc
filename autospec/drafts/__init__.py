"""Draft sources: what proposes tokens. `none` needs no object; it is always there."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autospec.drafts.assistant import Assistant as Assistant
    from autospec.drafts.base import DraftRequest as DraftRequest
    from autospec.drafts.base import DraftSession as DraftSession
    from autospec.drafts.base import DraftSource as DraftSource
    from autospec.drafts.base import Proposal as Proposal
    from autospec.drafts.blend import Blend as Blend
    from autospec.drafts.cross_tokenizer import CrossTokenizer as CrossTokenizer
    from autospec.drafts.early_exit import EarlyExit as EarlyExit
    from autospec.drafts.heads import Heads as Heads
    from autospec.drafts.ngram import NGram as NGram
    from autospec.drafts.pool import SuffixPool as SuffixPool
    from autospec.drafts.registry import make_sources as make_sources
    from autospec.drafts.suffix import Suffix as Suffix

_HOME = {
    "Assistant": "assistant",
    "CrossTokenizer": "cross_tokenizer",
    "Blend": "blend",
    "DraftRequest": "base",
    "DraftSession": "base",
    "DraftSource": "base",
    "EarlyExit": "early_exit",
    "Heads": "heads",
    "NGram": "ngram",
    "Proposal": "base",
    "Suffix": "suffix",
    "SuffixPool": "pool",
    "make_sources": "registry",
}

__all__ = [
    "Assistant",
    "Blend",
    "CrossTokenizer",
    "DraftRequest",
    "DraftSession",
    "DraftSource",
    "EarlyExit",
    "Heads",
    "NGram",
    "Proposal",
    "Suffix",
    "SuffixPool",
    "make_sources",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
