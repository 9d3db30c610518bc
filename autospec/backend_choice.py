"""Which backend a wrapped model gets: the one asked for, or the one that was measured to be faster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autospec.backends.backend import EAGER, Backend, prepare
from autospec.backends.base import CannotPrepareError, Static
from autospec.costs.speedups import measure_speedups, remember, remembered
from autospec.drafts.base import DraftSource
from autospec.errors import ConfigurationError
from autospec.fetching import one_line
from autospec.notices import warn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKENDS = ("auto", "eager", "compile")
LEAST_SPEEDUP = {"inductor": 1.03, "cuda_graph": 1.0}
"""Of a plain step and of the widest block, for `auto`: compiling takes minutes, capturing seconds."""


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
        asked: `auto`, `eager`, `compile`, or shapes of one's own.
        target: the target.
        sources: draft sources by name, attached; draft models that run by `DraftRequest.static_draft` are prepared too.
    """
    if asked == EAGER:
        return Backend()
    settings = asked if isinstance(asked, Static) else Static(_runner(target))
    least = LEAST_SPEEDUP.get(settings.runner, 0.0) if asked == "auto" else 0.0
    if asked == "auto" and settings.runner == "inductor":
        known = remembered(target, settings)
        if known is None:
            return Backend(EAGER, 'compiling takes minutes, and was not measured here: backend="compile" does both')
        if min(known.values()) < least:
            return Backend(EAGER, f"compiled forwards were measured at {min(known.values()):.2f} times the speed")
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
    slower = f", though measured at {slowest:.2f} times the speed" if slowest < 1.0 else ""
    backend.reason = "measured to be faster" if asked == "auto" else f"asked for{slower}"
    return backend


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
