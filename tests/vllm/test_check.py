"""`autospec export --check`: what vLLM's own configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from autospec.errors import ConfigurationError
from autospec.export.vllm_check import check
from autospec.models import resolve

GOOD: dict[str, Any] = {
    "method": "ngram",
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 0]],
}


def test_what_vllm_takes() -> None:
    assert check(GOOD, resolve("smollm2-135m"), 16).endswith("takes it")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_lookup_min": 9}, "prompt_lookup_min=9 must be <= prompt_lookup_max=3"),
        ({"num_speculative_tokens_per_batch_size": [[2, 4, 4]]}, "must start at 1"),
        ({"nonsense": 1}, "Unexpected keyword argument"),
    ],
)
def test_what_vllm_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check({**GOOD, **changes}, resolve("smollm2-135m"), 16)
