"""One `generate` call as the user wrote it: its arguments by name, and what they set."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

_PARAMETERS = inspect.signature(GenerationMixin.generate).parameters.values()
_POSITIONAL = [each.name for each in _PARAMETERS if each.kind is each.POSITIONAL_OR_KEYWORD][1:]  # but for self

# shown in a record's `decoding` when they were set and are not neutral
_SHOWN = {
    "temperature": 1.0,
    "top_k": None,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "guidance_scale": None,
}


class Call:
    """Arguments of one call of `model.generate`.

    Args:
        model: the wrapped model.
        args, kwargs: as given by the user.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = model
        given = dict(zip(_POSITIONAL, args, strict=False))
        if len(args) > len(_POSITIONAL) or not given.keys().isdisjoint(kwargs):
            given = {}  # a generate with a signature of its own, or a mistake that it will name itself
        self.arguments: dict[str, Any] = {**given, **kwargs}

    def setting(self, name: str) -> Any:
        """What a generation option will be: keyword, else generation config, else the model's own config."""
        if name in self.arguments:
            return self.arguments[name]
        for config in (self.arguments.get("generation_config"), getattr(self._model, "generation_config", None)):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return None

    @property
    def streamer(self) -> Any | None:
        return self.arguments.get("streamer")

    def describe(self) -> str:
        """How tokens are chosen, as in `greedy` or `sample temperature=0.8 top_p=0.95`."""
        words = ["sample" if self.setting("do_sample") else "greedy"]
        for name, neutral in _SHOWN.items():
            value = self.setting(name)
            if value is not None and value != neutral and isinstance(value, (int, float)):
                words.append(f"{name}={value:g}")
        if self.arguments.get("logits_processor"):
            words.append("logits_processor")
        if self.arguments.get("prefix_allowed_tokens_fn") is not None:
            words.append("prefix_allowed_tokens_fn")
        return " ".join(words)

    def for_decoder(self, decoder: Any, tokenizer: Any | None) -> dict[str, Any]:
        """The arguments with which `generate` prepares the call and hands it to `decoder`.

        A custom decoding loop gets neither the streamer nor, for stop strings, the tokenizer: the first is given to the
        decoder, the second used here to build the criterion that `generate` would have built.
        """
        arguments = dict(self.arguments)
        arguments.pop("streamer", None)
        arguments["custom_generate"] = decoder
        stop_strings = self.setting("stop_strings")
        if stop_strings is not None:
            criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
            criteria.append(StopStringCriteria(tokenizer=self._tokenizer(tokenizer), stop_strings=stop_strings))
            arguments["stopping_criteria"] = criteria
            _unset(arguments, self._model, "stop_strings")
        return arguments

    @property
    def hands_back_cache(self) -> bool:
        """May somebody look at the target's cache when the call has ended?"""
        names = ("cache", "past_key_values")
        return bool(self.setting("return_dict_in_generate")) or any(name in self.arguments for name in names)

    def lacks_tokenizer(self, tokenizer: Any | None) -> bool:
        """Stop strings were asked for, and no tokenizer is known to find them with."""
        return self.setting("stop_strings") is not None and self._tokenizer(tokenizer) is None

    def missing_for_original(self, tokenizer: Any | None) -> dict[str, Any]:
        """What the original `generate` needs beyond the user's arguments: a tokenizer, where stop strings need one."""
        if self.setting("stop_strings") is None or "tokenizer" in self.arguments or tokenizer is None:
            return {}
        return {"tokenizer": tokenizer}

    def _tokenizer(self, tokenizer: Any | None) -> Any | None:
        return self.arguments.get("tokenizer", tokenizer)

    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 1 (the start token) when nothing is given, 0 when it is not given as ids."""
        ids = self.prompt_ids()
        if ids is not None:
            return int(ids.shape[-1])
        given = (self.arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
        return 1 if all(value is None for value in given) else 0

    def prompt_ids(self) -> Tensor | None:
        """The prompt, [rows, tokens]; None when it is not given as ids."""
        ids = self.arguments.get("inputs")
        ids = ids if ids is not None else self.arguments.get("input_ids")
        return ids if isinstance(ids, Tensor) and ids.dim() == 2 else None

    def output_tokens(self, output: Any, *, is_encoder_decoder: bool) -> int:
        """Tokens of the answer in what `generate` returned; padding after the end of a row is not counted."""
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        if not isinstance(sequences, Tensor) or sequences.dim() != 2:
            return 0
        rows = sequences[:, 1 if is_encoder_decoder else self.prompt_tokens() :]
        if rows.shape[0] == 1:
            return int(rows.shape[1])
        eos = self.setting("eos_token_id")
        ends = set(torch.as_tensor(eos).flatten().tolist()) if eos is not None else set()
        return sum(_length(row.tolist(), ends) for row in rows)


def _length(row: list[int], ends: set[Any]) -> int:
    """Up to and with the first token that ends a row."""
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


def _unset(arguments: dict[str, Any], model: Any, name: str) -> None:
    """Take one option out of a call without touching the user's objects."""
    config: GenerationConfig | None = arguments.get("generation_config")
    if config is not None and getattr(config, name, None) is not None:
        config = copy.deepcopy(config)
        setattr(config, name, None)
        arguments["generation_config"] = config
    if getattr(getattr(model, "generation_config", None), name, None) is not None:
        arguments[name] = None  # a keyword outranks the model's own config
    else:
        arguments.pop(name, None)
