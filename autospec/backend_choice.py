"""Which backend a wrapped model gets: the one asked for, or the one that was measured to be faster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autospec.backends.backend import EAGER, Backend, prepare
from autospec.backends.base import CannotPrepareError, Static
from autospec.backends.packed import NAME as PACKED
from autospec.backends.packed import PackedLinears, check_packed, linear_layers, why_never
from autospec.costs.speedups import measure_packed, measure_speedups, remember, remembered
from autospec.drafts.base import DraftSource
from autospec.errors import ConfigurationError
from autospec.fetching import one_line
from autospec.memory import free_bytes
from autospec.notices import warn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKENDS = ("auto", "eager", "packed", "compile")
LEAST_SPEEDUP = {"inductor": 1.03, "cuda_graph": 1.0, PACKED: 1.03}
"""Of a plain step and of the widest block, for `auto`: compiling takes minutes, packing memory, capturing seconds."""
LEAST_PACKED_BYTES = 16 << 20
"""Of weights, for `auto`: below it a forward is the host's time, and packing brings nothing."""
MOST_MEMORY_SHARE = 0.5
"""Of the free memory, that packed weights may take under `auto`."""


def checked_backend(asked: str | Static) -> str | Static:
    """Raises: ConfigurationError: unknown."""
    if not isinstance(asked, Static) and asked not in BACKENDS:
        raise ConfigurationError(
            f"backend={asked!r}: known are {', '.join(BACKENDS)}, and autospec.backends.Static(...) for your own"
        )
    return asked


def choose_backend(asked: str | Static, target: PreTrainedModel, sources: Mapping[str, DraftSource]) -> Backend:
    """Prepare what was asked for and measure what it brings; what cannot be prepared runs eagerly, with the reason.

    Args:
        asked: `auto`, `eager`, `packed`, `compile`, or shapes of one's own.
        target: the target.
        sources: draft sources by name, attached; draft models that run by `DraftRequest.static_draft` are prepared too.
    """
    if asked == EAGER:
        return Backend()
    if asked == PACKED:
        backend = _packed(target)
        if backend.is_eager:
            warn(f"forwards run eagerly: {backend.reason}", stacklevel=5)
            return backend
        backend.reason = _asked_for(backend)
        return backend
    settings = asked if isinstance(asked, Static) else Static(_runner(target))
    least = LEAST_SPEEDUP.get(settings.runner, 0.0) if asked == "auto" else 0.0
    if asked == "auto" and settings.runner == "inductor":
        known = remembered(target, settings)
        packed = _packed_if_faster(target)
        if known is None:
            why = 'compiling takes minutes, and was not measured here: backend="compile" does both'
        elif not packed.is_eager and min(packed.speedups.values()) >= min(known.values()):
            why = "compiled forwards are slower"
        elif min(known.values()) < least:
            why = f"compiled forwards were measured at {min(known.values()):.2f} times the speed"
        else:
            why = ""
        if why:
            if packed.is_eager:
                packed.reason = f"{packed.reason}; {why}"
            return packed
    try:
        with _progress() as progress:
            backend = prepare(target, _drafts(sources), settings, progress)
        assert backend.target is not None
        backend.speedups = measure_speedups(backend.target)
    except (CannotPrepareError, RuntimeError) as error:
        if asked != "auto":
            warn(f"forwards run eagerly: {one_line(error)}", stacklevel=5)
        return Backend(EAGER, one_line(error))
    if settings.runner == "inductor":
        remember(target, settings, backend.speedups)
    slowest = min(backend.speedups.values())
    if slowest < least:
        return Backend(EAGER, f"prepared forwards were measured at {slowest:.2f} times the speed")
    backend.reason = "measured to be faster" if asked == "auto" else _asked_for(backend)
    return backend


def _asked_for(backend: Backend) -> str:
    slowest = min(backend.speedups.values())
    return f"asked for, though measured at {slowest:.2f} times the speed" if slowest < 1.0 else "asked for"


def _packed_if_faster(target: PreTrainedModel) -> Backend:
    """Eager, with the reason, where packing is not worth its memory."""
    if why := why_never(target):
        return Backend(EAGER, f"packing: {why}")
    num_bytes = sum(layer.weight.nbytes for layer in linear_layers(target))
    if 0 < num_bytes < LEAST_PACKED_BYTES:
        return Backend(EAGER, "its layers are too small for packing them to matter")
    free = free_bytes()
    if free is not None and num_bytes > MOST_MEMORY_SHARE * free:
        return Backend(EAGER, f"packed layers would take {num_bytes / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free")
    known, least = remembered(target, PACKED), LEAST_SPEEDUP[PACKED]
    if known is not None and min(known.values()) < least:
        return Backend(EAGER, f"packed layers were measured at {min(known.values()):.2f} times the speed")
    backend = _packed(target, known)
    if backend.is_eager or min(backend.speedups.values()) >= least:
        return backend
    return Backend(EAGER, f"packed layers were measured at {min(backend.speedups.values()):.2f} times the speed")


def _packed(target: PreTrainedModel, known: Mapping[int, float] | None = None) -> Backend:
    """Args: known: what it brings, where that was measured before. Returns: eager, where layers cannot be packed."""
    try:
        layers = PackedLinears.of(target)
        check_packed(target, layers)
        speedups = dict(known or measure_packed(target, layers))
    except (CannotPrepareError, RuntimeError) as error:
        return Backend(EAGER, f"packing: {one_line(error)}")
    if known is None:
        remember(target, PACKED, speedups)
    return Backend(PACKED, "measured to be faster", packed=(target, layers), speedups=speedups)


def _runner(target: PreTrainedModel) -> str:
    return "cuda_graph" if target.device.type == "cuda" else "inductor"


def _drafts(sources: Mapping[str, DraftSource]) -> dict[str, Any]:
    models = {name: getattr(source, "static_draft", None) for name, source in sources.items()}
    return {name: model for name, model in models.items() if model is not None}


@contextmanager
def _progress() -> Iterator[Any]:
    """Says on a terminal what is being prepared."""
    from tqdm import tqdm

    with tqdm(desc="backend", unit="forward", disable=not sys.stderr.isatty()) as bar:

        def tell(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield tell
