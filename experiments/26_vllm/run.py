"""vLLM without speculation, with its own n-gram and suffix drafting at their best settings, and with autospec inside.

    make vllm-suffix
    .vllm/bin/python experiments/26_vllm/run.py --prompts spec_bench.jsonl [--quick]

Six segments of Spec-Bench, greedily and at temperature 0.8, 1, 4 and 16 requests at once. Settings of vLLM's own
drafting are tried on other prompts first. Then engines are kept alive and take turns: each chunk of prompts is answered
by every arm before the next one, in an order that turns from chunk to chunk, and an engine that waits is stopped. What
is done is kept in the work file, and not done again. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from arms import COLD, FAMILIES, NEEDS, NONE, WARM, Arm, fixed, single
from common import DECODINGS, add_prompts, need_prompts, script, turned
from engine import ArmError, Engine, library, open_engine
from plan import Cell, Plan, make_plan
from summary import best_setting, summarise
from table import tables
from tqdm import tqdm
from transformers import AutoTokenizer

from autospec import models
from autospec.deployment import device_name

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
TARGET = "smollm2-135m"
CONCURRENCIES = (1, 4, 16)
SWEPT = (CONCURRENCIES[0], CONCURRENCIES[-1])
"""Settings are tried at these; in between, those of the first one are taken."""
SAMPLING = {name: {"temperature": options.get("temperature", 0.0)} for name, options in DECODINGS.items()}
SETTINGS = {"policy": "auto", "control_share": "0", "resume": "no"}
"""Of autospec's proposer."""
ENGINE = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": CONCURRENCIES[-1],
    "gpu_memory_utilization": 0.2,  # of the memory, also on the CPU
    "enable_prefix_caching": False,  # every arm reads its prompts anew
    "seed": 0,
}
QUICK = {"limits": (1, 1, 1), "other_limits": (1, 1, 1), "tokens": 8, "no_sweep": True, "no_wait": True}
WARM_UP_TOKENS = 8
IDLE_SECONDS = 2.0

prompts_of_bench, work_of_bench = script("23_benchmark", "prompts"), script("23_benchmark", "work")
calm = script("23_benchmark", "calm")


