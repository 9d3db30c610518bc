"""Where a block's time goes.

    make profile     # or: python experiments/20_profile/run.py [--subjects tiny,bfloat16] [--tokens 48] [--out DIR]

A random model of two narrow layers, where the host's time dominates, and SmolLM2-135M in two number formats; greedy and
at temperature 0.8; contexts of about 64 and 1,000 tokens. The model's own `generate` beside plain steps, `ngram:8`,
`assistant:4` and `auto`, with a database, in turn. Methods are timed from outside, each second belonging to the
innermost one; what the model's forward is made of is seen by torch's profiler in a run of its own. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

from common import DECODINGS
from subjects import NAMES, Subject, subject
from timers import Timers, seconds_of_a_timer
from tqdm import tqdm

import autospec
from autospec.controller import Controller
from autospec.costs.upkeep import _Watched
from autospec.decoding import loop
from autospec.decoding.answer import Answer
from autospec.decoding.decoder import Decoder
from autospec.decoding.loop import Loop
from autospec.decoding.offers import Offers
from autospec.decoding.processors import BlockProcessors
from autospec.decoding.selection import Greedy, Maximal, Paired
from autospec.decoding.tally import Tally
from autospec.decoding.target import TargetSession
from autospec.decoding.verification import Verification
from autospec.deployment import device_name
from autospec.drafts import Assistant
from autospec.segments.requests import RequestSegments
from autospec.speculator import Speculator
from autospec.telemetry.recorder import Recorder

FOLDER = Path(__file__).parent
CONTEXTS = (64, 1000)
GENERATE = "generate"
WARM = 8
"""Prompt tokens of the call before the one that is timed."""
ARMS = (GENERATE, "off", "fixed:ngram:8", "fixed:assistant:4", "auto")
FORWARD = "target: model"
PREFILL, DRAFT, DRAFT_MODEL = "prefill", "draft: around the model", "draft: model"
ONCE = ("call: around generate", "call: prepared by transformers", PREFILL, "segment", "record: made", "record: queued")
"""Phases that a request has once; the others are a block's."""

# parts of a forward, by torch's operators
PRODUCTS = {"mm", "addmm", "bmm", "matmul", "linear", "mkldnn_linear", "_linear_pointwise", "baddbmm", "mv", "addmv"}
ATTENTION = "scaled_dot_product"
PARTS = ("matrix products", "attention", "concatenations (cache, rotary)", "other operators", "Python between them")


def _forward(around: list[str]) -> str:
    return PREFILL if PREFILL in around else FORWARD


def _processors(around: list[str]) -> str:
    return DRAFT if DRAFT in around else "processors"


def methods(each: Subject) -> list[tuple[Any, str, Any]]:
    """What is timed: transformers' steps, and autospec's."""
    rules = [(rule, "select", "verification: choosing tokens") for rule in (Greedy, Paired, Maximal)]
    stages = [(BlockProcessors, stage, _processors) for stage in ("plainly", "first_stage", "second_stage")]
    policy = [(Controller, name, "policy: choice") for name in ("is_control", "asks", "choose", "verify_width")]
    return [
        (each.model, "forward", _forward),
        (each.assistant, "forward", DRAFT_MODEL),
        (GenerationMixin, "generate", "call: prepared by transformers"),
        (GenerationMixin, "_sample", "loop"),
        (GenerationMixin, "_prefill", PREFILL),
        (
            GenerationMixin,
            "prepare_inputs_for_generation",
            lambda around: PREFILL if PREFILL in around else "target: inputs",
        ),
        (LogitsProcessorList, "__call__", _processors),
        (StoppingCriteriaList, "__call__", "criteria and streamer"),
        (Speculator, "generate", "call: around generate"),
        (Speculator, "_record", "record: made"),
        (Recorder, "record", "record: queued"),
        (RequestSegments, "of", "segment"),
        (Decoder, "__call__", "call: prepared by transformers"),
        (Loop, "run", "loop"),
        (Loop, "_drafted", DRAFT),
        (Offers, "add", "offers judged"),
        (Offers, "settle", "offers judged"),
        (TargetSession, "prefill", PREFILL),
        (TargetSession, "forward", "target: inputs"),
        (TargetSession, "commit", "commit and roll back"),
        (Verification, "run", "verification: around it"),
        (Answer, "append", "criteria and streamer"),
        (Tally, "add", "counting"),
        (Tally, "add_plain_step", "counting"),
        (Controller, "observe", "policy: lesson"),
        (_Watched, "observe", "policy: lesson"),
        *policy,
        *rules,
        *stages,
    ]


