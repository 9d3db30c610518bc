"""Which law a growing cost follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

LAWS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": np.zeros_like,
    "logarithm": np.log,
    "linear": lambda x: x,
    "n log n": lambda x: x * np.log(x),
    "square": lambda x: x**2,
}
"""cost = a + b f(x); from slow to fast."""
LEAST_GAIN = 0.5
"""Share of the squared error that a faster law has to take away before it is believed."""
LEAST_ADDED = 0.05
"""What a law has to add from end to end, over the mean, before it is called growth."""


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float | str]:
    """The slowest law that no faster one betters by much, its a and b, and what x adds from end to end.

    Args:
        x: ascending, above 0.
        y: cost at each.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    best, kept = "constant", (float(ys.mean()), 0.0, float(((ys - ys.mean()) ** 2).sum()))
    for name, f in list(LAWS.items())[1:]:
        a, b, error = _least_squares(f(xs), ys)
        added = b * float(f(xs[-1:])[0] - f(xs[:1])[0])
        if added > LEAST_ADDED * abs(float(ys.mean())) and error < (1 - LEAST_GAIN) * kept[2]:
            best, kept = name, (a, b, error)
    a, b, _ = kept
    ends = LAWS[best](xs[[0, -1]])
    return {"law": best, "a": a, "b": b, "added": float(b * (ends[1] - ends[0]))}


def _least_squares(f: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    columns = np.stack([np.ones_like(f), f], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, y, rcond=None)
    return float(a), float(b), float(((columns @ [a, b] - y) ** 2).sum())
