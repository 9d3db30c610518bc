"""Seconds by phase, of a program that knows nothing of it: its methods are replaced from outside while it runs."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Phase = str | Callable[[list[str]], str]
"""A name, or what gives one from the names of the timed calls around."""


class Timers:
    """Each second is the innermost timed call's, so that the phases sum to what the outermost ones took."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._around: list[str] = []
        self._inside: list[float] = []  # seconds of timed calls inside each of those around

    def timed(self, phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""
        around, inside, now = self._around, self._inside, time.perf_counter

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            name = phase if isinstance(phase, str) else phase(around)
            around.append(name)
            inside.append(0.0)
            started = now()
            try:
                return function(*args, **kwargs)
            finally:
                taken = now() - started
                around.pop()
                self.seconds[name] += taken - inside.pop()
                self.calls[name] += 1
                if inside:
                    inside[-1] += taken

        return call

    def timed_context(self, phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that gives a context manager, whose beginning and end are timed; what is inside is not."""
        timers = self

        class Context:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._context = timers.timed(phase, function)(*args, **kwargs)

            def __enter__(self) -> Any:
                return timers.timed(phase, self._context.__enter__)()

            def __exit__(self, *error: Any) -> Any:
                return timers.timed(phase, self._context.__exit__)(*error)

        return Context

    @contextmanager
    def patched(
        self, *methods: tuple[Any, str, Phase], contexts: tuple[Any, str, Phase] | None = None
    ) -> Iterator[None]:
        """Time methods while the block runs.

        Args:
            methods: class, module or object, name, phase.
            contexts: the same, of a function that gives a context manager.
        """
        given = [(owner, name, self.timed(phase, getattr(owner, name))) for owner, name, phase in methods]
        if contexts is not None:
            owner, name, phase = contexts
            given.append((owner, name, self.timed_context(phase, getattr(owner, name))))
        before = [(owner, name, vars(owner).get(name)) for owner, name, _ in given]
        try:
            for owner, name, timed in given:
                setattr(owner, name, timed)
            yield
        finally:
            for owner, name, own in reversed(before):
                delattr(owner, name) if own is None else setattr(owner, name, own)


def seconds_of_a_timer(repeats: int = 20_000) -> float:
    """What timing one call costs, most of it charged to the call around it."""
    empty = Timers().timed("empty", lambda: None)
    started = time.perf_counter()
    for _ in range(repeats):
        empty()
    return (time.perf_counter() - started) / repeats