@dataclass
class Run:
    """One timed call of `generate`."""

    wall_seconds: float
    seconds: dict[str, float]
    calls: dict[str, int]
    tokens: int
    blocks: int  # forwards after the prefill
    drafted: int = 0
    accepted: int = 0

    @property
    def unattributed_seconds(self) -> float:
        return self.wall_seconds - sum(self.seconds.values())


@dataclass
class Cell:
    """One subject, decoding, context and arm."""

    subject: str
    decoding: str
    context_tokens: int
    arm: str
    runs: list[Run] = field(default_factory=list)
    untimed_seconds: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # share of the forwards' time under the profiler

    @property
    def median(self) -> Run:
        return sorted(self.runs, key=lambda run: run.wall_seconds)[len(self.runs) // 2]

    def result(self, timer_seconds: float) -> dict[str, Any]:
        run = self.median
        per_block = {name: s / max(run.blocks, 1) for name, s in run.seconds.items() if name not in ONCE}
        return {
            "subject": self.subject,
            "decoding": self.decoding,
            "context_tokens": self.context_tokens,
            "arm": self.arm,
            "tokens": run.tokens,
            "blocks": run.blocks,
            "drafted": run.drafted,
            "accepted": run.accepted,
            "wall_seconds": run.wall_seconds,
            "untimed_wall_seconds": statistics.median(self.untimed_seconds),
            "timers_seconds": sum(run.calls.values()) * timer_seconds,
            "unattributed_seconds": run.unattributed_seconds,
            "seconds_of_a_call": {name: run.seconds[name] for name in ONCE if name in run.seconds},
            "seconds_of_a_block": per_block,
            "calls": dict(run.calls),
            "shares_of_the_forward": self.parts,
        }


@contextmanager
def wrapped(each: Subject, arm: str, store: str) -> Iterator[Callable[..., Any]]:
    """Gives what is called for an answer."""
    if arm == GENERATE:
        yield lambda *args, **options: (each.model.generate(*args, **options), None)
        return
    with autospec.wrap(
        each.model,
        tokenizer=each.tokenizer,
        drafts=["ngram", Assistant(each.assistant)],
        policy=arm,
        store=store,
        control_share=0.0,
        segments="auto",
        resume=False,
        backend=each.backend,
    ) as speculator:
        yield lambda *args, **options: (each.model.generate(*args, **options), speculator)


def timed(each: Subject, arm: str, options: dict[str, Any], prompt: Any, store: str) -> Run:
    timers = Timers()
    contexts = (loop, "spared", "noise kept apart")
    with timers.patched(*methods(each), contexts=contexts), wrapped(each, arm, store) as answer:
        answer(prompt[:, :WARM], **{**options, "max_new_tokens": 2})
        timers.seconds.clear()  # of measuring costs, and of the first call
        timers.calls.clear()
        torch.manual_seed(0)
        started = time.perf_counter()
        output, speculator = answer(prompt, **options)
        wall = time.perf_counter() - started
        record = None if speculator is None else speculator.last_request
    tokens = output.shape[1] - prompt.shape[1]
    if record is None:
        return Run(wall, dict(timers.seconds), dict(timers.calls), tokens, tokens - 1)
    if record.fallback_reason is not None:
        raise RuntimeError(f"left to generate: {record.fallback_reason}")
    return Run(
        wall,
        dict(timers.seconds),
        dict(timers.calls),
        tokens,
        record.blocks,
        record.num_draft_tokens,
        record.num_accepted_tokens,
    )


def untimed(each: Subject, arm: str, options: dict[str, Any], prompt: Any, store: str) -> float:
    with wrapped(each, arm, store) as answer:
        answer(prompt[:, :WARM], **{**options, "max_new_tokens": 2})
        torch.manual_seed(0)
        started = time.perf_counter()
        answer(prompt, **options)
        return time.perf_counter() - started


def parts_of_the_forward(each: Subject, arm: str, options: dict[str, Any], prompt: Any, store: str) -> dict[str, float]:
    """Shares of the target's forwards after the prefill, under torch's profiler."""
    forward, is_prefill = each.model.forward, [True]

    def labelled(*args: Any, **kwargs: Any) -> Any:
        if is_prefill[0]:
            is_prefill[0] = False
            return forward(*args, **kwargs)
        with record_function(FORWARD):
            return forward(*args, **kwargs)

    with wrapped(each, arm, store) as answer:
        labelled.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        each.model.forward = labelled
        try:
            torch.manual_seed(0)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                answer(prompt, **options)
        finally:
            del each.model.forward
    found: dict[str, float] = defaultdict(float)
    for event in seen.events():
        part = _part_of(event)
        if part is not None:
            found[part] += event.self_cpu_time_total
    whole = sum(found.values())
    return {part: found[part] / whole for part in PARTS} if whole else {}


def _part_of(event: Any) -> str | None:
    """Which part of a forward an operator's own time belongs to; None outside of forwards."""
    names, above = [event.name], event.cpu_parent
    while above is not None and names[-1] != FORWARD:
        names.append(above.name)
        above = above.cpu_parent
    if names[-1] != FORWARD:
        return None
    if len(names) == 1:
        return PARTS[4]
    bare = [name.rpartition("::")[2] for name in names]
    if any(ATTENTION in name for name in bare):
        return PARTS[1]
    if any(name in PRODUCTS for name in bare):
        return PARTS[0]
    return PARTS[2] if "cat" in bare else PARTS[3]


def measure(each: Subject, decoding: str, context_tokens: int, tokens: int, repeats: int, store: str) -> list[Cell]:
    """All arms of one subject, decoding and context, in an order that turns."""
    options = {**DECODINGS[decoding], "max_new_tokens": tokens}
    prompt = each.prompt(context_tokens)
    cells = [Cell(each.name, decoding, context_tokens, arm) for arm in ARMS]
    for cell in cells:
        untimed(each, cell.arm, options, prompt, store)  # first calls allocate
    for repeat in range(repeats):
        for cell in cells[repeat % len(cells) :] + cells[: repeat % len(cells)]:
            cell.untimed_seconds.append(untimed(each, cell.arm, options, prompt, store))
            cell.runs.append(timed(each, cell.arm, options, prompt, store))
    for cell in cells:
        cell.parts = parts_of_the_forward(each, cell.arm, options, prompt, store)
    return cells


def show(found: list[dict[str, Any]]) -> None:
    """One table of milliseconds: first what a call has once, then what each block has."""
    first = found[0]
    print(f"\n{first['subject']}, {first['decoding']}, context of {first['context_tokens']} tokens; milliseconds")
    print(f"{'':42}" + "".join(f"{each['arm'].removeprefix('fixed:'):>13}" for each in found))

    def row(name: str, values: list[float | None], scale: float = 1e3, digits: int = 3) -> None:
        cells = (f"{'':>13}" if value is None else f"{scale * value:>13.{digits}f}" for value in values)
        print(f"{name:42}" + "".join(cells))

    for kind, title in (("seconds_of_a_call", "of a call"), ("seconds_of_a_block", "of a block")):
        names = dict.fromkeys(name for each in found for name in each[kind])
        print(f"{title}:")
        for name in names:
            row(f"  {name}", [each[kind].get(name) for each in found])
            if name == FORWARD:
                for part in PARTS:
                    shares = [each["shares_of_the_forward"].get(part) for each in found]
                    row(
                        f"    {part}",
                        [None if s is None else s * each[kind][name] for s, each in zip(shares, found, strict=True)],
                    )
    row("tokens in a block", [each["tokens"] / max(each["blocks"] + 1, 1) for each in found], 1.0, 2)
    row("whole call", [each["wall_seconds"] for each in found], digits=1)
    row("  unattributed", [each["unattributed_seconds"] for each in found])
    row("  timers themselves", [each["timers_seconds"] for each in found])
    row("  the same call without timers", [each["untimed_wall_seconds"] for each in found], digits=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", default=",".join(NAMES), help="separated by commas")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="prompt tokens, separated by commas")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="eager", help="of the wrapped ways, as in autospec.wrap")
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    timer_seconds = seconds_of_a_timer()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=1) as progress:
        os.environ["AUTOSPEC_COSTS"] = f"{folder}/costs"  # measured by this run, whatever the user's folder holds
        names, contexts = options.subjects.split(","), [int(each) for each in options.contexts.split(",")]
        progress.reset(len(names) * len(contexts) * len(DECODINGS))
        for name in names:
            each = replace(subject(name), backend=options.backend)
            for decoding in DECODINGS:
                for context_tokens in contexts:
                    store = f"sqlite:///{folder}/profile.db"
                    cells = measure(each, decoding, context_tokens, options.tokens, options.repeats, store)
                    found = [cell.result(timer_seconds) for cell in cells]
                    results += found
                    show(found)
                    progress.update()
    written = {
        "is_smoke_run": options.smoke,
        "device": device_name(torch.device("cpu")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens": options.tokens,
        "backend": options.backend,
        "repeats": options.repeats,
        "seconds_of_a_timer": timer_seconds,
        "cells": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
