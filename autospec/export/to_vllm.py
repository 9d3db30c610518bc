"""vLLM: the object that `--speculative-config` takes."""

from __future__ import annotations

from autospec.drafts.ngram import NGram
from autospec.drafts.pool import DEPTH
from autospec.drafts.suffix import Suffix
from autospec.errors import ConfigurationError
from autospec.export.base import (
    FIRST,
    ONE_SEQUENCE,
    Exported,
    Options,
    Value,
    as_json,
    named_assistant,
    ngram_limits,
    not_used,
    refusal,
)
from autospec.export.chosen import Chosen

_USE = "vllm serve TARGET --speculative-config '...'"
_NEAREST = {
    "early_exit": "the nearest is a small draft model, exported from a policy of assistant",
    "cross_tokenizer": "the nearest is a draft model with the target's tokenizer, exported from a policy of assistant",
    "blend": "it takes one method, exported from a policy of one source alone",
}
_LOAD = f"{ONE_SEQUENCE}; the file knows no schedule by batch size (num_speculative_tokens_per_batch_size)"


def export(chosen: Chosen, options: Options) -> Exported:
    """Raises: ConfigurationError: vLLM has nothing like that, or the model is not named."""
    if not chosen.block_length:
        return Exported({}, "", "no --speculative-config at all", (*chosen.limits, *not_used(options)))
    settings: dict[str, Value]
    draft = chosen.draft
    used: tuple[str, ...] = ()
    limits: list[str] = []
    if isinstance(draft, NGram):
        settings = {"method": "ngram", "prompt_lookup_max": draft.max_ngram, "prompt_lookup_min": draft.min_ngram}
        limits += ngram_limits(draft, FIRST)
    elif isinstance(draft, Suffix):
        settings = _suffix(draft, chosen.block_length)
        limits += [
            "vLLM fills a tree of its own with answers: a pool, min_match and per_segment are not taken over",
            "method suffix needs the package arctic-inference; where Model Runner V2 does without, blocks always have "
            "full length",
        ]
    elif chosen.source == "assistant":
        settings = {"method": "draft_model", "model": named_assistant(chosen, options)}
        used = ("assistant",)
    elif chosen.source == "heads":
        settings = {"method": "mtp"}
        limits.append("taken for the target's own multi-token-prediction layers: a DFlash model is not exported")
    else:
        raise refusal("vLLM", chosen, _NEAREST)
    settings["num_speculative_tokens"] = chosen.block_length
    if options.schedule is not None:
        if chosen.source == "suffix":
            raise ConfigurationError(
                "vLLM's suffix drafts one length at all batch sizes: leave --store out, or export a policy of ngram"
            )
        settings["num_speculative_tokens_per_batch_size"] = [list(row) for row in options.schedule]
    load = () if options.schedule is not None else (_LOAD,)
    return Exported(settings, as_json(settings), _USE, (*chosen.limits, *limits, *not_used(options, *used), *load))


def _suffix(draft: Suffix, block_length: int) -> dict[str, Value]:
    """A draft's length is bounded by the block and its score alone, as here: not by the match, nor by the tree."""
    settings: dict[str, Value] = {
        "method": "suffix",
        "suffix_decoding_min_token_prob": draft.min_score,  # of both the product of the shares along the draft
        "suffix_decoding_max_spec_factor": float(block_length),
        "suffix_decoding_max_tree_depth": DEPTH + block_length,
    }
    if not draft.learns:
        settings["suffix_decoding_max_cached_requests"] = 0
    return settings
