"""Targets with a draft inside them, made on the device from a seed: no weights are downloaded, acceptance can be set.

The draft is a Llama of a quarter of the target's widths and a few layers. It stands in the first quarter of the
target's residual stream: its weights in the target's first layers, zeros where these would write elsewhere. The mean
square over four times the dimensions is a quarter of the draft's, so that the target's norms hold half the draft's
weights and a quarter of its epsilon: the same function, and as powers of two also the same numbers. The target's other
layers write random numbers into the stream, of a size that is searched for until draft and target agree as often as is
wanted; of size 0 they are the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

NARROW = 4
"""Widths of the target over those of its draft. A power of 4, for the sake of exact numbers."""
SHRINK = 1.0 / math.sqrt(NARROW)
EPSILON = 1e-6
SHARPNESS = 1.5
"""Spread of queries and keys."""
ENTROPY = 2.0
"""Nats of the next token at temperature 1: the head is scaled to it."""
CALIBRATION_TOKENS = 512
REPEATED_TOKENS = 64
SEARCH_STEPS = 12


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, and what is asked of it."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_layers: int
    contexts: tuple[int, ...] = (256, 2048, 8192)
    new_tokens: int = 48
    window: int = 9216
    attention: float = 0.03
    """Size of what attention writes, of what the MLP does. If it is small, the last token decides: where the prompt
    repeats itself so does the answer, which alone does not run in circles within a few dozen tokens. If it is not, a
    cache that was rolled back wrongly shows."""

    def draft(self) -> Shape:
        """The sizes of its draft."""
        narrow = {name: getattr(self, name) // NARROW for name in ("hidden", "heads", "kv_heads", "intermediate")}
        return replace(self, layers=self.draft_layers, **narrow)


SHAPES = {
    "7b": Shape("7b", 4096, 32, 32, 32, 128, 11_008, 32_000, draft_layers=4),
    "1b": Shape("1b", 2048, 16, 32, 8, 64, 8192, 128_256, draft_layers=2),
    "13b": Shape("13b", 5120, 40, 40, 40, 128, 13_824, 32_000, draft_layers=5),
    "tiny": Shape("tiny", 64, 6, 4, 4, 16, 128, 512, draft_layers=2, contexts=(32, 64), new_tokens=12, window=512),
}
"""In order of importance."""
SMALL = Shape("small", 256, 6, 8, 4, 32, 512, 1024, draft_layers=2, contexts=(48,), window=1024, attention=0.5)
FEW_TOKENS = Shape("few tokens", 64, 4, 4, 4, 16, 128, 16, draft_layers=2, contexts=(8,), window=512, attention=0.5)


@dataclass
class Pair:
    """A target and the draft inside it."""

    shape: Shape
    target: Any
    draft: Any
    embedding_error: float  # of the undisturbed target's logits, as a share of the draft's largest
    strength: float = 0.0  # of the disturbance
    agreement: float = 1.0  # share of positions of a random text at which both have the same likeliest token
    entropy: float = 0.0  # nats, of the draft

    @property
    def device(self) -> torch.device:
        device: torch.device = self.target.device
        return device

    def set_agreement(self, wanted: float, seed: int = 0) -> None:
        """Search for the disturbance under which draft and target agree as often as is wanted."""
        text = some_tokens(self, CALIBRATION_TOKENS, seed)

        def agreement(exponent: float) -> float:
            disturb(self.target, self.shape, 2.0**exponent, seed)
            return _agreement(self.draft, self.target, text)

        exponent = _search(agreement, wanted, -12.0, 4.0)
        self.strength, self.agreement = 2.0**exponent, agreement(exponent)

    def prompt(self, length: int, number: int) -> Tensor:
        """[1, length], random tokens, the same for the same number."""
        return some_tokens(self, length, 1000 + number)

    def repetitive_prompt(self, length: int, number: int) -> Tensor:
        """[1, length]: random tokens, what the target says after them, and the same random tokens.

        So the answer is what stands in the prompt, more or less.
        """
        said = min(REPEATED_TOKENS, length * 3 // 8)
        start = self.prompt((length - said) // 2, number)
        options = {"attention_mask": torch.ones_like(start), "do_sample": False}
        once = self.target.generate(input_ids=start, max_new_tokens=said, **options)
        return torch.cat([once, start], dim=1)


def build(shape: Shape, device: torch.device, dtype: torch.dtype, *, entropy: float = ENTROPY, seed: int = 0) -> Pair:
    """A target that is not disturbed yet, and its draft."""
    generator = torch.Generator(device).manual_seed(seed)
    narrow = shape.draft()
    draft = _model(narrow, device, dtype, EPSILON)
    target = _model(shape, device, dtype, EPSILON / NARROW)
    with torch.no_grad():
        _fill(draft, narrow.hidden, shape.attention, generator)
        _fill(target, narrow.hidden, shape.attention, generator)
        disturb(target, shape, 0.0, seed)
        _embed(draft, target)
        pair = Pair(shape, target, draft, embedding_error=math.nan)
        text = some_tokens(pair, CALIBRATION_TOKENS, seed)
        logits = draft(input_ids=text, use_cache=False).logits[0].float()
        # with larger logits the entropy falls
        factor = 2.0 ** _search(lambda exponent: _entropy(logits * 2.0**exponent), entropy, -8.0, 8.0)
        pair.entropy = _entropy(logits * factor)
        for model in (draft, target):
            model.lm_head.weight.mul_(factor)
        ours, theirs = (model(input_ids=text, use_cache=False).logits[0].float() for model in (draft, target))
        pair.embedding_error = float((ours - theirs).abs().max() / ours.abs().max())
    return pair


def disturb(target: Any, shape: Shape, strength: float, seed: int) -> None:
    """Let the layers behind the draft's write random numbers into the residual stream; strength 0: nothing."""
    generator = torch.Generator(target.device).manual_seed(seed + 1)
    with torch.no_grad():
        for layer in target.model.layers[shape.draft_layers :]:
            for projection, size in ((layer.self_attn.o_proj, shape.attention), (layer.mlp.down_proj, 1.0)):
                spread = strength * size / math.sqrt(projection.in_features)
                projection.weight.normal_(0.0, spread, generator=generator)


