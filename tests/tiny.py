"""Tiny random models and a tokenizer, made from configurations: no downloads."""

from __future__ import annotations

import copy
import string
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

VOCAB = 64


def llama(seed: int = 0, vocab_size: int = VOCAB, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A Llama of two narrow layers whose logits are spread enough to be worth guessing."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **options})).eval()
    return _sharpened(model, dtype)


def mistral(seed: int = 0, window: int = 8, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A Mistral whose layers forget what lies outside a short window."""
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return _sharpened(MistralForCausalLM(config).eval(), dtype)


def near_copy(model: Any, noise: float = 0.15, seed: int = 1) -> Any:
    """A draft that often agrees with `model` and often does not."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = noise * parameter.std() if parameter.dim() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return draft


def _sharpened(model: Any, dtype: torch.dtype) -> Any:
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12.0)
    return model.to(dtype)


def prompt(length: int = 20, seed: int = 0, period: int = 7) -> torch.Tensor:
    """[1, length], repeating itself, so that retrieval finds something."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (1, period), generator=generator).repeat(1, length // period + 1)[:, :length]


def tokenizer(vocab_size: int = VOCAB, order: list[int] | None = None) -> PreTrainedTokenizerFast:
    """One character a token: id i is the character number i. `order` permutes which id is which character."""
    letters = (string.ascii_letters + string.digits + string.punctuation)[:vocab_size]
    ids = order if order is not None else list(range(vocab_size))
    inner = Tokenizer(WordLevel({letters[i]: index for index, i in enumerate(ids)}, unk_token=letters[0]))
    inner.pre_tokenizer = Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=letters[0], pad_token=letters[0])
