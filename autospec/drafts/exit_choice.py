"""How many first layers of a target are worth drafting with, as far as can be told before there is traffic."""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from autospec.caches import append, context_window, drop_last, new_cache
from autospec.drafts.early_exit import first_layers_of
from autospec.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
TEXT_TOKENS = 64
BLOCK_LENGTHS = range(1, 9)
REPEATS = 5

_log = logging.getLogger("autospec")


@torch.no_grad()
def choose_num_layers(target: PreTrainedModel) -> int:
    """The number of layers with the largest expected goodput on a text that the target samples from nothing.

    Agreement is the share of its positions at which the first layers have the target's likeliest token, cost the time
    of a step through them over that of the target. About a hundred steps of the target.

    Raises:
        DraftError: no number of its layers can be run by itself.
    """
    total = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    candidates = sorted({max(1, round(total * share)) for share in SHARES} - {total})
    if not candidates:
        raise DraftError(f"early_exit: {type(target).__name__} has {total} layer, and fewer are needed")
    text = _own_text(target, min(TEXT_TOKENS, (context_window(target) or TEXT_TOKENS + 2) - 2))
    expected = target(text).logits[0].argmax(-1)
    seconds = _step_seconds(target, text)
    values: dict[int, float] = {}
    for num_layers in candidates:
        draft = first_layers_of(target, num_layers)
        agreement = float((draft(text).logits[0].argmax(-1) == expected).double().mean())
        values[num_layers] = goodput(agreement, _step_seconds(draft, text) / seconds)
    chosen = max(values, key=lambda num_layers: values[num_layers])
    _log.info("early exit after %d of %d layers, of expected goodput %s", chosen, total, values)
    return chosen


def goodput(agreement: float, cost: float) -> float:
    """Tokens in the time of a plain step at the best block length, verification taken to cost one step.

    Args:
        agreement: probability that a draft is accepted.
        cost: of a draft token, in steps of the target.

    Source: Leviathan et al. 2023, section 3.3.
    """
    return max(
        sum(agreement**position for position in range(length + 1)) / (1 + length * cost) for length in BLOCK_LENGTHS
    )


def _own_text(target: PreTrainedModel, num_tokens: int) -> Tensor:
    """[1, num_tokens + 1], sampled with noise of its own."""
    generator = torch.Generator(target.device).manual_seed(0)
    start = getattr(target.generation_config, "bos_token_id", None)
    tokens = [start if isinstance(start, int) else 0]
    cache: Any = new_cache(target)
    for _ in range(num_tokens):
        logits, cache = append(target, torch.tensor([tokens[-1:]], device=target.device), cache)
        probs = logits[0].float().softmax(-1)
        tokens.append(int(torch.multinomial(probs, 1, generator=generator)))
    return torch.tensor([tokens], device=target.device)


def _step_seconds(model: PreTrainedModel, text: Tensor) -> float:
    _, cache = append(model, text, new_cache(model))
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        append(model, text[:, -1:], cache)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - started)
        drop_last(cache, 1)
    return statistics.median(seconds)
