"""Nothing grows from call to call, whichever way calls go."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import tiny
import torch

import autospec
from autospec.drafts import Assistant

pytestmark = pytest.mark.compat

CALLS = 300


def live_objects() -> tuple[int, int]:
    """Objects, and tensor elements, that are alive."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(each.numel() for each in objects if issubclass(type(each), torch.Tensor))


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("off", {}),
    "blocks": ("fixed:ngram:2", {}),
    "assistant": ("fixed:assistant:1", {}),
    "fallback": ("fixed:ngram:2", {"use_cache": False}),
    "control": ("off", {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_many_calls_leave_nothing_behind(way: str) -> None:
    policy, options = WAYS[way]
    model, ids = tiny.llama(hidden_size=8, num_attention_heads=1, num_key_value_heads=1), tiny.prompt(9, period=3)
    drafts: list[Any] = ["ngram", Assistant(model)] if way == "assistant" else ["ngram"]
    with autospec.wrap(model, drafts=drafts, policy=policy) as speculator:
        side: Callable[[], AbstractContextManager[Any]] = speculator.control if way == "control" else nullcontext

        def calls(count: int) -> None:
            for _ in range(count):
                with side():
                    model.generate(ids, max_new_tokens=2, do_sample=False, **options)

        if way == "fallback":
            with pytest.warns(UserWarning, match="use_cache=False"):
                calls(1)
        calls(20)
        objects, elements = live_objects()
        calls(CALLS)
        more_objects, more_elements = live_objects()
    assert more_objects - objects < CALLS / 10
    assert more_elements - elements < CALLS / 10
