"""What the decoder leaves to the original `generate`, and why. It never runs approximately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from autospec.caches import find_cache
from autospec.errors import ConfigurationError

# what the loop knows how to carry from block to block; anything else (images, audio, ...) is left to transformers
_KNOWN_INPUTS = {
    "attention_mask",
    "cache",
    "logits_to_keep",
    "mm_token_type_ids",
    "past_key_values",
    "position_ids",
    "token_type_ids",
    "use_cache",
}


class CannotDecodeError(Exception):
    """Raised before anything was drawn or streamed; the caller then runs the original `generate`."""


def why_not(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """Why a prepared call must be left to the original `generate`; None when the decoder can take it."""
    mode = generation_config.get_generation_mode()
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are decoded by transformers itself"
    if mode.value not in ("greedy_search", "sample"):
        return f"{mode.value.replace('_', ' ')} is decoded by transformers itself"
    if input_ids.shape[0] != 1:
        return f"batch of {input_ids.shape[0]}: speculation here is for one sequence at a time"
    if model.training:
        return "the model is in training mode"
    if generation_config.is_assistant:
        return "the model drafts for another one"
    if not generation_config.use_cache:
        return "use_cache=False"
    if generation_config.return_dict_in_generate and (
        generation_config.output_attentions or generation_config.output_hidden_states
    ):
        return "attentions or hidden states were asked for"
    if unknown := sorted(k for k, v in model_kwargs.items() if k not in _KNOWN_INPUTS and v is not None):
        return f"model input {unknown[0]!r} is not followed from block to block"
    cache = find_cache(model_kwargs)
    if cache is None:
        return "the model has no cache that could be rolled back"
    if getattr(cache, "is_compileable", False):
        return f"a cache of fixed shape ({type(cache).__name__}) is decoded by transformers itself"
    return None


def check_prompt(model: PreTrainedModel, input_ids: Tensor, window: int | None) -> None:
    """Refuse prompts that no model can answer. Args: window: positions that the model has, if it says so.

    Raises:
        ConfigurationError: the prompt is empty or longer than the context window.
    """
    prompt_tokens = input_ids.shape[1]
    if prompt_tokens == 0:
        raise ConfigurationError("the prompt is empty: pass at least one token")
    if window is not None and prompt_tokens > window:
        raise ConfigurationError(
            f"the prompt has {prompt_tokens} tokens, the context window of {type(model).__name__} is {window}: "
            "shorten it"
        )
