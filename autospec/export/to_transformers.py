"""transformers: keys of a generation config."""

from __future__ import annotations

from autospec.drafts.ngram import NGram
from autospec.errors import ConfigurationError
from autospec.export.base import FIRST, Exported, Options, Value, as_json, ngram_limits, not_used, refusal
from autospec.export.chosen import Chosen

_TARGET = "generation_config.json of the target, or arguments of generate"
_ASSISTANT = "generation_config.json of the assistant, where transformers looks for it, not the target's"
_NO_CACHE = "transformers 5.24 runs the whole text through these layers again for each draft token: measure it"
_NEAREST = {
    "suffix": "the nearest is prompt lookup, exported from a policy of ngram",
    "blend": "it takes one source at a time, exported from a policy of that source alone",
}


def export(chosen: Chosen, options: Options) -> Exported:
    """Raises: ConfigurationError: there is nothing like that in transformers, or a model or number is not named."""
    if not chosen.block_length:
        use = "no key, so that generate without assistant_model does not speculate"
        return Exported({}, as_json({}), use, (*chosen.limits, *not_used(options)))
    settings: dict[str, Value]
    if isinstance(chosen.draft, NGram):
        settings = {
            "prompt_lookup_num_tokens": chosen.block_length,
            "max_matching_ngram_size": chosen.draft.max_ngram,
        }
        limits = [*ngram_limits(chosen.draft, FIRST), *not_used(options)]
        if chosen.draft.min_ngram > 1:
            limits.append(f"matches of fewer than {chosen.draft.min_ngram} tokens are drafted from too")
        use = _TARGET
    elif chosen.source in ("assistant", "cross_tokenizer"):
        settings, use = _constant(chosen.block_length), _ASSISTANT
        limits = [f"the assistant is to be passed: generate(..., assistant_model={_name(options)})"]
        if chosen.source == "cross_tokenizer":
            limits = [f"{limits[0][:-1]}, tokenizer=..., assistant_tokenizer=...)"]
        limits += not_used(options, "assistant")
    elif chosen.source == "early_exit":
        if options.early_exit is None:
            raise ConfigurationError("the file does not say how many layers early_exit drafts with: give --early-exit")
        settings, use = {"assistant_early_exit": options.early_exit, **_constant(chosen.block_length)}, _TARGET
        limits = [_NO_CACHE, *not_used(options, "early_exit")]
    elif chosen.source == "heads":
        settings, use = {"use_mtp": True}, _TARGET
        limits = [
            f"blocks of {chosen.block_length} are not taken over: every multi-token-prediction layer drafts one token",
            "a DFlash model is not exported: generate(speculation_type='dflash', assistant_model=...) takes it",
            *not_used(options),
        ]
    else:
        raise refusal("transformers", chosen, _NEAREST)
    return Exported(settings, as_json(settings, indent=2), use, (*chosen.limits, *limits))


def _constant(block_length: int) -> dict[str, Value]:
    """Blocks of one length: where no threshold is said, transformers ends them below a confidence of 0.4."""
    return {
        "num_assistant_tokens": block_length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _name(options: Options) -> str:
    return options.assistant or "..."
