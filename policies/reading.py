"""Checks that policies share: of settings, and of a state that somebody hands them as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.errors import ConfigurationError

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MOST = 1e15
"""No number of a state is larger in size: what is counted and timed stays far below, and its squares stay finite."""


def check_whole(name: str, value: object, low: int) -> None:
    """Refuse a setting that is no whole number of at least `low`.

    Raises:
        ConfigurationError: names the setting, its value and what is allowed.
    """
    if type(value) is not int or value < low:
        raise ConfigurationError(f"{name}={value!r}: a whole number of at least {low} is needed")


@contextmanager
def reading_state(policy: str, state: object, keys: Collection[str]) -> Iterator[None]:
    """Turn whatever goes wrong inside, and unknown or missing entries, into one clear error.

    Raises:
        ConfigurationError: the state is not one of this policy.
    """
    if not isinstance(state, Mapping) or set(state) != set(keys):
        found = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(
            f"this is no state of policy {policy!r}: {', '.join(sorted(keys))} are needed, found {found}"
        )
    try:
        yield
    except ConfigurationError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(f"this is no state of policy {policy!r}: {type(error).__name__}: {error}") from error


def restored_random(state: Mapping[str, Any]) -> np.random.Generator:
    """A generator that goes on from a `bit_generator.state`."""
    random = np.random.default_rng()
    random.bit_generator.state = dict(state)
    return random


def finite(values: Any, shape: tuple[int, ...], low: float = -MOST, high: float = MOST) -> Floats:
    """[shape], the values as an array. Raises: ValueError, TypeError: another shape, or not all of them in range."""
    array = np.array(values, dtype=np.float64)
    if array.shape != shape or not ((array >= low) & (array <= high)).all():
        raise ValueError(f"numbers from {low:g} to {high:g} of shape {shape} are needed, not {values!r:.40}")
    return array


def check_numbers(values: Iterable[Any], low: float = -MOST, high: float = MOST) -> None:
    """Raises: TypeError, ValueError, OverflowError: one is no finite number, or not in range."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TypeError(f"{value!r:.40} is no number")
        if not low <= value <= high:
            raise ValueError(f"{value!r:.40} is not from {low:g} to {high:g}")


def check_precision(matrices: Floats) -> None:
    """Of Gaussians, [..., n, n]. Raises: ValueError: one is not symmetric, or not positive definite."""
    if not np.allclose(matrices, matrices.swapaxes(-1, -2), rtol=1e-6):
        raise ValueError("matrices that are not symmetric")
    np.linalg.cholesky(matrices)
