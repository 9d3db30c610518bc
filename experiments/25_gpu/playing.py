"""One target answered by itself and under policies, side by side."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from shapes import Pair
from torch import Tensor

import autospec
from autospec.drafts import Assistant, EarlyExit, NGram
from autospec.policies import Fixed
from autospec.types import OFF, Action, BlockContext, BlockOutcome

BACKENDS = ("eager", "compile", "plain")
"""As in `autospec.wrap`; `plain` are fixed shapes of which nothing is compiled: what they are, without a GPU."""
HAS_BACKENDS = "backend" in inspect.signature(autospec.wrap).parameters
PLAIN, AUTO, ANY = "plain", "auto", "any"
"""The model's own `generate`; the policy `auto`; a source and block length drawn anew before each block."""


@dataclass(frozen=True)
class Arm:
    """A way to answer: `label` is one of the above, `off`, or a source and block length as in `assistant:4`."""

    label: str
    backend: str = "eager"

    @property
    def name(self) -> str:
        return self.label if self.label == PLAIN else f"{self.backend} {self.label}"


PLAINLY = Arm(PLAIN)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float
    record: Any  # autospec.RequestRecord; None of a plain one


class Conducted:
    """A policy that does what it is told, and keeps what came of it. One wrapped model so plays every fixed arm."""

    name = "conducted"

    def __init__(self) -> None:
        self.outcomes: list[BlockOutcome] = []
        self._policy: Any = Fixed()

    def play(self, label: str) -> None:
        source, _, length = label.rpartition(":")
        if label == ANY:
            self._policy = _Any()
        else:
            self._policy = Fixed(source, block_length=int(length)) if source else Fixed()

    def choose(self, context: BlockContext) -> Action:
        action: Action = self._policy.choose(context)
        return action

    def observe(self, outcome: BlockOutcome) -> None:
        self.outcomes.append(outcome)


class _Any:
    """Draws its actions, the same ones in every answer."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose(self, context: BlockContext) -> Action:
        length = self._random.choice((0, 1, 2, 4, 7))
        return Action(self._random.choice(context.sources), length) if length and context.sources else OFF


class Stage:
    """A target with its speculators. Each of these is called directly, and the model keeps its own `generate`.

    Args:
        pair: the target and its draft.
        sampling: as in `autospec.wrap`.
        has_auto: make speculators with the policy `auto`, too, which measure what blocks cost.
    """

    def __init__(self, pair: Pair, *, sampling: str = "paired", has_auto: bool = False) -> None:
        self.pair = pair
        self._sampling = sampling
        self._has_auto = has_auto
        self._conducted: dict[str, tuple[Any, Conducted]] = {}
        self._auto: dict[str, Any] = {}
        self.seconds_to_wrap: dict[str, float] = {}

    def open(self, backend: str) -> None:
        """Wrap the target for a backend; costs are measured and graphs captured now."""
        policy = Conducted()
        conducted = self._wrapped(backend, policy=policy, called="conducted")
        if self._has_auto:
            try:
                self._auto[backend] = self._wrapped(backend, policy="auto", control_share=0.0, called=AUTO)
            except Exception:
                conducted.close()
                raise
        self._conducted[backend] = conducted, policy

    def prepared(self, backend: str) -> Any:
        """What was made for a backend, `speculator.backend`; None where forwards run as they are."""
        found = getattr(self._auto.get(backend, self._conducted[backend][0]), "backend", None)
        return None if found is None or found.target is None else found

    @property
    def backends(self) -> list[str]:
        """Those that are open."""
        return list(self._conducted)

    def close(self) -> None:
        for speculator in (*(speculator for speculator, _ in self._conducted.values()), *self._auto.values()):
            speculator.close()

    def take_outcomes(self, backend: str) -> list[BlockOutcome]:
        """Blocks of fixed arms since the last call."""
        policy = self._conducted[backend][1]
        found, policy.outcomes = policy.outcomes, []
        return found

    def answer(self, arm: Arm, prompt: Tensor, new_tokens: int, *, seed: int | None = None, **options: Any) -> Answer:
        """Answer once, timed.

        Args:
            arm: how.
            prompt: [1, n].
            new_tokens: of the answer.
            seed: of torch's global generators.
            options: for `generate`, greedy without any.
        """
        speculator = None
        if arm.label == AUTO:
            speculator = self._auto[arm.backend]
        elif arm.label != PLAIN:
            speculator, policy = self._conducted[arm.backend]
            policy.play(arm.label)
        generate = self.pair.target.generate if speculator is None else speculator.generate
        options = {"do_sample": False, **options, "max_new_tokens": new_tokens}
        if seed is not None:
            torch.manual_seed(seed)
        wait(prompt.device)
        started = time.perf_counter()
        output = generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        wait(prompt.device)
        seconds = time.perf_counter() - started
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        return Answer(tokens, seconds, None if speculator is None else speculator.last_request)

    def _wrapped(self, backend: str, *, called: str, **options: Any) -> Any:
        if HAS_BACKENDS:
            options["backend"] = _fixed_shapes() if backend == "plain" else backend
        pair, started = self.pair, time.perf_counter()
        drafts = [Assistant(pair.draft), EarlyExit(pair.shape.draft_layers), NGram()]
        speculator = autospec.wrap(pair.target, drafts=drafts, store=None, sampling=self._sampling, **options)
        wait(pair.device)
        self.seconds_to_wrap[f"{backend} {called}"] = time.perf_counter() - started
        del pair.target.generate  # what wrap has put there
        if HAS_BACKENDS and backend != "eager" and speculator.backend.target is None:
            speculator.close()
            raise RuntimeError(f"backend {backend} is {speculator.backend}")
        return speculator


def _fixed_shapes() -> Any:
    from autospec.backends import Static  # not there where wrap has no backends

    return Static("plain")


def wait(device: torch.device) -> None:
    """Until all that was started on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def troubles(records: Iterable[Any]) -> list[str]:
    """What was left to the original `generate` or switched off, and why."""
    found = [text for record in records if record is not None for text in (record.fallback_reason, record.notes)]
    return sorted({text for text in found if text})