def some_tokens(pair: Pair, count: int, seed: int) -> Tensor:
    """[1, count], or as many as the window has room for."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, min(count, pair.shape.window))
    return torch.randint(1, pair.shape.vocab, size, generator=generator).to(pair.device)


def streamed_bytes(model: Any) -> int:
    """Of the weights that one forward reads: all but the input embedding, of which it reads a row a token."""
    embedding = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)


def _model(shape: Shape, device: torch.device, dtype: torch.dtype, epsilon: float) -> Any:
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.window,
        rms_norm_eps=epsilon,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # so that 13 billion numbers are not made in float32 first
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def _fill(model: Any, width: int, written: float, generator: torch.Generator) -> None:
    """Random weights that keep sizes, if `width` dimensions of the residual stream are not zero."""
    spread = 1.0 / math.sqrt(width)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.normal_(0.0, SHARPNESS * spread, generator=generator)
        for projection in (attention.v_proj, mlp.gate_proj, mlp.up_proj):
            projection.weight.normal_(0.0, spread, generator=generator)
        for projection, size in ((attention.o_proj, written), (mlp.down_proj, 1.0)):
            projection.weight.normal_(0.0, size / math.sqrt(projection.in_features), generator=generator)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.fill_(1.0)
    model.model.norm.weight.fill_(1.0)
    model.model.embed_tokens.weight.normal_(0.0, 1.0, generator=generator)
    model.lm_head.weight.normal_(0.0, spread, generator=generator)


def _embed(draft: Any, target: Any) -> None:
    """Put the draft's weights into the target, as the module says."""
    width = draft.config.hidden_size
    norms = [target.model.norm]
    for layer in target.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:  # the draft's are all 1
        norm.weight.fill_(SHRINK)
    target.model.embed_tokens.weight.zero_()
    target.model.embed_tokens.weight[:, :width] = draft.model.embed_tokens.weight
    target.lm_head.weight[:, :width] = draft.lm_head.weight
    for small, wide in zip(draft.model.layers, target.model.layers, strict=False):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            ours, theirs = small.get_submodule(name).weight, wide.get_submodule(name).weight
            theirs[: len(ours), :width] = ours  # what the other rows make, nobody reads
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            ours, theirs = small.get_submodule(name).weight, wide.get_submodule(name).weight
            theirs.zero_()
            theirs[:width, : ours.shape[1]] = ours


@torch.no_grad()
def _agreement(draft: Any, target: Any, text: Tensor) -> float:
    ours, theirs = (model(input_ids=text, use_cache=False).logits[0].argmax(dim=-1) for model in (draft, target))
    return float((ours == theirs).double().mean())


def _entropy(logits: Tensor) -> float:
    """Mean over positions, nats. Args: logits: [n, vocab_size], float32."""
    return float(torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1).mean())


def _search(falling: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a falling function has a value, by halving."""
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return (low + high) / 2
