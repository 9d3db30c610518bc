"""What prepared forwards bring on this device: measured when they were prepared, kept beside the costs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from autospec.backends.base import Static
from autospec.caches import append, drop_last
from autospec.costs.cache import costs_folder, write_whole
from autospec.costs.fingerprint import describe, digest
from autospec.costs.probes import SHORT, filled_cache, now, some_tokens
from autospec.fetching import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.backends.static_model import StaticModel

FORMAT = 1
REPEATS = 7

_log = logging.getLogger("autospec")


@torch.no_grad()
def measure_speedups(static: StaticModel, *, repeats: int = REPEATS) -> dict[int, float]:
    """Seconds of an eager forward over those of a prepared one, for a plain step and the widest block, in turn.

    Args:
        static: prepared.
        repeats: timings of each; their medians are compared.
    """
    model, widest = static.model, static.widths[-1]
    context = min(SHORT, static.capacities[-1] - widest)
    tokens = some_tokens(model, context + widest)
    cache = filled_cache(model, tokens[:, :context])
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for width in sorted({1, widest}):
            following = tokens[:, context : context + width]
            started = now(model.device)
            append(model, following, cache, logits_kept=width)
            eager = now(model.device) - started
            drop_last(cache, width)
            static.pretend(context)
            started = now(model.device)
            static.run(following)
            prepared = now(model.device) - started
            static.crop(width)
            if repeat:  # not the first calls
                seconds.setdefault(("eager", width), []).append(eager)
                seconds.setdefault(("prepared", width), []).append(prepared)
    static.clear()
    return {
        width: median(seconds["eager", width]) / median(seconds["prepared", width]) for width in sorted({1, widest})
    }


def remember(target: PreTrainedModel, settings: Static, speedups: Mapping[int, float]) -> None:
    """Keep them on disk for `auto`."""
    description = _description(target, settings)
    content = {"format": FORMAT, "fingerprint": description, "speedups": {str(k): v for k, v in speedups.items()}}
    try:
        write_whole(costs_folder() / f"backend-{digest(description)}.json", content)
    except RuntimeError as error:  # a home folder that is not to be found
        _log.warning("what the backend brings is not kept: %s", one_line(error))


def remembered(target: PreTrainedModel, settings: Static) -> dict[int, float] | None:
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


def _description(target: PreTrainedModel, settings: Static) -> dict[str, Any]:
    capacities = None if settings.capacities is None else list(settings.capacities)
    shapes = {"runner": settings.runner, "widths": list(settings.widths), "capacities": capacities}
    return {**describe(target, {}), "backend": shapes}
