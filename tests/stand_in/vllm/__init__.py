"""A stand-in for vLLM's offline engine: makes a proposer as vLLM does, and lets tests/vllm_driver.py call it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from tests.vllm_driver import VOCAB_SIZE, Asked, Engine, config, scramble


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool


class LLM:
    def __init__(self, **named: Any) -> None:
        if "fails" in named:
            raise RuntimeError(named["fails"])
        speculative = named["speculative_config"]
        module, _, name = speculative["model"].rpartition(".")
        made = config(
            model_config__model=named["model"],
            speculative_config__num_speculative_tokens=speculative["num_speculative_tokens"],
            additional_config=named["additional_config"],
        )
        proposer = getattr(import_module(module), name)(made)
        proposer.load_model(None)
        self._engine = Engine(
            proposer.propose, max_num_seqs=named["max_num_seqs"], tick=lambda tokens: time.sleep(0.0002 * tokens)
        )

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(vocab_size=VOCAB_SIZE)

    def generate(self, prompts: list[Any], sampling: SamplingParams, *, use_tqdm: bool) -> None:
        asked = [
            Asked(str(n), list(prompt["prompt_token_ids"]), scramble(n), sampling.max_tokens, ignores_end=True)
            for n, prompt in enumerate(prompts)
        ]
        self._engine.add(*asked)
        self._engine.run()
