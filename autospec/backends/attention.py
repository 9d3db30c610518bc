"""Attention of a few tokens over a cache on a CPU: queries that share keys are one product."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MOST_TOKENS = 32
"""Tokens of a forward: of a block, not of a prompt."""
_NAME = "sdpa"
_DTYPES = (torch.float32, torch.bfloat16)

_users: dict[int, list[Collection[int]]] = {}  # by thread: of each request, the modules whose attention it is
_lock = threading.Lock()


@contextmanager
def grouped_attention(modules: Collection[int]) -> Iterator[None]:
    """In this thread these modules run transformers' `sdpa` attention so.

    For a block, transformers repeats keys and values for each query head, and for a single token it asks for a kernel
    that reads them once for each head. Here the queries of all heads that share keys and values are one product with
    them: the same sums, by torch's own kernel. A single query of a head that shares nothing is doubled, since torch
    has a far slower kernel for one row of bfloat16. Whatever is not a few tokens without gradients on a CPU goes to
    transformers' own function.

    Args:
        modules: `id` of each.
    """
    user = threading.get_ident()
    with _lock:
        if not _users:
            _install()
        _users.setdefault(user, []).append(modules)
    try:
        yield
    finally:
        with _lock:
            mine = _users.get(user, [])  # empty in a forked child, where it was forgotten
            if mine:
                mine.pop()
            if not mine:
                _users.pop(user, None)
            if not _users:
                _uninstall()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *arguments: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward` takes and gives it.

    Args:
        query: [batch, heads, tokens, size].
        key: [batch, heads of keys, length, size]; `value` likewise, of any size.
        attention_mask: [batch, 1, tokens, length]; None for a single token that sees everything.
        arguments, named: as transformers gives them: dropout, scaling and so on.

    Returns:
        [batch, tokens, heads, size].
    """
    groups = None if arguments else _groups(module, query, key, value, attention_mask, named)
    if groups is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, *arguments, **named
        )
        return found
    batch, heads, tokens, size = query.shape
    if groups > 1:
        query = query.reshape(batch, heads // groups, groups * tokens, size)
        if attention_mask is not None and tokens > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    else:
        query = query.expand(batch, heads, 2, size)  # of which the second one is dropped below
    seen = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=named.get("scaling"))
    if groups == 1:
        seen = seen[:, :, :1]
    return seen.reshape(batch, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


def _groups(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: dict[str, Any]
) -> int | None:
    """Query heads that share keys, where there is something to win; None: it is transformers' own."""
    mine = _users.get(threading.get_ident())
    if mine is None or not any(id(module) in modules for modules in mine):
        return None
    if query.device.type != "cpu" or query.dtype not in _DTYPES or torch.is_grad_enabled() or _asks_for_more(named):
        return None
    batch, heads, tokens, _ = query.shape
    groups = int(getattr(module, "num_key_value_groups", 1))
    if not 0 < tokens <= MOST_TOKENS or key.shape[:2] != (batch, heads // groups) or heads % groups:
        return None
    if mask is None and tokens > 1:  # each one sees those before it alone, and no mask says so
        return None
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != tokens):
        return None
    if groups == 1 and value.shape[-1] != query.shape[-1]:  # torch then has no such kernel
        return None
    is_slow_row = tokens == 1 and query.dtype is torch.bfloat16
    return groups if is_slow_row or (groups > 1 and tokens > 1) else None


def _asks_for_more(named: dict[str, Any]) -> bool:
    if named.get("dropout") or named.get("output_attentions"):
        return True
    return any(named.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))


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
