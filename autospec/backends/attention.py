"""Attention of a few tokens over a cache on a CPU: query heads that share keys are one product."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MOST_TOKENS = 32
"""Of a forward: blocks, not prompts."""
_NAME = "sdpa"
_DTYPES = (torch.float32, torch.bfloat16)
_CHANGES = ("position_bias", "softcap", "output_attentions")
"""Arguments that ask for something else."""

_users: Counter[int] = Counter()  # forwards of blocks, by thread
_lock = threading.Lock()


@contextmanager
def grouped_attention() -> Iterator[None]:
    """In this thread, models with transformers' `sdpa` attention run it so.

    For a block, transformers repeats keys and values for each query head, and for a single token it asks for a kernel
    that reads them once for each head. Here the queries of all heads that share keys and values are one product with
    them: the same sums, by torch's own kernel. A single query of a head that shares nothing is doubled, since torch
    has a far slower kernel for one row of bfloat16. Whatever is not a few tokens without gradients on a CPU goes to
    transformers' own function.
    """
    user = threading.get_ident()
    with _lock:
        if not _users:
            _install()
        _users[user] += 1
    try:
        yield
    finally:
        with _lock:
            _users[user] -= 1
            if _users[user] <= 0:  # below it: this is a forked child, where it was forgotten
                del _users[user]
            if not _users:
                _uninstall()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward` takes and gives it.

    Args:
        query: [batch, heads, tokens, size].
        key: [batch, heads of keys, length, size], and `value` likewise.
        attention_mask: [batch, 1, tokens, length], or none where every token sees everything.

    Returns:
        [batch, tokens, heads, size].
    """
    groups = _groups(module, query, key, attention_mask, dropout, others)
    if groups == 0:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return found
    batch, heads, tokens, size = query.shape
    rows = 2 if groups == tokens == 1 else 1
    if groups > 1:
        query = query.reshape(batch, heads // groups, groups * tokens, size)
        if attention_mask is not None and tokens > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    elif rows > 1:
        query = query.expand(batch, heads, rows, size)
    seen = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    if rows > 1:
        seen = seen[:, :, :1]
    return seen.reshape(batch, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


def _groups(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> int:
    """How many query heads share keys; 0 where this is not for us."""
    if threading.get_ident() not in _users or query.device.type != "cpu" or query.dtype not in _DTYPES:
        return 0
    if torch.is_grad_enabled() or dropout or any(others.get(name) is not None for name in _CHANGES):
        return 0
    tokens = query.shape[2]
    groups = getattr(module, "num_key_value_groups", 1)
    if not 0 < tokens <= MOST_TOKENS or groups * key.shape[1] != query.shape[1]:
        return 0
    is_fit = tokens == 1 if mask is None else mask.dim() == 4 and mask.shape[1:3] == (1, tokens)
    is_slow_row = tokens == 1 and query.dtype is torch.bfloat16
    if not is_slow_row and (groups == 1 or tokens == 1):  # nothing to win
        return 0
    return int(groups) if is_fit else 0


def _install() -> None:
    if ALL_ATTENTION_FUNCTIONS.get(_NAME) is sdpa_attention_forward:  # else somebody has one of his own
        ALL_ATTENTION_FUNCTIONS[_NAME] = attention


def _uninstall() -> None:
    if ALL_ATTENTION_FUNCTIONS.get(_NAME) is attention:
        del ALL_ATTENTION_FUNCTIONS[_NAME]


def _forget_users() -> None:
    """In a forked child whoever used it is not there, and the lock may be held by a thread that is not, either."""
    global _lock
    _lock = threading.Lock()
    _users.clear()
    _uninstall()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_users)
