"""The model's own `generate`, and transformers' prompt lookup, which needs no other model."""

from __future__ import annotations

import copy
from typing import Any


class Generate:
    """`generate` with these options besides the call's own."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model = copy.copy(model)  # same weights, but what is set on it is not set on the others
        self._options = options

    def answer(self, ids: Any, segment: str, options: dict[str, Any], max_new_tokens: int) -> list[int]:
        output = self._model.generate(
            input_ids=ids,
            attention_mask=ids.new_ones(ids.shape),
            max_new_tokens=max_new_tokens,
            **options,
            **self._options,
        )
        return output[0, ids.shape[1] :].tolist()


def arm(kind: str, loaded: Any, settings: dict[str, Any]) -> Generate:
    return Generate(loaded.model, settings)
