"""May this target be verified by blocks? Asked of the model itself, once, before anything depends on it.

Some models see later tokens of the same forward, restart a state on every forward of several tokens, or keep caches
that do not come back from a rollback. Their blocks would be wrong without any error.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from autospec.backends.agreement import agree
from autospec.caches import append, context_window, decoding_cache, drop_last, why_not_rollback

PROMPT_TOKENS = 12
BLOCK_TOKENS = 5
KEPT_TOKENS = 2

_known: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()


def why_not_by_blocks(target: PreTrainedModel) -> str | None:
    """`probe`, once for each model, device and number format."""
    place = (target.device, target.dtype, getattr(target.config, "_attn_implementation", None))
    answers = _known.setdefault(target, {})
    if place not in answers:
        answers[place] = probe(target)
    return answers[place]


@torch.no_grad()
def probe(target: PreTrainedModel) -> str | None:
    """Compare one forward over several tokens, and one after a rollback, with forwards over one token each.

    Returns:
        Why the target must be decoded plainly; None when blocks are right.
    """
    window = context_window(target)
    if window is not None and window < PROMPT_TOKENS + BLOCK_TOKENS + 1:
        return f"a context window of {window} tokens has no room for blocks"
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(target.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, vocab_size, (1, PROMPT_TOKENS + BLOCK_TOKENS + 1), generator=generator).to(target.device)
    end = PROMPT_TOKENS + BLOCK_TOKENS
    prompt, block, last = tokens[:, :PROMPT_TOKENS], tokens[:, PROMPT_TOKENS:end], tokens[:, end:]

    def run(part: Tensor, cache: Any, logits_kept: int = 1) -> tuple[Tensor, Any]:
        logits, cache = append(target, part, cache, logits_kept=logits_kept)
        if why_not_rollback(cache) is None:
            drop_last(cache, 0)
        return logits, cache

    _, cache = run(prompt, decoding_cache(target))
    if why := why_not_rollback(cache):
        return why
    singles = [run(block[:, i : i + 1], cache)[0][0] for i in range(BLOCK_TOKENS)]
    _, cache = run(prompt, decoding_cache(target))
    for i in range(KEPT_TOKENS):
        run(block[:, i : i + 1], cache)
    never_rolled_back, _ = run(last, cache)
    _, cache = run(prompt, decoding_cache(target))
    wide, cache = append(target, block, cache, logits_kept=BLOCK_TOKENS)
    if not agree(wide, torch.stack(singles)):
        return "a forward over several tokens gives other logits than one token at a time"
    drop_last(cache, BLOCK_TOKENS - KEPT_TOKENS)
    rolled_back, _ = run(last, cache)
    if not agree(rolled_back, never_rolled_back):
        return "after a rollback the cache gives other logits than before"
    return None
