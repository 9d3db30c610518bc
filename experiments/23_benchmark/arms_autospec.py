"""autospec as its users have it: `wrap`, kept for as long as the arm lives."""

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

    def __init__(self, loaded: Any, policy: str, backend: str = "auto") -> None:
        super().__init__(loaded.model, {})
        self._loaded = loaded
        self._speculator = autospec.wrap(
            self._model,
            drafts=script("15_live").sources(loaded.assistant),
            policy=policy,
            control_share=0.0,
            backend=backend,
        )

    def answer(self, ids: Any, segment: str, options: dict[str, Any], max_new_tokens: int) -> list[int]:
        return super().answer(ids, segment, {**options, "segment": segment}, max_new_tokens)

    def told(self) -> dict[str, Any]:
        record = self._speculator.last_request
        if record is None or record.fallback_reason or record.notes:
            raise RuntimeError(f"not decoded by blocks, or not all of it: {record}")
        return {"actions": dict(record.actions), "backend": self._speculator.backend.name}

    def held(self) -> dict[str, Any]:
        """Sources with their pools, what policy and cost model have learned, packed layers; the assistant apart."""
        state = [self._speculator.sources, self._speculator.policy]
        held = held_bytes(state, shared=[self._loaded.model, self._loaded.assistant])
        return {
            "held_bytes": held + self._speculator.backend.memory_bytes,
            "assistant_bytes": weight_bytes([self._loaded.assistant]),
        }

    def close(self) -> None:
        self._speculator.close()


def arm(kind: str, loaded: Any, settings: dict[str, Any]) -> Wrapped:
    """Args: settings: `policy` and `backend`, as in `autospec.wrap`."""
    return Wrapped(loaded, **settings)
