"""Tiny targets with multi-token-prediction layers in a checkpoint of their own, and a tiny DFlash model.

What older releases of transformers lack is imported where it is used: every test file is read on all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

NUM_LAYERS = 2  # of the target


class LlamaWithMtp(LlamaForCausalLM):
    """As models with such layers do, it leaves them in the checkpoint."""

    _keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9]\..*"]  # noqa: RUF012  # transformers' own form


def llama(folder: Path, num_mtp_layers: int = 3, context: float = 0.6, **options: Any) -> Any:
    """A Llama whose next token hangs on the last one, and by `context` on those before: its heads often know it."""
    from transformers.modeling_layers import MtpModel

    plain = tiny.llama(num_mtp_layers=num_mtp_layers, num_hidden_layers=NUM_LAYERS, **options)
    model = LlamaWithMtp(plain.config).eval().to(plain.dtype)
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(5)
    heads = MtpModel(model, num_mtp_layers).to(plain.dtype)
    size = model.config.hidden_size
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *heads.layers.named_parameters()]:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(std=context / size**0.5)
            if name.endswith("eh_proj.weight"):
                parameter.copy_(torch.cat([torch.eye(size), context / 2 * torch.randn(size, size) / size**0.5], dim=-1))
            if name.endswith("embed_tokens.weight"):
                parameter.normal_()
    model.save_pretrained(folder)
    layers = {f"layers.{name}": tensor for name, tensor in heads.layers.state_dict().items()}
    _add(folder, {_as_in_deepseek(name): tensor for name, tensor in layers.items()})
    return LlamaWithMtp.from_pretrained(folder).eval()


def mellum(folder: Path, **options: Any) -> Any:
    """A model with experts, whose only multi-token-prediction layer has a short window."""
    from transformers import MellumConfig, MellumForCausalLM
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_mtp_layers": 1,
        "pad_token_id": 0,
    }
    model = MellumForCausalLM(MellumConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    heads = MtpModel(model, 1)
    with torch.no_grad():
        for parameter in heads.layers.parameters():  # experts come as they lie in memory
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    _add(folder, {_as_in_mellum(name): tensor for name, tensor in heads.layers[0].state_dict().items()})
    return MellumForCausalLM.from_pretrained(folder).eval()


def dflash(target: Any, block_size: int = 5, **options: Any) -> Any:
    """A DFlash model for `target`, on its device and in its dtype."""
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(3)
    config = target.config
    settings: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "block_size": block_size,
        "mask_token_id": config.vocab_size - 1,
        "target_layer_ids": [0, 1],
    }
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**settings, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(target.dtype)


def states_of(target: Any, layers: Any, tokens: list[int]) -> list[torch.Tensor]:
    """[len(tokens), hidden_size] for each layer, by one forward over everything."""
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return [states[layer][0] for layer in layers]


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def _as_in_deepseek(name: str) -> str:
    _, number, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.") if rest != "post_norm.weight" else "shared_head.norm.weight"
    return f"model.layers.{NUM_LAYERS + int(number)}.{rest}"


def _as_in_mellum(name: str) -> str:
    own = {
        "eh_proj.weight": "fc.weight",
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "post_norm.weight": "norm.weight",
    }
    return f"mtp.{own.get(name, 'layers.0.' + name.removeprefix('mtp_block.'))}"
