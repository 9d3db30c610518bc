"""The backend of a wrapped model: what was prepared at start-up, and who may use it now."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from autospec.backends.base import CannotPrepareError, Static
from autospec.backends.fitness import Identity, why_never, why_not_now
from autospec.backends.making import capacities_for, make_runner
from autospec.backends.packed import PackedLinears
from autospec.backends.static_model import StaticModel
from autospec.fetching import one_line
from autospec.forks import renew_after_fork

EAGER = "eager"
BUSY = "another request is using the buffers of fixed shape"


class Lease:
    """What one request may use.

    Args:
        target, drafts: as of `Backend`; without a target everything is decoded eagerly.
        why_not: why the request is decoded eagerly, where there is something to say.
        is_packed: the target's linear layers multiply by their packed weights.
    """

    def __init__(
        self,
        target: StaticModel | None = None,
        drafts: Mapping[int, StaticModel] | None = None,
        why_not: str | None = None,
        *,
        is_packed: bool = False,
    ) -> None:
        self.target = target
        self.is_packed = is_packed
        self._drafts = drafts or {}
        self.why_not = why_not

    def draft(self, model: Any) -> StaticModel | None:
        """A draft model that was prepared."""
        return self._drafts.get(id(model))


class Backend:
    """How forwards run: `eager`, as the model runs them, or prepared.

    Args:
        name: `eager`, or the runner's.
        reason: why this one.
        target, drafts: prepared models, drafts by `id` of the model; none when eager.
        speedups: seconds of an eager forward over those of a prepared one, by width, where they were measured.
        failures: what was not prepared, and why.
        packed: the model whose linear layers were packed, and these; instead of prepared models.
    """

    def __init__(
        self,
        name: str = EAGER,
        reason: str = "asked for",
        *,
        target: StaticModel | None = None,
        drafts: Mapping[int, StaticModel] | None = None,
        speedups: Mapping[int, float] | None = None,
        failures: Iterable[str] = (),
        packed: tuple[PreTrainedModel, PackedLinears] | None = None,
    ) -> None:
        self.name = name
        self.reason = reason
        self.target = target
        self.packed = packed
        self.drafts = dict(drafts or {})
        self.speedups = dict(speedups or {})
        self.failures = tuple(failures)
        self._identities = [Identity(each.model) for each in self.models]
        self._lock = threading.Lock()
        renew_after_fork(self)

    @property
    def is_eager(self) -> bool:
        """Do forwards run as the model runs them?"""
        return self.target is None and self.packed is None

    @property
    def models(self) -> list[StaticModel]:
        return [each for each in (self.target, *self.drafts.values()) if each is not None]

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of the target's forwards; none when eager."""
        return self.target.widths if self.target is not None else ()

    @property
    def capacities(self) -> tuple[int, ...]:
        """Tokens of the cache that the target's forwards look at; none when eager."""
        return self.target.capacities if self.target is not None else ()

    @property
    def shapes(self) -> dict[str, Any]:
        """What was prepared, in plain JSON values."""
        if self.packed is not None:
            return {"runner": self.name}
        return {"runner": self.name, "widths": list(self.widths), "capacities": list(self.capacities)}

    @property
    def captures(self) -> int:
        """Forwards prepared, or layers packed, so far: at start-up, so that it does not grow while weights stay."""
        packed = 0 if self.packed is None else self.packed[1].num_captures
        return packed + sum(each.runner.num_captures for each in self.models)

    @property
    def memory_bytes(self) -> int:
        """Held beside the models' weights."""
        packed = 0 if self.packed is None else self.packed[1].memory_bytes
        return packed + sum(each.memory_bytes for each in self.models)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """For one request: the prepared models, where they are free and still what they were."""
        target, drafts, models, lock = self.target, self.drafts, self.models, self._lock
        if self.packed is not None:
            model, layers = self.packed
            with layers.lease(model) as why_not:
                yield Lease(why_not=why_not, is_packed=why_not is None)
            return
        if target is None:
            yield Lease()
            return
        if not lock.acquire(blocking=False):
            yield Lease(why_not=BUSY)
            return
        try:
            why = next((why for each in self._identities if (why := each.why_changed())), None)
            why = why or why_not_now(target.model.device)
            yield Lease(why_not=why) if why else Lease(target, drafts)
        finally:
            try:
                for each in models:
                    each.clear()
            finally:
                lock.release()

    def close(self) -> None:
        """Let go of what was prepared; a request that uses it goes on."""
        self.target, self.packed, self.drafts, self._identities = None, None, {}, []

    def __str__(self) -> str:
        if self.is_eager:
            return f"{self.name} ({self.reason})"
        speedups = ", ".join(f"{width} tokens {ratio:.2f}x" for width, ratio in sorted(self.speedups.items()))
        shapes = f"widths {' '.join(map(str, self.widths))}, capacities {' '.join(map(str, self.capacities))}"
        parts = [
            self.reason,
            f"{self.captures} layers" if self.packed is not None else f"{self.captures} forwards: {shapes}",
            f"{self.memory_bytes / 1e6:.0f} MB",
            *([speedups] if speedups else []),
            *self.failures,
        ]
        return f"{self.name} ({'; '.join(parts)})"


def prepare(target: PreTrainedModel, drafts: Mapping[str, Any], settings: Static, progress: Any = None) -> Backend:
    """A backend of fixed shapes.

    Args:
        target: the target.
        drafts: draft models by the name of their source; one that cannot be prepared runs as it is.
        settings: of the backend.
        progress: is told what comes next, for those who wait; called with a text.

    Raises:
        CannotPrepareError: the target cannot be prepared.
    """
    prepared = _prepared(target, settings, progress, "target")
    found: dict[int, StaticModel] = {}
    failures = []
    for name, model in drafts.items():
        if id(model) in found:  # sources that share a model take turns in its buffers
            continue
        try:
            found[id(model)] = _prepared(model, settings, progress, name)
        except CannotPrepareError as error:
            failures.append(f"{name} runs eagerly: {error}")
    return Backend(settings.runner, "asked for", target=prepared, drafts=found, failures=failures)


def _prepared(model: PreTrainedModel, settings: Static, progress: Any, name: str) -> StaticModel:
    if why := why_never(model) or why_not_now(model.device):
        raise CannotPrepareError(why)
    try:
        with torch.inference_mode(False):  # buffers made in it could not be written to outside of it
            capacities = capacities_for(model, settings)
            static = StaticModel(model, settings, capacities, make_runner(settings.runner, model.device))
        for step in static.prepare():
            if progress is not None:
                progress(f"{name}: {step}")
    except CannotPrepareError:
        raise
    except Exception as error:  # out of memory, or a model that is run in another way than most
        raise CannotPrepareError(f"{type(error).__name__}: {one_line(error):.200}") from error
    return static
