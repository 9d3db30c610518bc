"""Forwards compiled by torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from autospec.backends.base import CannotPrepareError, Forward
from autospec.fetching import one_line


class InductorRunner:
    """Compiles each forward once, as a whole.

    All that a forward reads and writes stays where it is, so that the compiled code is called with what it was compiled
    with: no guards are looked at, and nothing is ever compiled again.
    """

    name = "inductor"
    memory_bytes = 0  # code, and what a forward uses while it runs

    def __init__(self) -> None:
        self.num_captures = 0

    def prepare(self, forward: Forward) -> Forward:
        caught: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

        def catching(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            from torch._dynamo.backends.registry import lookup_backend

            self.num_captures += 1
            compiled = lookup_backend("inductor")(graph, inputs)

            def first_call(*given: Any) -> Any:
                caught.append((compiled, given))
                return compiled(*given)

            return first_call

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about its own parts
                compile_now: Any = torch.compile(
                    _with_code_of_its_own(forward, self.num_captures), backend=catching, fullgraph=True, dynamic=False
                )
                compile_now()
        except Exception as error:  # whatever it is (no compiler, a graph break), the model runs without
            cause = getattr(error, "inner_exception", error)
            raise CannotPrepareError(
                f"torch.compile failed ({type(cause).__name__}: {one_line(cause):.200})"
            ) from error
        if len(caught) != 1:
            raise CannotPrepareError(f"its forward was compiled in {len(caught)} parts")
        compiled, given = caught[0]

        def run() -> Tensor:
            logits: Tensor
            (logits,) = compiled(*given)
            return logits

        return run


def _with_code_of_its_own(forward: Any, number: int) -> Any:
    """The same function with another code object: torch.compile keeps, and counts, what it compiled by code."""
    code = forward.__code__.replace(co_name=f"forward_{number}")
    return FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__, forward.__closure__)
