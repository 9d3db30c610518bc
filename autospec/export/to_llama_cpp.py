"""llama.cpp: flags of `llama-server` and `llama-cli`."""

from __future__ import annotations

from autospec.drafts.ngram import NGram
from autospec.errors import ConfigurationError
from autospec.export.base import (
    NEWEST,
    ONE_SEQUENCE,
    Exported,
    Options,
    Value,
    as_flags,
    named_assistant,
    ngram_limits,
    not_used,
    refusal,
)
from autospec.export.chosen import Chosen

MOST_NGRAM = 1024
"""Tokens that it looks up, or copies, at most."""

_USE = "llama-server -m TARGET.gguf ..., or llama-cli"
_NEAREST = {
    "suffix": "the nearest is --spec-type ngram-mod, which shares what it saw among requests",
    "early_exit": "the nearest is a small draft model, exported from a policy of assistant",
    "cross_tokenizer": "the nearest is a draft model with the target's tokenizer, exported from a policy of assistant",
    "blend": "it takes several types in a fixed order (--spec-type ngram-simple,draft-simple), not the better of two",
}
_RENAMED = "builds before May 2026 have other names: --draft-max for --spec-draft-n-max, say"


def export(chosen: Chosen, options: Options) -> Exported:
    """Raises: ConfigurationError: llama.cpp has nothing like that, or the model is not named or no GGUF file."""
    if not chosen.block_length:
        settings: dict[str, Value] = {"--spec-type": "none"}
        return Exported(settings, as_flags(settings), _USE, (*chosen.limits, *not_used(options)))
    used: tuple[str, ...] = ()
    limits: list[str] = []
    if isinstance(chosen.draft, NGram):
        settings = _ngram(chosen.draft, chosen.block_length)
        limits += ngram_limits(chosen.draft, NEWEST)
        if chosen.draft.min_ngram < chosen.draft.max_ngram:
            limits.append(
                f"matches of exactly {chosen.draft.max_ngram} tokens: autospec goes down to {chosen.draft.min_ngram}"
            )
    elif chosen.source == "assistant":
        settings = {"--spec-type": "draft-simple", "--spec-draft-model": _gguf(named_assistant(chosen, options))}
        settings["--spec-draft-p-min"] = 0.0  # no block ends where the draft is unsure
        used = ("assistant",)
    elif chosen.source == "heads":
        settings = {"--spec-type": "draft-mtp"}
        limits.append(
            "the multi-token-prediction layers are to be in the target's GGUF; a DFlash model is not exported"
        )
    else:
        raise refusal("llama.cpp", chosen, _NEAREST)
    settings["--spec-draft-n-max"] = chosen.block_length
    limits += [*not_used(options, *used), ONE_SEQUENCE, _RENAMED]
    return Exported(settings, as_flags(settings), _USE, (*chosen.limits, *limits))


def _ngram(draft: NGram, block_length: int) -> dict[str, Value]:
    """Raises: ConfigurationError: it is more than llama.cpp takes."""
    if max(draft.max_ngram, block_length) > MOST_NGRAM:
        raise ConfigurationError(
            f"llama.cpp looks up and copies at most {MOST_NGRAM} tokens, not {max(draft.max_ngram, block_length)}"
        )
    return {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": draft.max_ngram,
        "--spec-ngram-simple-size-m": block_length,
    }


def _gguf(assistant: str) -> str:
    """Raises: ConfigurationError: it is no GGUF file's name."""
    if not assistant.lower().endswith(".gguf"):
        raise ConfigurationError(f"--assistant {assistant}: llama.cpp reads a GGUF file, whose name ends in .gguf")
    return assistant
