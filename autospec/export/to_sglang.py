"""SGLang: flags of `python -m sglang.launch_server`."""

from __future__ import annotations

from autospec.drafts.ngram import NGram
from autospec.export.base import (
    ONE_SEQUENCE,
    Exported,
    Options,
    Value,
    as_flags,
    named_assistant,
    not_used,
    refusal,
)
from autospec.export.chosen import Chosen

_USE = "python -m sglang.launch_server --model-path TARGET ..."
_MATCH_TYPES = {"frequent": "PROB", "newest": "BFS"}
_NEAREST = {
    "suffix": "the nearest is NGRAM, whose trie holds other requests' texts too, exported from a policy of ngram",
    "early_exit": "the nearest is a small draft model, exported from a policy of assistant",
    "cross_tokenizer": "the nearest is a draft model with the target's tokenizer, exported from a policy of assistant",
    "blend": "it takes one algorithm, exported from a policy of one source alone",
}


def export(chosen: Chosen, options: Options) -> Exported:
    """Raises: ConfigurationError: SGLang has nothing like that, or the model is not named."""
    if not chosen.block_length:
        return Exported({}, "", "no --speculative-algorithm at all", (*chosen.limits, *not_used(options)))
    settings: dict[str, Value]
    used: tuple[str, ...] = ()
    if isinstance(chosen.draft, NGram):
        settings = {
            "--speculative-algorithm": "NGRAM",
            "--speculative-num-draft-tokens": chosen.block_length + 1,  # the last committed token is among them
            "--speculative-ngram-max-bfs-breadth": 1,
            "--speculative-ngram-match-type": _MATCH_TYPES[chosen.draft.continuation],
            "--speculative-ngram-max-trie-depth": chosen.draft.max_ngram + chosen.block_length,
        }
        limits = list(_ngram_limits(chosen.draft))
    elif chosen.source == "assistant":
        settings = {
            "--speculative-algorithm": "STANDALONE",
            "--speculative-draft-model-path": named_assistant(chosen, options),
            **_chain(chosen.block_length),
        }
        used, limits = ("assistant",), []
    elif chosen.source == "heads":
        settings = {"--speculative-algorithm": "EAGLE", **_chain(chosen.block_length)}
        limits = ["taken for the target's own multi-token-prediction layers: a DFlash model is not exported"]
    else:
        raise refusal("SGLang", chosen, _NEAREST)
    limits += [*not_used(options, *used), ONE_SEQUENCE]
    return Exported(settings, as_flags(settings), _USE, (*chosen.limits, *limits))


def _chain(block_length: int) -> dict[str, Value]:
    """One candidate for each position; SGLang counts the token that they follow, too."""
    return {
        "--speculative-num-steps": block_length,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": block_length + 1,
    }


def _ngram_limits(draft: NGram) -> list[str]:
    limits = [
        "SGLang's trie holds the texts of all requests, autospec's ngram its own request's alone",
        f"matches of any length count, not of {draft.min_ngram} to {draft.max_ngram} tokens: what the longest leaves "
        "of a block is filled from shorter ones, as branches",
        "SGLang's NGRAM needs CUDA",
    ]
    if draft.tokens_per_match is not None:
        limits.append(f"drafts are not bounded by the length of the match (tokens_per_match={draft.tokens_per_match})")
    return limits
