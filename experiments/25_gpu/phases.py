"""What is measured, in order of importance, and what is kept of it."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import processing
import torch
import transformers
from budget import Clock
from exactness import Check, checks_of_distribution, checks_of_text, same_distribution, same_text
from foretelling import cost_errors, errors_in_service
from playing import HAS_BACKENDS, Stage
from shapes import FEW_TOKENS, SHAPES, SMALL, Pair, Shape, build
from timing import Cell, bandwidth_share, copy_bandwidth, synchronisations

from autospec.deployment import device_name, package_version

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Of an undisturbed target's logits against its draft's, as a share of the largest."""
AGREEMENTS = (0.8, 0.6)
TEXT_SECONDS, DISTRIBUTION_SECONDS = 60.0, 45.0
SHARES = {"7b": 0.45, "1b": 0.2, "13b": 0.35, "tiny": 0.1}
"""Of the time left for the targets."""
MOST_ROUNDS = 7


class Run:
    """A run's options, clock and results."""

    def __init__(self, options: argparse.Namespace, clock: Clock) -> None:
        self.options = options
        self.clock = clock
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        self.current = "the start"
        is_cpu = self.device.type == "cpu"
        self.results: dict[str, Any] = {
            "is_smoke_test": is_cpu or options.quick,
            "says": "A smoke test: its seconds say nothing about a GPU." if is_cpu else "Measured on the GPU named.",
            "about": about(self.device, options),
            "checks": [],
            "left_out": [],
            "failures": [],
            "phases": {},
            "targets": {},
        }

    @property
    def is_fine(self) -> bool:
        checks = self.results["checks"]
        return bool(checks) and all(check["is_ok"] for check in checks) and not self.results["failures"]

    def check(self, checks: Iterable[Check]) -> None:
        for check in checks:
            self.results["checks"].append(check._asdict())
            if not check.is_ok:
                print(f"FAIL {check.name}: {check.shown}", file=sys.stderr)

    def leave_out(self, what: str, why: str) -> None:
        self.results["left_out"].append(f"{what}: {why}")
        print(f"left out {what}: {why}", file=sys.stderr)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Whatever fails in it is a failure of the run, which goes on with the next one."""
        self.current, started = name, time.perf_counter()
        print(f"[{self.clock.spent:5.0f} s] {name}", file=sys.stderr)
        try:
            yield
        except Exception as error:  # noqa: BLE001  # it is in the results, and the run exits with 1
            traceback.print_exc()
            text = " ".join(str(error).split())
            self.results["failures"].append(f"{name}: {type(error).__name__}: {text:.500}")
        self.results["phases"][name] = round(time.perf_counter() - started, 2)
        self.write()

    def write(self) -> None:
        """Whole or not at all."""
        self.results["seconds"] = round(self.clock.spent, 1)
        self.options.out.mkdir(parents=True, exist_ok=True)
        partial = self.options.out / "results.json.partial"
        partial.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.options.out / "results.json")


def about(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "autospec": package_version(),
        "minutes": options.minutes,
        "shapes": options.shapes,
        "is_quick": options.quick,
        "backends": options.backends if HAS_BACKENDS else ["eager"],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"cuda": torch.version.cuda, "memory_bytes": properties.total_memory}
        found |= {"multiprocessors": properties.multi_processor_count}
    return found


def everything(run: Run) -> None:
    backends = run.options.backends
    if not HAS_BACKENDS:
        for backend in backends:
            if backend != "eager":
                run.leave_out(f"backend {backend}", "this autospec.wrap has no option backend")
        backends = ["eager"]
    with run.phase("copy bandwidth"):
        run.results["copy_bytes_per_second"] = copy_bandwidth(run.device)
    with run.phase("exactness in float32"):
        text_is_the_same(run, backends)
    with run.phase("distribution of maximal sampling"):
        distribution_is_the_same(run, backends)
    with run.phase("processors"):
        found = processing.compare(run.device, (1024,) if run.options.quick else (32_000, 128_256))
        run.results["processors"] = found
        run.check(processing.checks(found))
    waiting = [SHAPES[name] for name in run.options.shapes]
    while waiting:
        share = SHARES[waiting[0].name] / sum(SHARES[shape.name] for shape in waiting)
        measure(run, waiting.pop(0), backends, seconds=share * run.clock.left)


def text_is_the_same(run: Run, backends: list[str]) -> None:
    end = time.perf_counter() + min(TEXT_SECONDS, run.clock.left / 4)
    pair = built(run, SMALL, torch.float32)
    pair.set_agreement(AGREEMENTS[-1])
    stage = Stage(pair)
    try:
        for backend in backends:
            stage.open(backend)
        new_tokens, prompts = (12, 2) if run.options.quick else (SMALL.new_tokens, 8)
        found = same_text(stage, new_tokens, prompts, lambda: time.perf_counter() < end)
    finally:
        stage.close()
    run.results["exactness"] = found
    run.check(checks_of_text(found))


def distribution_is_the_same(run: Run, backends: list[str]) -> None:
    end = time.perf_counter() + min(DISTRIBUTION_SECONDS, run.clock.left / 4)
    pair = built(run, FEW_TOKENS, torch.float32, entropy=1.5)
    pair.set_agreement(0.4)
    stage = Stage(pair, sampling="maximal")
    try:
        for backend in backends:
            stage.open(backend)
        new_tokens, answers = (48, 24) if run.options.quick else (FEW_TOKENS.new_tokens, 80)
        found = same_distribution(stage, new_tokens, answers, 3, lambda: time.perf_counter() < end)
    finally:
        stage.close()
    run.results["distribution"] = found
    run.check(checks_of_distribution(found))


def built(run: Run, shape: Shape, dtype: torch.dtype, **options: Any) -> Pair:
    pair = build(shape, run.device, dtype, **options)
    name, tolerance = str(dtype).removeprefix("torch."), TOLERANCES[dtype]
    shown = f"logits differ by {pair.embedding_error:.1e} of the largest, {tolerance:g} allowed"
    run.check(
        [Check(f"{shape.name}, {name}: the draft is inside the target", pair.embedding_error <= tolerance, shown)]
    )
    return pair


def measure(run: Run, shape: Shape, backends: list[str], seconds: float) -> None:
    """All that is measured of one target, in its share of the time."""
    end = time.perf_counter() + seconds
    found = run.results["targets"][shape.name] = {"cells": []}
    stage: Stage | None = None
    with run.phase(f"{shape.name}: made, and wrapped"):
        pair = built(run, shape, torch.bfloat16)
        pair.set_agreement(AGREEMENTS[0])
        found |= {"entropy": pair.entropy, "embedding_error": pair.embedding_error}
        stage = Stage(pair, has_auto=True)
    if stage is None:
        return
    try:
        for backend in backends:
            with run.phase(f"{shape.name}: backend {backend}"):
                stage.open(backend)
        found["seconds_to_wrap"] = {name: round(each, 2) for name, each in stage.seconds_to_wrap.items()}
        found["backends"] = {name: _described(stage.prepared(name)) for name in stage.backends}
        if stage.backends:
            _measure(run, stage, found, end)
        run.check(_checks_of_captures(shape.name, stage, found["backends"]))
        if run.device.type == "cuda":
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(run.device)
    finally:
        stage.close()
        del stage, pair
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(run.device)


def _measure(run: Run, stage: Stage, found: dict[str, Any], end: float) -> None:
    shape = stage.pair.shape
    first, *longer = shape.contexts
    cells = [(AGREEMENTS[0], first, False), *((AGREEMENTS[0], context, False) for context in longer)]
    cells += [(AGREEMENTS[0], first, True), (AGREEMENTS[1], first, False)]
    for index, (agreement, context, is_repetitive) in enumerate(cells):
        name = f"{shape.name}: {'repetitive ' if is_repetitive else ''}context {context}, agreement {agreement}"
        left = end - time.perf_counter()
        with run.phase(name):
            if agreement != AGREEMENTS[0]:
                stage.pair.set_agreement(agreement)
            cell = Cell(stage, context, shape.new_tokens, is_repetitive=is_repetitive)
            row = cell.run(left / (len(cells) - index), left, 2 if run.options.quick else MOST_ROUNDS)
            if isinstance(row, str):
                run.leave_out(name, row)
            else:
                found["cells"].append(row | {"wanted_agreement": agreement})
                run.check(_checks_of_cell(name, row))
        if index == 0:
            _rest(run, stage, found)


def _rest(run: Run, stage: Stage, found: dict[str, Any]) -> None:
    """What is measured once of a target, after its first cell."""
    shape, is_cuda = stage.pair.shape, run.device.type == "cuda"
    if found["cells"]:
        found["bandwidth"] = bandwidth_share(
            stage.pair, found["cells"][0]["step_seconds"], run.results["copy_bytes_per_second"]
        )
    if is_cuda:
        with run.phase(f"{shape.name}: synchronisations"):
            rows = found["synchronisations"] = synchronisations(stage, shape.contexts[0], shape.new_tokens)
            run.check(_checks_of_waiting(shape.name, rows))
    else:
        run.leave_out(f"{shape.name}: synchronisations", "the CPU has none")
    rounds, budget = (2, 0.5) if run.options.quick else (5, 3.5)
    for backend in stage.backends:
        with run.phase(f"{shape.name}: how well costs are foretold, {backend}"):
            prepared, outcomes = stage.prepared(backend), stage.take_outcomes(backend)
            table, costs = cost_errors(stage.pair, shape.contexts[:2], rounds, budget, prepared)
            costs["in_service"] = errors_in_service(table, outcomes, is_asynchronous=is_cuda)
            found.setdefault("costs", {})[backend] = costs


def _checks_of_cell(name: str, row: dict[str, Any]) -> Iterator[Check]:
    """In bfloat16 an answer may part from the plain one at a tie, and nowhere else."""
    different = sum(arm.get("verdicts", {}).get("different", 0) for arm in row["arms"])
    kinds: dict[str, int] = {}
    for arm in row["arms"]:
        for kind, count in arm.get("verdicts", {}).items():
            kinds[kind] = kinds.get(kind, 0) + count
    yield Check(f"{name}: nothing but ties", different == 0, ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    found = sorted({text for arm in row["arms"] for text in arm.get("troubles", [])})
    yield Check(f"{name}: nothing was left to generate or switched off", not found, "; ".join(found) or "nothing")


def _described(prepared: Any) -> dict[str, Any] | None:
    """What was made for a backend; None: nothing."""
    if prepared is None:
        return None
    names = ("name", "reason", "shapes", "captures", "memory_bytes", "failures")
    found = {name: getattr(prepared, name) for name in names}
    return found | {"speedups": {str(width): round(each, 3) for width, each in prepared.speedups.items()}}


def _checks_of_captures(name: str, stage: Stage, before: dict[str, Any]) -> Iterator[Check]:
    for backend, description in before.items():
        if description is not None:
            was, is_now = description["captures"], stage.prepared(backend).captures
            yield Check(f"{name}, {backend}: nothing was prepared in service", was == is_now, f"{was}, later {is_now}")


def _checks_of_waiting(name: str, rows: list[dict[str, Any]]) -> Iterator[Check]:
    plain = next(row["per_token"] for row in rows if row["arm"] == "plain")
    for row in rows:
        if row["arm"].endswith(" off"):
            shown = f"{row['per_token']:.2f} a token, generate {plain:.2f}"
            yield Check(f"{name}, {row['arm']}: waits no more often than generate", row["per_token"] <= plain, shown)
