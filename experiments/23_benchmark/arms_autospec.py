"""autospec as its users have it: `wrap`, kept for as long as the arm lives, forwards as the model runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

from arms_plain import Generate
from common import script

import autospec
from autospec.memory import held_bytes, weight_bytes


class Wrapped(Generate):
    """A wrapped copy of the model over the same weights, so that each arm learns by itself."""

    def __init__(self, loaded: Any, policy: str) -> None:
        super().__init__(loaded.model, {})
        self._loaded = loaded
        self._speculator = autospec.wrap(
            self._model,
            drafts=script("15_live").sources(loaded.assistant),
            policy=policy,
            control_share=0.0,
            backend="eager",
        )

    def answer(self, ids: Any, segment: str, options: dict[str, Any], max_new_tokens: int) -> list[int]:
        return super().answer(ids, segment, {**options, "segment": segment}, max_new_tokens)

    def told(self) -> dict[str, Any]:
        record = self._speculator.last_request
        if record is None or record.fallback_reason or record.notes:
            raise RuntimeError(f"not decoded by blocks, or not all of it: {record}")
        return {"actions": dict(record.actions)}

    def held(self) -> dict[str, Any]:
        """Sources with their pools, what the policy and the cost model have learned; the assistant's weights apart."""
        state = [self._speculator.sources, self._speculator.policy]
        return {
            "held_bytes": held_bytes(state, shared=[self._loaded.model, self._loaded.assistant]),
            "assistant_bytes": weight_bytes([self._loaded.assistant]),
        }

    def close(self) -> None:
        self._speculator.close()


def arm(kind: str, loaded: Any, settings: dict[str, Any]) -> Wrapped:
    """Args: settings: `policy`, as in `autospec.wrap`."""
    return Wrapped(loaded, **settings)
