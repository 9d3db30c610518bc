"""What prepared forwards bring on this device: measured when they were prepared, kept beside the costs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from autospec.backends.base import CannotPrepareError, Static
from autospec.caches import append, context_window, drop_last
from autospec.costs.cache import costs_folder, write_whole
from autospec.costs.fingerprint import describe, digest
from autospec.costs.probes import SHORT, filled_cache, now, some_tokens
from autospec.fetching import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.backends.packed import PackedLinears
    from autospec.backends.static_model import StaticModel

FORMAT = 1
REPEATS = 7
PACKED_WIDTH = 9
"""Tokens of a block of the usual length."""

_log = logging.getLogger("autospec")


@torch.no_grad()
def measure_speedups(static: StaticModel, *, repeats: int = REPEATS) -> dict[int, float]:
    """Seconds of an eager forward over those of a prepared one, for a plain step and the widest block, in turn.

    Args:
        static: prepared.
        repeats: timings of each; their medians are compared.
    """
    widest = static.widths[-1]
    context = min(SHORT, static.capacities[-1] - widest)
    eager = _Eager(static.model, context, widest)

    def prepared(width: int) -> float:
        static.pretend(context)
        started = now(static.model.device)
        static.run(eager.following[:, :width])
        taken = now(static.model.device) - started
        static.crop(width)
        return taken

    try:
        return _compare((1, widest), eager, prepared, repeats)
    finally:
        static.clear()


@torch.no_grad()
def measure_packed(model: PreTrainedModel, layers: PackedLinears, *, repeats: int = REPEATS) -> dict[int, float]:
    """The same of packed linear layers, for a plain step and a block of `PACKED_WIDTH`.

    Raises:
        CannotPrepareError: they cannot be used now.
    """
    window = context_window(model) or SHORT + PACKED_WIDTH
    eager = _Eager(model, max(1, min(SHORT, window - PACKED_WIDTH)), PACKED_WIDTH)

    def packed(width: int) -> float:
        with layers.lease(model) as why:
            if why:
                raise CannotPrepareError(why)
            return eager(width)

    return _compare((1, PACKED_WIDTH), eager, packed, repeats)


class _Eager:
    """Seconds of a model's own forwards after a context of so many tokens, taken back each time."""

    def __init__(self, model: PreTrainedModel, context: int, widest: int) -> None:
        tokens = some_tokens(model, context + widest)
        self.following = tokens[:, context:]  # [1, widest]
        self._model = model
        self._cache = filled_cache(model, tokens[:, :context])

    def __call__(self, width: int) -> float:
        started = now(self._model.device)
        append(self._model, self.following[:, :width], self._cache, logits_kept=width)
        taken = now(self._model.device) - started
        drop_last(self._cache, width)
        return taken


def _compare(
    widths: Sequence[int], eager: Callable[[int], float], prepared: Callable[[int], float], repeats: int
) -> dict[int, float]:
    seconds: dict[int, list[tuple[float, float]]] = {width: [] for width in widths}
    for repeat in range(repeats + 1):
        for width, found in seconds.items():
            pair = (eager(width), prepared(width))
            if repeat:  # not the first calls
                found.append(pair)
    return {width: median(e for e, _ in found) / median(p for _, p in found) for width, found in seconds.items()}


def remember(target: PreTrainedModel, settings: Static | str, speedups: Mapping[int, float]) -> None:
    """Keep them on disk for `auto`. Args: settings: of fixed shapes, or the name of a backend without."""
    description = _description(target, settings)
    content = {"format": FORMAT, "fingerprint": description, "speedups": {str(k): v for k, v in speedups.items()}}
    try:
        write_whole(costs_folder() / f"backend-{digest(description)}.json", content)
    except RuntimeError as error:  # a home folder that is not to be found
        _log.warning("what the backend brings is not kept: %s", one_line(error))


def remembered(target: PreTrainedModel, settings: Static | str) -> dict[int, float] | None:
    """What was measured for the same model, device and software; None where nothing was, or it cannot be read."""
    try:
        if not any(costs_folder().glob("backend-*.json")):
            return None
        description = _description(target, settings)
        path = costs_folder() / f"backend-{digest(description)}.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["fingerprint"] != json.loads(json.dumps(description)):
            raise ValueError("it belongs to another device, model or backend")
        found = {int(width): float(ratio) for width, ratio in content["speedups"].items()}
        if not found or not all(math.isfinite(ratio) and ratio > 0.0 for ratio in found.values()):
            raise ValueError("it holds no speed-ups")
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("what was measured of the backend is not used: %s", one_line(error))
        return None
    return found


def _description(target: PreTrainedModel, settings: Static | str) -> dict[str, Any]:
    if isinstance(settings, str):
        return {**describe(target, {}), "backend": {"runner": settings}}
    capacities = None if settings.capacities is None else list(settings.capacities)
    shapes = {"runner": settings.runner, "widths": list(settings.widths), "capacities": capacities}
    return {**describe(target, {}), "backend": shapes}
