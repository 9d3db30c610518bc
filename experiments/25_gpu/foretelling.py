"""How well the cost model foretells the seconds of drafting and verifying on this device."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from shapes import Pair

from autospec.costs import CostTable
from autospec.costs.measuring import measure
from autospec.costs.probes import DraftProbe, VerifyProbe
from autospec.drafts import Assistant, EarlyExit, NGram
from autospec.types import BlockOutcome

VERIFY = "verify"
WIDTHS = (1, 3, 5, 7, 9, 12)
LENGTHS = (1, 3, 4, 6, 8)

Point = tuple[str, int, int]  # verify or a source, context, tokens


def cost_errors(
    pair: Pair, contexts: Sequence[int], rounds: int, budget_seconds: float, prepared: Any
) -> tuple[CostTable, dict[str, Any]]:
    """Measure costs as `auto` does, or read what was measured for it; then time points.

    They are mostly not in the calibration's grid, and their order is drawn anew for each round.

    Args:
        pair: the target and its draft.
        contexts: tokens before each point.
        rounds: each times every point once.
        budget_seconds: of the calibration.
        prepared: `speculator.backend`; None: forwards run as they are.

    Returns:
        what was calibrated, and |foretold / measured - 1|: of single measurements, and of each point's median. The
        floor is how far single measurements lie from that median: no table foretells them better.
    """
    sources = {"assistant": Assistant(pair.draft), "early_exit": EarlyExit(pair.shape.draft_layers), "ngram": NGram()}
    for source in sources.values():
        source.attach(pair.target, None)
    options = {} if prepared is None else {"backend": prepared}
    table = measure(pair.target, sources, budget_seconds=budget_seconds, **options).table
    timers: dict[Point, Callable[[int], float]] = {}
    order = random.Random(0)
    with torch.no_grad(), nullcontext() if prepared is None else prepared.lease() as lease:
        lent = () if lease is None else (lease,)
        for context in contexts:
            probe = VerifyProbe(pair.target, context, max(WIDTHS), *lent)
            timers |= {(VERIFY, context, width): probe.seconds for width in WIDTHS}
            for name in table.drafts:
                draft = DraftProbe(pair.target, sources[name], context, *lent)
                timers |= {(name, context, length): draft.seconds for length in LENGTHS}
        for point, seconds in timers.items():  # a warm-up
            seconds(point[2])
        found: dict[Point, list[float]] = {point: [] for point in timers}
        for _ in range(rounds):
            for point in order.sample(list(timers), len(timers)):
                found[point].append(timers[point](point[2]))
    errors = {name: _errors(table, found, name) for name in (VERIFY, *table.drafts)}
    points = [
        {"kind": kind, "context": c, "tokens": n, "ms": [round(1000 * s, 4) for s in seconds], "foretold_ms": ms}
        for (kind, c, n), seconds in found.items()
        for ms in [round(1000 * _foretold(table, (kind, c, n)), 4)]
    ]
    calibration = table.to_json() | {"failures": dict(table.failures)}
    return table, {"errors": errors, "calibration": calibration, "points": points}


def errors_in_service(table: CostTable, outcomes: Sequence[BlockOutcome], *, is_asynchronous: bool) -> dict[str, Any]:
    """The same of blocks as they were decoded. Args: is_asynchronous: choosing tokens waits for the forward."""
    verify, drafts = [], []
    for outcome in outcomes:
        if outcome.request is None or outcome.context_tokens <= outcome.request.prompt_tokens + 1:
            continue  # the first block of an answer, as in the cost model
        measured = outcome.verify_seconds + (outcome.correction_seconds if is_asynchronous else 0.0)
        width = outcome.num_draft_tokens + 1 + outcome.num_padding_tokens
        verify.append(abs(table.verify_seconds(width, outcome.context_tokens) / measured - 1.0))
        action = outcome.action
        if action.block_length and outcome.draft_seconds > 0.0:
            foretold = table.draft_seconds(action.source, outcome.num_draft_steps, outcome.context_tokens)
            drafts.append(abs(foretold / outcome.draft_seconds - 1.0))
    return {name: _spread(each) for name, each in (("verify", verify), ("draft", drafts)) if each}


def _errors(table: CostTable, found: dict[Point, list[float]], kind: str) -> dict[str, Any]:
    own = {point: seconds for point, seconds in found.items() if point[0] == kind}
    usual = {point: statistics.median(seconds) for point, seconds in own.items()}
    return {
        "single": _spread([abs(_foretold(table, p) / s - 1.0) for p, seconds in own.items() for s in seconds]),
        "medians": _spread([abs(_foretold(table, p) / s - 1.0) for p, s in usual.items()]),
        "floor": _spread([abs(usual[p] / s - 1.0) for p, seconds in own.items() for s in seconds]),
    }


def _foretold(table: CostTable, point: Point) -> float:
    kind, context, tokens = point
    return table.verify_seconds(tokens, context) if kind == VERIFY else table.draft_seconds(kind, tokens, context)


def _spread(errors: Sequence[float]) -> dict[str, float]:
    median, p90 = np.quantile(np.asarray(errors), (0.5, 0.9))
    return {"count": len(errors), "median": round(float(median), 4), "p90": round(float(p90), 4)}
