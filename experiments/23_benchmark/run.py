"""autospec beside `generate`, transformers' own speculation and two packages, on six segments of Spec-Bench.

    python experiments/23_benchmark/run.py --prompts spec_bench.jsonl [--dtypes bfloat16,float32] [--limit 2] [--quick]

Every prompt is answered by every arm before the next one, in an order that turns by one from prompt to prompt. Before
that, settings are tried on other prompts of the same segments, for each number format and decoding anew, and the best
of each peer is measured beside its default. Each package has an environment and a process of its own. What is done is
kept in the work file, and not done again. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from arms import AUTOS, BASE, FAMILIES, REHEARSED, SINGLE, Arm, Family
from client import ArmError, Client
from common import DECODINGS, add_prompts, need_prompts, turned
from environments import OWN, PEERS, python_of
from prompts import Prompt, available, choose, read
from summary import best_setting, summarise
from table import tables
from tqdm import tqdm
from transformers import AutoTokenizer
from work import Work

from autospec import models
from autospec.deployment import device_name

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
TARGET, ASSISTANT = "smollm2-135m", "smollm2-135m-assistant"
QUICK = {
    "limit": 1,
    "sweep_limit": 0,
    "rehearse": 1,
    "tokens": 12,
    "most_prompt": 256,
    "dtypes": "bfloat16",
    "decodings": "greedy",
}
WARM_UP_TOKENS = 8
START_SECONDS, ARM_SECONDS = 12.0, 14.0
"""Of starting a process with a model, and of an arm in a process of its own, for the estimate alone."""


class Bench:
    """The processes, what is to be done, and what is."""

    def __init__(
        self,
        options: argparse.Namespace,
        work: Work,
        prompts: Sequence[Prompt],
        rehearsed: Sequence[Prompt],
        others: Sequence[Prompt],
    ) -> None:
        self.options, self.work = options, work
        self.prompts, self.rehearsed, self.others = prompts, rehearsed, others
        self.folder, self.assistant = models.resolve(TARGET), models.resolve(ASSISTANT)
        self.clients: dict[str, Client] = {}
        self.missing: dict[str, str] = {}  # environment -> why it is not there
        wanted = {BASE, *options.arms.split(";")} if options.arms else None
        self.single = [arm for arm in SINGLE if wanted is None or arm.name in wanted]
        self.families = [family for family in FAMILIES if wanted is None or family.name in wanted]

    def start(self) -> None:
        """All environments that arms need; one that cannot be made is left out, and its arms with it."""
        for name in dict.fromkeys([OWN, *(arm.environment for arm in (*self.single, *self.families))]):
            try:
                self.clients[name] = self.client(name)
            except (RuntimeError, ArmError) as error:
                self.missing[name] = str(error)
                print(f"left out: {error}", file=sys.stderr)
        self.single = [arm for arm in self.single if arm.environment in self.clients]
        self.families = [family for family in self.families if family.environment in self.clients]

    def client(self, name: str) -> Client:
        envs = self.options.envs
        python = python_of(name, envs)
        return Client(
            python,
            self.options.threads,
            envs / f"{name}.log",
            is_own=name == OWN,
            costs=self.options.work.parent / "costs",
        )

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def load(self, dtype: str) -> None:
        for client in self.clients.values():
            client.ask("load", folder=self.folder, assistant=self.assistant, dtype=dtype)
        if not self.work.of("floor", dtype=dtype):
            self.work.add("floor", dtype=dtype, **self.clients[OWN].ask("floor"))

    def begin(self, decoding: str) -> None:
        """Sampled answers are all of full length: arms sample texts of their own, and a short one costs more by token,
        for its prompt."""
        for client in self.clients.values():
            client.ask("ends", are_ignored=bool(DECODINGS[decoding]["do_sample"]))

    def ready(self, arms: Sequence[Arm]) -> list[Arm]:
        """Make arms; those that raise are left out, with a row that says why."""
        made = []
        for arm in arms:
            try:
                ask = partial(self.clients[arm.environment].ask, "arm", name=arm.name, kind=arm.kind)
                reply = ask(settings=arm.settings)
                # first calls allocate and prepare kernels; on a measured prompt where there are no others
                self.answer(arm, (*self.rehearsed, *self.others, *self.prompts)[0], 0, "greedy", WARM_UP_TOKENS)
                if arm.learns:  # one that has learned nothing takes its place
                    self.drop([arm])
                    ask(settings=arm.settings)
                made.append(arm)
                self.work.add("ready", arm=arm.name, **reply)
            except ArmError as error:
                print(f"left out, {arm.name}: {error}", file=sys.stderr)
                self.work.add("ready", arm=arm.name, error=str(error))
        return made

    def drop(self, arms: Sequence[Arm]) -> None:
        for name, client in self.clients.items():
            client.ask("drop", names=[arm.name for arm in arms if arm.environment == name])

    def answer(self, arm: Arm, prompt: Prompt, seed: int, decoding: str, tokens: int | None = None) -> dict[str, Any]:
        return self.clients[arm.environment].ask(
            "answer",
            name=arm.name,
            prompt=prompt.tokens,
            segment=prompt.segment,
            seed=seed,
            options=DECODINGS[decoding],
            max_new_tokens=tokens or self.options.tokens,
        )

    def answers(
        self, phase: str, arms: Sequence[Arm], prompts: Sequence[Prompt], dtype: str, decoding: str, first_seed: int
    ) -> None:
        """Every prompt by every arm. One that raises is not asked again."""
        group = {"dtype": dtype, "decoding": decoding}
        done = {(row["arm"], row["prompt"]) for row in self.work.of(phase, **group)}
        arms = [arm for arm in arms if any((arm.name, p.prompt_id) not in done for p in prompts)]
        if not arms:
            return
        ready = self.ready(arms)
        if phase == "measure":
            self.rehearse([arm for arm in ready if arm.name in REHEARSED], decoding)
        bar = tqdm(total=len(ready) * len(prompts), desc=f"{phase}, {dtype}, {decoding}", unit="answer")
        failed: set[str] = set()
        for number, prompt in enumerate(prompts):
            for arm in turned(ready, number):
                is_done = (arm.name, prompt.prompt_id) in done
                if arm.name not in failed and (arm.learns or not is_done):  # a pool is filled again after a break
                    try:
                        made = self.answer(arm, prompt, first_seed + number, decoding)
                    except ArmError as error:
                        failed.add(arm.name)
                        made = {"error": str(error)}
                    if not is_done:
                        if "error" not in made:
                            made["output_tokens"] = len(made["tokens"])
                        where = {"prompt": prompt.prompt_id, "segment": prompt.segment}
                        where["prompt_tokens"] = len(prompt.tokens)
                        self.work.add(phase, **group, arm=arm.name, **where, **made)
                bar.update()
        bar.close()
        self.drop(ready)

    def rehearse(self, arms: Sequence[Arm], decoding: str) -> None:
        """What `auto, warm` has seen: other prompts of the same segments."""
        for arm in arms:
            for number, prompt in enumerate(tqdm(self.rehearsed, desc=f"{arm.name}, other prompts")):
                self.answer(arm, prompt, 1_000 + number, decoding)

    def sweep(self, dtype: str, decoding: str) -> None:
        if not self.others:
            return
        arms = [family.arm(setting) for family in self.families for setting in family.settings]
        self.answers("sweep", arms, self.others, dtype, decoding, 1_000)

    def swept(self, family: Family, dtype: str, decoding: str) -> dict[str, Any] | None:
        """What the sweep found; None without one, or where no setting works."""
        names = {family.arm(setting).name: setting for setting in family.settings}
        group = {"dtype": dtype, "decoding": decoding}
        rows = self.work.of("sweep", **group) + self.work.errors("sweep", **group)
        mine = [{**row, "setting": names[row["arm"]]} for row in rows if row["arm"] in names]
        try:
            return best_setting(mine) if mine else None
        except ValueError as error:
            print(f"{family.name}: {error}", file=sys.stderr)
            return None

    def arms(self, dtype: str, decoding: str) -> list[Arm]:
        """What is measured: single arms, and of each family the default and the best setting."""
        made = [arm for arm in self.single if self.rehearsed or arm.name not in REHEARSED]
        for family in self.families:
            made.append(family.arm(family.default, f"{family.name}, default"))
            found = self.swept(family, dtype, decoding)
            if found and found["best"] != family.default:
                made.append(family.arm(found["best"], f"{family.name}, best"))
        return made

    def judge(self, dtype: str) -> None:
        """Greedy answers of each arm beside plain decoding's."""
        group = {"dtype": dtype, "decoding": "greedy"}
        judged = {(row["arm"], row["prompt"]) for row in self.work.of("judge", **group)}
        rows = self.work.of("measure", **group)
        expected = {row["prompt"]: row["tokens"] for row in rows if row["arm"] == BASE}
        for prompt in tqdm(self.prompts, desc=f"judging, {dtype}"):
            open_ = [r for r in rows if r["prompt"] == prompt.prompt_id and (r["arm"], r["prompt"]) not in judged]
            if not open_ or prompt.prompt_id not in expected:
                continue
            found = self.clients[OWN].ask(
                "judge",
                prompt=prompt.tokens,
                expected=expected[prompt.prompt_id],
                found=[row["tokens"] for row in open_],
            )
            for row, verdict in zip(open_, found["verdicts"], strict=True):
                self.work.add("judge", **group, arm=row["arm"], prompt=row["prompt"], **verdict)

    def memory(self, dtype: str, decoding: str) -> None:
        """Each arm alone in a new process, with the longest prompt."""
        longest = max(self.prompts, key=lambda p: len(p.tokens))
        arms = [arm for arm in self.arms(dtype, decoding) if not self.work.of("memory", arm=arm.name, dtype=dtype)]
        for arm in tqdm([arm for arm in arms if arm.name not in REHEARSED], desc="memory"):
            try:
                with self.client(arm.environment) as client:
                    client.ask("load", folder=self.folder, assistant=self.assistant, dtype=dtype)
                    client.ask("forget_peak")
                    client.ask("arm", name=arm.name, kind=arm.kind, settings=arm.settings)
                    fields = {"prompt": longest.tokens, "segment": longest.segment, "seed": 0}
                    tokens = {"options": DECODINGS[decoding], "max_new_tokens": self.options.tokens}
                    client.ask("answer", name=arm.name, **fields, **tokens)
                    found = client.ask("memory")
                    if arm.kind == "autospec":
                        found |= client.ask("held", name=arm.name)
                self.work.add("memory", dtype=dtype, decoding=decoding, arm=arm.name, **found)
            except ArmError as error:
                self.work.add("memory", dtype=dtype, decoding=decoding, arm=arm.name, error=str(error))

    def estimate(self, dtypes: Sequence[str], decodings: Sequence[str]) -> float:
        """Seconds that are left, from what plain steps take here in the first number format."""
        self.load(dtypes[0])
        arm = next(arm for arm in self.single if arm.name == BASE)
        self.clients[OWN].ask("arm", name=arm.name, kind=arm.kind, settings=arm.settings)
        prompt = sorted(self.prompts, key=lambda p: len(p.tokens))[len(self.prompts) // 2]
        self.answer(arm, prompt, 0, "greedy", 2)
        first, more = (self.answer(arm, prompt, 0, "greedy", n) for n in (1, 13))
        per_prompt_token = first["seconds"] / len(prompt.tokens)
        per_token = (more["seconds"] - first["seconds"]) / max(1, len(more["tokens"]) - 1)
        self.drop([arm])

        def seconds(prompts: Sequence[Prompt]) -> float:
            return sum(per_prompt_token * len(p.tokens) + per_token * self.options.tokens for p in prompts)

        settings = sum(len(family.settings) for family in self.families)
        arms = len(self.single) + 2 * len(self.families)
        whole = (
            settings * seconds(self.others) + arms * seconds(self.prompts) + seconds([*self.prompts, *self.rehearsed])
        )
        groups = len(dtypes) * len(decodings)
        answers = groups * (settings * len(self.others) + arms * len(self.prompts))
        left = 1.0 - len(self.work.of("sweep") + self.work.of("measure")) / max(1, answers)
        memory = 0.0 if self.options.no_memory else arms * ARM_SECONDS
        starts = len(self.clients) * START_SECONDS * len(dtypes) + 8.0 * groups
        return max(0.0, left) * groups * whole + memory + starts


def results_of(bench: Bench, segments: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """Everything that the work file holds, summarised."""
    work = bench.work
    verdicts = {(r["dtype"], r["arm"], r["prompt"]): r["verdict"] for r in work.of("judge")}
    groups = {}
    for dtype, decoding in dict.fromkeys((r["dtype"], r["decoding"]) for r in work.of("measure", arm=BASE)):
        group = {"dtype": dtype, "decoding": decoding}
        rows = work.of("measure", **group) + work.errors("measure", **group)
        if decoding == "greedy":
            judged = ((row, verdicts.get((dtype, row["arm"], row["prompt"]))) for row in rows)
            rows = [{**row, "verdict": verdict} if verdict else row for row, verdict in judged]
        peers = {f.name: [f"{f.name}, default", f"{f.name}, best"] for f in FAMILIES if f.is_peer}
        found = summarise(rows, BASE, AUTOS, peers)
        found["settings"], found["sweep"] = {}, {}
        for family in bench.families:
            found["settings"][f"{family.name}, default"] = family.default
            if swept := bench.swept(family, dtype, decoding):
                found["sweep"][family.name] = swept
                found["settings"][f"{family.name}, best"] = swept["best"]
        if floors := work.of("floor", dtype=dtype):
            found["floor"] = _floor(rows, found["milliseconds_per_token"], floors[-1]["forward_seconds"])
        found["actions"] = {auto: _actions(rows, auto) for auto in AUTOS}
        groups[f"{dtype}, {decoding}"] = found
    return {
        "is_smoke_run": bench.options.smoke,
        "machine": device_name(torch.device("cpu")),
        "environments": {name: client.hello for name, client in bench.clients.items()},
        "left_out": {**bench.missing, **{r["arm"]: r["error"] for r in work.errors("ready")}},
        "settings": work.settings,
        "prompts": available(segments, bench.prompts),
        "is_swept": bool(bench.others),
        "bandwidth": {
            row["dtype"]: {k: row[k] for k in row if k not in ("phase", "dtype")} for row in work.of("floor")
        },
        "groups": groups,
        "memory": {row["arm"]: {k: row[k] for k in row if k.endswith("_bytes")} for row in work.of("memory")},
        "ready_seconds": {row["arm"]: round(row["seconds"], 3) for row in work.of("ready")},
    }


def _floor(
    rows: Sequence[Mapping[str, Any]], milliseconds: Mapping[str, float], forward_seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Of each arm whose forwards could be counted: what they would take if each cost only reading its weights."""
    made = {}
    for arm in milliseconds:
        mine = [row for row in rows if row["arm"] == arm and "error" not in row]
        tokens = sum(row["output_tokens"] for row in mine)
        forwards = {name: sum(row[f"{name}_forwards"] for row in mine) for name in ("target", "draft")}
        if forwards["target"] < len(mine):
            continue  # it does not go through the model's own forward
        seconds = sum(count * forward_seconds[name] for name, count in forwards.items())
        made[arm] = {
            "target_forwards_per_token": round(forwards["target"] / tokens, 4),
            "draft_forwards_per_token": round(forwards["draft"] / tokens, 4),
            "floor_milliseconds_per_token": round(1000 * seconds / tokens, 4),
            "milliseconds_per_token": milliseconds[arm],
        }
    return made


def _actions(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        for action, blocks in row.get("actions", {}).items() if row["arm"] == arm else ():
            counts[action] = counts.get(action, 0) + blocks
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--limit", type=int, default=2, help="prompts of each segment")
    parser.add_argument(
        "--sweep-limit", type=int, default=1, help="prompts of each segment to try settings on; 0: none"
    )
    parser.add_argument("--rehearse", type=int, default=5, help="prompts of each segment that `auto, warm` has seen")
    parser.add_argument("--tokens", type=int, default=40, help="of each answer, at most")
    parser.add_argument("--least-prompt", type=int, default=64, help="tokens")
    parser.add_argument("--most-prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--dtypes", default="bfloat16", help="separated by commas")
    parser.add_argument("--decodings", default=";".join(DECODINGS), help="separated by semicolons")
    names = [arm.name for arm in SINGLE] + [family.name for family in FAMILIES]
    parser.add_argument(
        "--arms", default="", help=f"only these and {BASE}, separated by semicolons: {'; '.join(names)}"
    )
    parser.add_argument("--threads", type=int, default=_threads())
    parser.add_argument("--envs", type=Path, default=ROOT / ".bench", help="folder of the packages' environments")
    parser.add_argument("--work", type=Path, default=None, help="what is done; work.jsonl in --envs if left out")
    parser.add_argument("--out", type=Path, default=None, help="folder for results.json; of this script if left out")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--build", action="store_true", help="make the environments, and no more")
    parser.add_argument("--quick", action="store_true", help="a short look at everything; settings untried")
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    options = parser.parse_args()
    if not options.build:
        need_prompts(parser, options.prompts)
    if options.quick:
        vars(options).update(QUICK, no_memory=True, smoke=True)
    unknown = [arm for arm in options.arms.split(";") if arm and arm not in names]
    unknown += [decoding for decoding in options.decodings.split(";") if decoding not in DECODINGS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join([*names, *DECODINGS])}")
    options.envs = options.envs.absolute()
    options.work = (options.work or options.envs / ("quick.jsonl" if options.quick else "work.jsonl")).absolute()
    options.out = options.out or (options.envs if options.quick else FOLDER)
    return options


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What makes rows comparable."""
    kept = ("limit", "sweep_limit", "rehearse", "tokens", "least_prompt", "most_prompt", "threads")
    return {
        **{name: getattr(options, name) for name in kept},
        "target": TARGET,
        "assistant": ASSISTANT,
        "decodings": DECODINGS,
        "families": {family.name: dict(family.settings) for family in FAMILIES},
        "packages": {name: peer.packages for name, peer in PEERS.items()},
        "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
    }


def groups_of(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for dtype in options.dtypes.split(","):
        for decoding in options.decodings.split(";"):
            yield dtype, decoding


def main() -> int:
    options = parse_options()
    if options.build:
        for name in PEERS:
            print(python_of(name, options.envs))
        return 0
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(TARGET))
    segments = read(options.prompts, tokenizer)
    counts = (options.limit, options.rehearse, options.sweep_limit)
    chosen = choose(segments, *counts, options.least_prompt, options.most_prompt)
    bench = Bench(options, Work(options.work, settings_of(options)), *chosen)
    bench.start()
    try:
        dtypes = options.dtypes.split(",")
        left = bench.estimate(dtypes, options.decodings.split(";"))
        print(f"about {left / 60:.0f} minutes to go", file=sys.stderr, flush=True)
        loaded = dtypes[0]
        for dtype, decoding in groups_of(options):
            if dtype != loaded:
                bench.load(dtype)
                loaded = dtype
            bench.begin(decoding)
            bench.sweep(dtype, decoding)
            bench.answers("measure", bench.arms(dtype, decoding), bench.prompts, dtype, decoding, 0)
            if decoding == "greedy":
                bench.judge(dtype)
        if not options.no_memory:
            bench.memory(*next(groups_of(options)))
        results = results_of(bench, segments)
    finally:
        bench.close()
    results["minutes_of_this_run"] = round((time.monotonic() - started) / 60, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
