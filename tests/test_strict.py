"""`strict=True`: where rounding decides between tokens, plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import autospec

pytestmark = pytest.mark.compat

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_decoded_plainly(dtype: torch.dtype) -> None:
    model = tiny.llama(dtype=dtype)
    ids = tiny.prompt(20)
    plain = model.generate(ids, **OPTIONS)
    with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:4", strict=True) as speculator:
        with pytest.warns(UserWarning, match="round differently") as caught:
            found = [model.generate(ids, **OPTIONS) for _ in range(2)]
        record = speculator.last_request
    assert len(caught) == 1
    assert record is not None
    assert record.fallback_reason == (
        f"strict=True, and blocks in {str(dtype).removeprefix('torch.')} round differently from one token at a time"
    )
    assert all(torch.equal(plain, each) for each in found)


def test_full_precision_is_decoded_by_blocks_until_the_model_changes() -> None:
    model = tiny.llama(dtype=torch.float32)
    ids = tiny.prompt(20)
    with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:4", strict=True) as speculator:
        model.generate(ids, **OPTIONS)
        assert speculator.last_request is not None
        assert speculator.last_request.fallback_reason is None
        assert speculator.last_request.num_draft_tokens > 0
        model.to(torch.bfloat16)
        with pytest.warns(UserWarning, match="bfloat16"):
            model.generate(ids, **OPTIONS)
        assert speculator.last_request.fallback_reason is not None


def test_quantised_weights_are_decoded_plainly() -> None:
    model = tiny.llama(dtype=torch.float32)
    model.is_quantized = True  # what transformers sets on models it loads with quantised weights
    with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:4", strict=True) as speculator:
        with pytest.warns(UserWarning, match="quantised weights"):
            model.generate(tiny.prompt(20), **OPTIONS)
        assert speculator.last_request is not None
        assert speculator.last_request.num_draft_tokens == 0


def test_without_it_half_precision_is_decoded_by_blocks() -> None:
    model = tiny.llama(dtype=torch.bfloat16)
    with autospec.wrap(model, drafts=["ngram"], policy="fixed:ngram:4") as speculator:
        model.generate(tiny.prompt(20), **OPTIONS)
        assert speculator.last_request is not None
        assert speculator.last_request.num_draft_tokens > 0


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_only_true_or_false(wrong: Any) -> None:
    with pytest.raises(autospec.ConfigurationError, match="True or False"):
        autospec.wrap(tiny.llama(), policy="off", strict=wrong)
