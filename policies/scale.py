"""How large some noisy quantity usually is."""

from __future__ import annotations

from typing import Any

import numpy as np

from autospec.policies.reading import finite

_SIZE = 128
_QUANTILE = 0.9
_LEAST = 0.02
_MOST = 1e100
_LOOK_EVERY = 8


class Scale:
    """A high quantile of the last sizes of a quantity: no single outlier moves it. 1 as long as little is known."""

    def __init__(self) -> None:
        self.value = 1.0
        self._sizes = np.zeros(_SIZE)
        self._count = 0

    def add(self, value: float) -> None:
        self._sizes[self._count % _SIZE] = abs(value)
        self._count += 1
        if self._count >= 4 and (self._count < 16 or self._count % _LOOK_EVERY == 0):
            sizes = self._sizes[: self._count]
            place = min(len(sizes) - 1, int(_QUANTILE * len(sizes)))
            self.value = max(float(np.partition(sizes, place)[place]), _LEAST)

    def state(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"value": self.value, "sizes": self._sizes[: self._count].tolist(), "count": self._count}

    @classmethod
    def restored(cls, state: Any) -> Scale:
        """Raises: ValueError, TypeError, KeyError: this is no such state."""
        scale = cls()
        scale.value = float(finite(state["value"], (), _LEAST, _MOST))
        scale._count = state["count"]
        if type(scale._count) is not int or scale._count < 0:
            raise ValueError(f"a scale from {scale._count!r:.40} sizes")
        known = min(scale._count, _SIZE)
        scale._sizes[:known] = finite(state["sizes"], (known,), 0.0, _MOST)
        return scale
