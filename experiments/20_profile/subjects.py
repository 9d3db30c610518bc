"""Models and prompts that are measured: a random one whose arithmetic is next to nothing, and SmolLM2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from autospec import models
from autospec.data import load_prompts

NAMES = ("tiny", "bfloat16", "float32")
"""A random model of two narrow layers, and SmolLM2-135M in two number formats."""
TINY_VOCABULARY = 1024
_CHARACTERS = 16_000


@dataclass
class Subject:
    """A target with a smaller model to draft for it. Neither has an end of sequence that is ever said."""

    name: str
    model: Any
    tokenizer: Any | None
    assistant: Any
    text: Sequence[int]  # what prompts are cut from
    backend: str = "eager"  # of the wrapped ways to answer

    def prompt(self, num_tokens: int) -> Tensor:
        """[1, num_tokens]."""
        repeated = list(self.text) * (num_tokens // len(self.text) + 1)
        return torch.tensor([repeated[:num_tokens]])


def subject(name: str) -> Subject:
    """One of `NAMES`."""
    if name == "tiny":
        tokenizer = None
        model, assistant = _random(layers=2, seed=0), _random(layers=1, seed=1)
        text = torch.randint(1, TINY_VOCABULARY, (97,), generator=torch.Generator().manual_seed(0)).tolist()
    else:
        model, tokenizer = models.load("smollm2-135m", dtype=name)
        assistant = models.load_model("smollm2-135m-assistant", dtype=name)
        contents = [message["content"] for prompt in load_prompts() for message in prompt.messages]
        text = tokenizer("\n\n".join(contents)[:_CHARACTERS])["input_ids"]
    # an end that is looked for, as in every real call, and never comes
    model.generation_config.eos_token_id = model.config.vocab_size
    model.generation_config.pad_token_id = 0
    return Subject(name, model, tokenizer, assistant, text)


def _random(layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()
