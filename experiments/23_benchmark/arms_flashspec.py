"""The package flashspec: its engine, as its quick start builds it, over the target that is loaded already."""

from __future__ import annotations

from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from transformers import DynamicCache
from whole import whole_vocabulary

CPU = torch.device("cpu")


class FlashSpec:
    """An engine for each temperature that is asked for.

    Args:
        strategy: the package's `drafter_strategy`. `bandit` with one drafter is that drafter at `gamma`.
        drafter: `model` (the packaged assistant, under the whole vocabulary) or `lookup`.
        max_ngram: of its prompt lookup.
    """

    def __init__(self, loaded: Any, strategy: str, drafter: str, gamma: int = 4, max_ngram: int = 3) -> None:
        self._strategy, self._gamma = strategy, gamma
        self._target = TargetModel(loaded.folder, CPU, loaded.model.dtype, model=loaded.model)
        self._model = None
        self._lookup = NgramDrafter(max_ngram=max_ngram)
        if drafter == "model":
            whole = whole_vocabulary(loaded)
            whole.register_forward_pre_hook(_with_whole_cache, with_kwargs=True)
            self._model = HuggingFaceDrafter(loaded.assistant_folder, CPU, whole.dtype, model=whole)
        end = loaded.model.generation_config.eos_token_id
        self._ends = [end] if isinstance(end, int) else list(end or ())
        self._engines: dict[float, Any] = {}

    def answer(self, ids: Any, segment: str, options: dict[str, Any], max_new_tokens: int) -> list[int]:
        temperature = options["temperature"] if options["do_sample"] else 0.0
        if temperature not in self._engines:
            self._engines[temperature] = self._engine(temperature)
        result = self._engines[temperature].generate(ids, max_new_tokens=max_new_tokens, eos_token_ids=self._ends)
        return result.output_ids[0, : result.n_tokens_generated].tolist()

    def _engine(self, temperature: float) -> Any:
        settings: dict[str, Any] = {"sampling": SamplingConfig(gamma=self._gamma, temperature=temperature)}
        if self._strategy != "auto":
            settings["bandit"] = BanditConfig(n_arms=1)
        if self._model is not None:
            self._model.set_temperature(temperature)
        drafters = [self._lookup] if self._model is None else [self._model]
        config = FlashSpecConfig(device="cpu", drafter_strategy=self._strategy, **settings)
        return SpeculativeEngine(config, drafters, self._target)


def _with_whole_cache(model: Any, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The package rolls its draft model back, which transformers refuses for layers that forget: the assistant has
    a sliding window. With a cache of the whole text its masks keep to the window all the same."""
    if keywords.get("past_key_values") is None:
        keywords["past_key_values"] = DynamicCache()
    return arguments, keywords


def arm(kind: str, loaded: Any, settings: dict[str, Any]) -> FlashSpec:
    return FlashSpec(loaded, **settings)
