"""Attention over heads that share keys: transformers' own sums, in the thread that asks for them alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autospec.backends import attention as under_test
from autospec.backends.attention import MOST_TOKENS, grouped_attention

pytestmark = pytest.mark.compat

LENGTH, SIZE = 40, 16


def states(dtype: torch.dtype, heads: int, key_heads: int, tokens: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(tokens)
    shapes = ((heads, tokens), (key_heads, LENGTH), (key_heads, LENGTH))
    return tuple(torch.randn(batch, h, n, SIZE, generator=chance).to(dtype) for h, n in shapes)


def causal(tokens: int, dtype: torch.dtype = torch.bool, batch: int = 1) -> torch.Tensor:
    """[batch, 1, tokens, length], with something hidden in the middle, too."""
    mask = torch.ones(batch, 1, tokens, LENGTH, dtype=torch.bool).tril(LENGTH - tokens)
    mask[..., 5:9] = False
    if dtype is torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of query rows that torch's function is called with by this module."""
    seen: list[int] = []
    real = under_test.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return real(query, *args, **named)

    monkeypatch.setattr(under_test, "scaled_dot_product_attention", counted)
    return seen


def a_module(groups: int = 1) -> Any:
    return SimpleNamespace(num_key_value_groups=groups, is_causal=True)


@contextmanager
def used(*modules: Any) -> Iterator[None]:
    with torch.no_grad(), grouped_attention({id(module) for module in modules}):
        yield


MASKS = [(torch.float32, torch.bool), (torch.float32, torch.float32), (torch.bfloat16, torch.bool)]
MASKS += [(torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "mask_dtype"), MASKS)
@pytest.mark.parametrize("tokens", [1, 2, 5, MOST_TOKENS])
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_gives_what_transformers_gives(
    dtype: torch.dtype, mask_dtype: torch.dtype, tokens: int, heads: int, key_heads: int, batch: int
) -> None:
    module = a_module(heads // key_heads)
    given = states(dtype, heads, key_heads, tokens, batch)
    for mask in (causal(tokens, mask_dtype, batch), *([None] if tokens == 1 else [])):
        with used(module):
            found, _ = under_test.attention(module, *given, mask, scaling=0.3)
        expected, _ = sdpa_attention_forward(module, *given, mask, scaling=0.3)
        assert found.shape == expected.shape
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_it_takes_the_rows_of_a_group_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_calls(monkeypatch)
    for heads, key_heads, tokens, dtype in (
        (6, 2, 1, torch.bfloat16),
        (6, 2, 5, torch.float32),
        (4, 4, 1, torch.bfloat16),
    ):
        module = a_module(heads // key_heads)
        with used(module):
            under_test.attention(module, *states(dtype, heads, key_heads, tokens), causal(tokens))
    assert seen == [3, 15, 2]


def test_everything_else_goes_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_calls(monkeypatch)
    module, alone = a_module(3), a_module()
    few, many = (states(torch.bfloat16, 6, 2, tokens) for tokens in (3, MOST_TOKENS + 1))
    one = states(torch.bfloat16, 6, 2, 1)
    with grouped_attention({id(module), id(alone)}):
        under_test.attention(module, *few, causal(3))  # gradients are on
        with torch.no_grad():
            under_test.attention(module, *many, None, is_causal=True)
            under_test.attention(module, *few, None, is_causal=True)  # the order is in no mask
            under_test.attention(module, *few, causal(3).expand(1, 6, 3, LENGTH))
            under_test.attention(module, *few, causal(3), dropout=0.1)
            under_test.attention(module, *few, causal(3), 0.1)
            under_test.attention(module, *one, causal(1), position_bias=torch.zeros(1, 6, 1, LENGTH).bfloat16())
            under_test.attention(module, *states(torch.float32, 6, 2, 1), None)  # fast as it is
            under_test.attention(alone, *states(torch.bfloat16, 4, 4, 3), causal(3))
            under_test.attention(alone, one[0], one[1].repeat(1, 3, 1, 1), one[1].repeat(1, 3, 1, 2), None)
            learned = a_module(3), one[0], *(each.repeat(2, 1, 1, 1) for each in one[1:])  # queries for every row
            under_test.attention(*learned, causal(1))
            under_test.attention(a_module(3), *few, causal(3))  # another model in this thread
    with torch.no_grad():
        under_test.attention(module, *few, causal(3))  # nobody asked
    assert seen == []


def test_others_run_transformers_own() -> None:
    """Threads that did not ask, and everybody once it is over."""
    seen: list[bool] = []

    def look() -> None:
        seen.append(threading.get_ident() in under_test._users)

    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with used(), used():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is under_test.attention
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == [False, True]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert not under_test._users


def test_a_request_within_a_request_has_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, outer, inner = count_calls(monkeypatch), a_module(3), a_module(3)
    given = *states(torch.bfloat16, 6, 2, 1), None
    with used(outer):
        with used(inner):
            under_test.attention(outer, *given)
            under_test.attention(inner, *given)
        under_test.attention(outer, *given)
        under_test.attention(inner, *given)
    assert len(seen) == 3


def test_an_attention_that_somebody_has_set_stays() -> None:
    def own(*args: Any, **named: Any) -> Any:
        return sdpa_attention_forward(*args, **named)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        with used():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
        with used():
            pass
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    with used():
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own  # in the middle of a request
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    del ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_transformers_own() -> None:
    with used():
        child = os.fork()
        if child == 0:
            is_own = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward and not under_test._users
            os._exit(0 if is_own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