class Bench:
    """The engines, what is to be done, and what is."""

    def __init__(self, options: argparse.Namespace, plan: Plan, work: Any, folder: Path) -> None:
        self.options, self.plan, self.work, self.folder = options, plan, work, folder
        self.python = options.env / "bin" / "python"
        self.preloaded = library(self.python)
        self.engines: dict[str, Engine] = {}
        self.left_out: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.target = models.resolve(TARGET)
        self.start_seconds = 0.0

    def begin(self) -> float:
        """Start the engine without speculation. Returns: seconds that are left, from what it takes."""
        none = next(arm for arm in single() if arm.name == NONE)
        began = time.monotonic()
        engine = self.engine(none)
        self.start_seconds = time.monotonic() - began
        self.versions = engine.hello["versions"]
        for family, package in NEEDS.items():
            if package not in self.versions:
                self.left_out[family] = (
                    f"vLLM refuses it without the package {package}, which is not there: make vllm-suffix"
                )
        if not self.work.of("idle"):
            self.work.add("idle", share=engine.idle_share(IDLE_SECONDS), unique_bytes=engine.unique_bytes())
        return self.estimate(engine)

    def engine(self, arm: Arm) -> Engine:
        """The one of this arm, warmed up, or rehearsed if it learns from what it answers."""
        if arm.name in self.engines:
            return self.engines[arm.name]
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        log = self.options.work.with_suffix(".log")
        engine = open_engine(self.python, log, folder, SETTINGS, self.preloaded)
        self.engines[arm.name] = engine
        engine.ask(
            "start",
            model=self.target,
            dtype=self.options.dtype,
            speculative_config=arm.speculative,
            per_request_spec_decode_metrics="summary" if arm.speculative else "none",
            **ENGINE,
        )
        if arm.is_rehearsed:
            for cell in tqdm(self.plan.rehearsed, desc=f"{arm.name}, other prompts", leave=False):
                self.answer(engine, cell, cell.prompts)
        elif not arm.learns:
            cell = (*self.plan.rehearsed, *self.plan.measured)[0]
            self.answer(engine, cell, cell.prompts[:2], WARM_UP_TOKENS)
        return engine

    def close(self, names: Sequence[str] | None = None) -> None:
        """End engines; all of them if none are named."""
        for name in list(self.engines) if names is None else names:
            self.engines.pop(name).close()

    def answer(
        self, engine: Engine, cell: Cell, prompts: Sequence[Any], tokens: int | None = None, concurrency: int = 0
    ) -> dict[str, Any]:
        reply = engine.ask(
            "answer",
            prompts=[prompt.tokens for prompt in prompts],
            sampling=SAMPLING[cell.decoding],
            concurrency=concurrency or cell.concurrency,
            max_tokens=tokens or self.options.tokens,
        )
        for prompt, request in zip(prompts, reply["requests"], strict=True):
            request.update(prompt=prompt.prompt_id, segment=prompt.segment, prompt_tokens=len(prompt.tokens))
        return reply

    def sweep(self) -> None:
        """Try settings, each in an engine of its own; one that fails is left out, with a row that says why."""
        families = [] if self.options.no_sweep else [f for f in FAMILIES if f not in self.left_out]
        settings = [(family, setting) for family in families for setting in FAMILIES[family]]
        cells = [cell for cell in self.plan.rehearsed if cell.concurrency in SWEPT]
        for family, setting in tqdm(settings, desc="settings", unit="engine"):
            arm = fixed(family, setting)
            where = {"family": family, "setting": setting, "arm": arm.name}
            done = {(row["concurrency"], row["decoding"]) for row in self.work.of("sweep", **where)}
            open_cells = [cell for cell in cells if (cell.concurrency, cell.decoding) not in done]
            if not open_cells:
                continue
            try:
                engine = self.engine(Arm(arm.name, arm.speculative))
                for cell in open_cells:
                    made = self.answer(engine, cell, cell.prompts)
                    self.work.add("sweep", **where, concurrency=cell.concurrency, decoding=cell.decoding, **made)
            except ArmError as error:
                print(f"left out, {arm.name}: {error}", file=sys.stderr)
                self.work.add("sweep", **where, error=str(error))
            self.close([arm.name])

    def swept(self) -> dict[str, dict[str, Any]]:
        """Family -> concurrency -> what the sweep found there; a family of which no setting works is left out."""
        found: dict[str, dict[str, Any]] = {}
        cells = [cell for cell in self.plan.rehearsed if cell.concurrency in SWEPT]
        for family in FAMILIES if not self.options.no_sweep else ():
            rows = self.work.of("sweep", family=family)
            times = Counter(row["setting"] for row in rows)
            whole = [row for row in rows if times[row["setting"]] == len(cells)]
            if whole:
                found[family] = {str(size): best_setting(whole, size) for size in SWEPT}
            elif family not in self.left_out:
                errors = [row["error"] for row in self.work.errors("sweep", family=family)]
                self.left_out[family] = f"no setting works: {errors[-1] if errors else 'none was tried'}"
        return found

    def settings_of(self) -> dict[str, dict[str, str]]:
        """Family -> concurrency -> its setting there."""
        swept, made = self.swept(), {}
        for family in FAMILIES:
            if family in self.left_out:
                continue
            first = next(iter(FAMILIES[family]))
            at = {size: found["best"] for size, found in swept.get(family, {}).items()}
            made[family] = {
                str(size): at.get(str(size), at.get(str(CONCURRENCIES[0]), first)) for size in CONCURRENCIES
            }
        return made

    def arms(self, concurrency: int) -> dict[str, Arm]:
        """By the name under which they are measured."""
        by_name = {arm.name: arm for arm in single()}
        families = {family: fixed(family, at[str(concurrency)]) for family, at in self.settings_of().items()}
        return {NONE: by_name[NONE], **families, COLD: by_name[COLD], WARM: by_name[WARM]}

    def measure(self) -> None:
        """Every chunk by every arm."""
        turns = list(self.turns())
        done = {_key(row) for row in self.work.of("measure")}
        open_ = [turn for turn in turns if turn["key"] not in done]
        needed = {turn["arm"].name for turn in open_}
        bar = tqdm(total=len(turns), desc="measure", unit="turn")
        for number, turn in enumerate(turns):
            arm, cell, is_done = turn["arm"], turn["cell"], turn["key"] in done
            if arm.name in needed and (arm.learns or not is_done):  # it learns again what it knew before a break
                bar.set_postfix_str(f"{cell.concurrency} at once, {turn['name']}")
                made = self.turn(self.engine(arm), cell, turn["chunk"])
                if not is_done:
                    where = {"concurrency": cell.concurrency, "decoding": cell.decoding, "chunk": turn["number"]}
                    self.work.add("measure", arm=turn["name"], engine=arm.name, **where, **made)
            bar.update()
            later = {each["arm"].name for each in turns[number + 1 :]}
            self.close([name for name in self.engines if name not in later])
        bar.close()

    def turn(self, engine: Engine, cell: Cell, prompts: Sequence[Any]) -> dict[str, Any]:
        """Answer when nothing else runs here, and tell what did meanwhile."""
        waited = 0.0 if self.options.no_wait else calm.wait()
        others, began, before = calm.Others(), time.perf_counter(), engine.cpu_seconds()
        made = self.answer(engine, cell, prompts)
        own = (engine.cpu_seconds() - before) / ((os.cpu_count() or 1) * (time.perf_counter() - began))
        share = others.share()
        return {**made, "waited_seconds": round(waited, 3), "others_share": share and max(0.0, share - own)}

    def turns(self) -> Iterator[dict[str, Any]]:
        """Which arm answers which chunk, in the order in which it is done."""
        number = 0
        for cell in self.plan.measured:
            arms = self.arms(cell.concurrency)
            for at, chunk in enumerate(cell.chunks):
                for name in turned(list(arms), number):
                    key = (name, cell.concurrency, cell.decoding, at)
                    yield {"key": key, "name": name, "arm": arms[name], "cell": cell, "chunk": chunk, "number": at}
                number += 1

    def estimate(self, engine: Engine) -> float:
        """Seconds that are left, from plain steps of one request and of many."""
        alone, crowded = self.plan.measured[0], self.plan.measured[-1]
        prompt = [sorted(alone.prompts, key=lambda p: len(p.tokens))[len(alone.prompts) // 2]]
        first, more = (self.answer(engine, alone, prompt, tokens) for tokens in (1, 1 + WARM_UP_TOKENS))
        per_prompt_token = first["seconds"] / len(prompt[0].tokens)
        step = {1: (more["seconds"] - first["seconds"]) / WARM_UP_TOKENS}
        some = sorted(crowded.prompts, key=lambda p: len(p.tokens))[: CONCURRENCIES[-1]]
        made = self.answer(engine, crowded, some, 1 + WARM_UP_TOKENS)
        prefill = per_prompt_token * sum(len(prompt.tokens) for prompt in some)
        step[CONCURRENCIES[-1]] = max(step[1], (made["seconds"] - prefill) / WARM_UP_TOKENS)
        slope = (step[CONCURRENCIES[-1]] - step[1]) / (CONCURRENCIES[-1] - 1)

        def seconds(cells: Sequence[Cell]) -> float:
            total = 0.0
            for cell in cells:
                steps = len(cell.prompts) * self.options.tokens / cell.concurrency
                total += per_prompt_token * sum(len(prompt.tokens) for prompt in cell.prompts)
                total += steps * (step[1] + slope * (cell.concurrency - 1))
            return total

        families = [family for family in FAMILIES if family not in self.left_out]
        settings = 0 if self.options.no_sweep else sum(len(FAMILIES[family]) for family in families)
        tried = [cell for cell in self.plan.rehearsed if cell.concurrency in SWEPT]
        arms = 3 + len(families)
        answers = settings * len(tried) + arms * sum(len(cell.chunks) for cell in self.plan.measured)
        left = 1.0 - len(self.work.of("sweep") + self.work.of("measure")) / answers
        sweep = settings * (self.start_seconds + seconds(tried))
        measure = arms * (self.start_seconds + seconds(self.plan.measured))
        rehearsals = (1 + ("suffix" in families)) * seconds(self.plan.rehearsed)
        return max(0.0, left) * (sweep + measure) + rehearsals


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["arm"], row["concurrency"], row["decoding"], row["chunk"]


def results_of(bench: Bench, segments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Everything that the work file holds, summarised."""
    rows = [row for row in bench.work.of("measure") if row["arm"] not in bench.left_out]
    idle = bench.work.of("idle")[-1]
    swept, settings_of = bench.swept(), bench.settings_of()
    prompts = [prompt for cell in bench.plan.measured for prompt in cell.prompts]
    return {
        "is_smoke_run": bench.options.smoke,
        "machine": device_name(torch.device("cpu")),
        "versions": bench.versions,
        "left_out": bench.left_out,
        "settings": bench.work.settings,
        "preloaded": bench.preloaded and Path(bench.preloaded).name,
        "idle": {"share_of_a_core": round(idle["share"], 3), "unique_bytes": idle["unique_bytes"]},
        "prompts": prompts_of_bench.available(segments, prompts),
        "sweep": swept,
        "settings_of": settings_of,
        **summarise(rows),
        "others": script("23_benchmark", "summary").others(rows),
    }


def parse_options() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--env", type=Path, default=ROOT / ".vllm", help="folder of the environment with vLLM")
    sizes = ", ".join(map(str, CONCURRENCIES))
    parser.add_argument(
        "--limits", type=_counts, default=(2, 3, 6), help=f"prompts of each segment and decoding, at {sizes} at once"
    )
    parser.add_argument(
        "--other-limits", type=_counts, default=(1, 1, 2), help="the same of those that settings are tried on"
    )
    parser.add_argument("--tokens", type=int, default=40, help="of each answer, at most")
    parser.add_argument("--most-prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-sweep", action="store_true", help="take the first setting of each family")
    parser.add_argument("--no-wait", action="store_true", help="answer also while other processes are busy")
    parser.add_argument("--work", type=Path, default=None, help="what is done; work.jsonl of this folder if left out")
    parser.add_argument("--out", type=Path, default=None, help="folder for results.json; this one if left out")
    parser.add_argument("--quick", action="store_true", help="a short look at everything; settings untried")
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    if options.quick:
        vars(options).update(QUICK, smoke=True)
    options.env = options.env.absolute()
    if not (options.env / "bin" / "python").exists():
        parser.error(f"--env {options.env}: no environment there; say make vllm")
    name = "work_quick.jsonl" if options.quick else "work.jsonl"
    options.work = (options.work or FOLDER / name).absolute()
    options.out = options.out or FOLDER
    return parser, options


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(count) for count in text.split(","))
    if len(counts) != len(CONCURRENCIES) or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: {len(CONCURRENCIES)} numbers from 1 on are needed, as in 2,3,6")
    return counts


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What makes rows comparable."""
    kept = ("limits", "other_limits", "tokens", "most_prompt", "dtype", "no_sweep")
    return {
        **{name: getattr(options, name) for name in kept},
        "target": TARGET,
        "concurrencies": CONCURRENCIES,
        "sampling": SAMPLING,
        "engine": ENGINE,
        "omp_threads_bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
        "autospec": SETTINGS,
        "arms": {arm.name: arm.speculative for arm in single()},
        "families": FAMILIES,
        "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
    }


def main() -> int:
    parser, options = parse_options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stopped engines are let go
    started = time.monotonic()
    segments = prompts_of_bench.read(options.prompts, AutoTokenizer.from_pretrained(models.resolve(TARGET)))
    usable = {s: [p for p in prompts if len(p.tokens) <= options.most_prompt] for s, prompts in segments.items()}
    try:
        plan = make_plan(usable, CONCURRENCIES, list(SAMPLING), options.limits, options.other_limits)
    except ValueError as error:
        parser.error(str(error))
    work = work_of_bench.Work(options.work, settings_of(options))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, plan, work, Path(folder))
        try:
            print(f"about {bench.begin() / 60:.0f} minutes to go", file=sys.stderr, flush=True)
            bench.sweep()
            bench.measure()
        finally:
            bench.close()
    results = results_of(bench, usable)
    results["minutes_of_this_run"] = round((time.monotonic() - started) / 60, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
