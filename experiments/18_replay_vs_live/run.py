"""How well does replay predict live decoding? A policy tuned on recorded answers, then live on prompts it never saw.

    python experiments/18_replay_vs_live/run.py --prompts spec_bench.jsonl [--dtype bfloat16] [--temperature 0.8]
        [--arms ngram:4,suffix:8] [--tuning-time] [--work FOLDER] [--out FOLDER]
    python experiments/18_replay_vs_live/run.py --quick

The plain target answers prompts of six segments. Most answers are for tuning: they are scored, searched and split as
`autospec tune` does it. The other prompts are answered live, plainly, under the tuned policy, and by every fixed action
of a small grid, in an order that turns from prompt to prompt; the same is predicted by walks along the recorded
answers. Run it on an idle machine. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import transformers
from common import add_prompts, need_prompts
from tqdm import tqdm

from autospec import models
from autospec.answering import record_prompts
from autospec.costs import CostModel
from autospec.costs.calibration import calibrate
from autospec.data import DemoPrompt, encode, interleaved
from autospec.deployment import device_name
from autospec.drafts import Assistant
from autospec.drafts.base import DraftSource
from autospec.errors import AutospecError, ConfigurationError
from autospec.policies import Fixed, Policy
from autospec.policies.registry import build_policy
from autospec.policies.tuned import make_tuned
from autospec.scores import ScoredRequest
from autospec.scores.luck import Luck
from autospec.scores.scorer import Scorer
from autospec.scores.walk import Walked
from autospec.traffic import Traffic, TrafficReader, TrafficRequest
from autospec.tune.arms import Answer, Arm, teach
from autospec.tune.choice import Choice, choose
from autospec.tune.confirm import PARTED, Compared, Confirmed, compare, confirm_lines, judge, summary
from autospec.tune.evaluation import Setting, walk_policy
from autospec.tune.intervals import speed_up
from autospec.tune.scoring import host_seconds, why_not
from autospec.tune.search import Search
from autospec.tune.split import split
from autospec.tune.variants import draft_table, make_variants
from autospec.tuned_files import make_draft

FOLDER = Path(__file__).parent
OFF, TUNED = "off", "tuned"
FIXED = tuple(f"{source}:{length}" for source in ("ngram", "suffix", "assistant") for length in (1, 2, 4, 8))
HELD_OUT = 0.3  # of the tuning prompts, that `choose` judges by
WARM_UP_TOKENS = 8
WITHIN, LEAST_SHARE_WITHIN, WORST_SEGMENT, MOST_TUNING_SECONDS = 0.05, 5 / 6, 0.98, 600.0
REPLICAS, REPLICA_TOKENS = 500, 128


@dataclass(frozen=True)
class Recorded:
    """A plain answer, with the seed that it was drawn from."""

    request: TrafficRequest
    seed: int
    scored: ScoredRequest


@dataclass(frozen=True)
class Tuning:
    """What tuning gave, and how long it took."""

    choice: Choice
    setting: Setting
    table: Any
    seconds: Mapping[str, float]

    def policy(self, costs: CostModel) -> Policy:
        """As it would be read from its file, with nothing learned."""
        return make_tuned(self.choice.contents({}), lambda name, settings: build_policy(name, settings, lambda: costs))


def main() -> int:
    options = parse_options()
    try:
        tuning_prompts, live_prompts = prompts_of(options)
        model, tokenizer = models.load("smollm2-135m", dtype=options.dtype)
        assistant = models.load_model("smollm2-135m-assistant", dtype=options.dtype)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.work or Path(temporary)) / run_name(options)
            requests = answers(model, tokenizer, [*tuning_prompts, *live_prompts], folder, options)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    sources = new_sources(assistant, ("ngram", "suffix", "assistant"))
    sources += make_variants({source.name: source for source in sources}).values()
    for source in sources:
        source.attach(model, tokenizer)
    scorer = Scorer(model, {source.name: source for source in sources})
    started = time.perf_counter()
    past = scored(scorer, requests, 0, len(tuning_prompts), options.seed)
    scoring_seconds = time.perf_counter() - started
    live = scored(scorer, requests, len(tuning_prompts), len(requests), options.seed)
    tuning = tune(model, {source.name: source for source in sources}, past, options, scoring_seconds)
    predicted = predictions(tuning, past, live, options.arms)
    arms = live_arms(model, tokenizer, assistant, tuning, past, options.arms)
    rows = answered(arms, past, live, {name for name, each in predicted[TUNED].items() if each.is_control})
    compared = {
        name: [pair(model, each.request, rows[each.request.request_id], name) for each in live] for name in predicted
    }
    confirmed = {name: summary(found, predicted[name]) for name, found in compared.items()}
    results = {
        "device": device_name(model.device),
        **described(tuning, options),
        **measured(compared, confirmed, predicted),
    }
    results["plain_answers_as_recorded"] = sum(
        rows[each.request.request_id][OFF].tokens == each.request.output for each in live
    )
    results["plain_milliseconds"] = plain_milliseconds([asdict(row[OFF]) for row in rows.values()])
    if options.tuning_time:
        results["tuning_time"] = tuning_time([each.scored for each in past], tuning, options)
    results["bars"] = bars(results)
    report(results, confirmed, options)
    write(results, rows, options)
    return int(not options.quick and not all(each["is_met"] for each in results["bars"]))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--tuning", type=int, default=16, help="prompts of each segment to tune on")
    parser.add_argument("--live", type=int, default=5, help="other prompts of each segment, to decode live")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--trials", type=int, default=60, help="of the search")
    parser.add_argument("--arms", default=",".join(FIXED), help="fixed actions to decode with, comma-separated")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers, search and luck")
    parser.add_argument("--tuning-time", action="store_true", help="time the search on 500 requests of 128 tokens")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few prompts and arms, and no bar")
    parser.add_argument("--work", type=Path, default=None, help="folder for the recorded answers, gone on with")
    parser.add_argument("--out", type=Path, default=None, help="folder for results; this one, or none if quick")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    if options.quick:
        options.tuning, options.live, options.tokens, options.trials = 2, 1, 16, 8
        if options.arms == ",".join(FIXED):
            options.arms = "suffix:4,assistant:2"
    elif options.out is None:
        options.out = FOLDER
    options.arms = [name.strip() for name in options.arms.split(",") if name.strip()]
    if unknown := [name for name in options.arms if name not in FIXED]:
        parser.error(f"--arms: {unknown[0]!r} is not one of {', '.join(FIXED)}")
    return options


def run_name(options: argparse.Namespace) -> str:
    """As in `bfloat16_greedy` or `float32_t0.8`."""
    return f"{options.dtype}_{f't{options.temperature:g}' if options.temperature else 'greedy'}"


def prompts_of(options: argparse.Namespace) -> tuple[list[DemoPrompt], list[DemoPrompt]]:
    """First turns to tune on and others to decode live, of each segment so many, spread evenly over the file.

    Raises:
        ConfigurationError: there are too few prompts in it.
    """
    found: dict[str, list[DemoPrompt]] = defaultdict(list)
    for line in options.prompts.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        message = {"role": "user", "content": row["turns"][0]}
        found[row["segment"]].append(DemoPrompt(str(row["question_id"]), row["segment"], (message,), options.tokens))
    parts: tuple[list[DemoPrompt], list[DemoPrompt]] = ([], [])
    for segment, rows in found.items():
        for each, is_live in spread(rows, options.tuning, options.live, segment):
            parts[is_live].append(each)
    return list(interleaved(parts[0])), list(interleaved(parts[1]))


def spread(rows: Sequence[Any], tuning: int, live: int, segment: str) -> list[tuple[Any, bool]]:
    """Of one segment's rows, those that are used, and whether live.

    Raises:
        ConfigurationError: there are too few.
    """
    count = tuning + live
    if count > len(rows):
        raise ConfigurationError(f"segment {segment!r} has {len(rows)} prompts, {count} are needed")
    picked = [rows[i * len(rows) // count] for i in range(count)]
    return [(row, (i + 1) * live // count > i * live // count) for i, row in enumerate(picked)]


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[DemoPrompt], folder: Path, options: argparse.Namespace
) -> list[TrafficRequest]:
    """The plain target's answers, in the order of the prompts; those in the folder are taken from it.

    Raises:
        ConfigurationError: the folder holds other traffic.
    """
    wanted = [tuple(encode(tokenizer, prompt, model)["input_ids"][0].tolist()) for prompt in prompts]
    if not folder.exists():
        decoding = {"do_sample": False}
        if options.temperature:
            decoding = {"do_sample": True, "temperature": options.temperature, "top_k": 0}
        model.generate(**encode(tokenizer, prompts[0], model), max_new_tokens=WARM_UP_TOKENS, do_sample=False)
        recording = record_prompts(model, tokenizer, prompts, Traffic(folder), decoding, seed=options.seed)
        list(tqdm(recording, total=len(prompts), desc="recording", unit="answer"))
    found = list(TrafficReader(folder, tokenizer))
    if [each.prompt for each in found] != wanted:
        raise ConfigurationError(f"{folder} holds answers to other prompts, or not to all of them: give another --work")
    return found


def new_sources(assistant: Any, names: Sequence[str]) -> list[DraftSource]:
    """Usual ones and variants by their names."""
    table = draft_table(set(names))
    return [
        make_draft(name, table[name]["source"], table[name].get("settings", {}), "experiment")
        if name in table
        else Assistant(assistant)
        for name in names
    ]


def scored(scorer: Scorer, requests: Sequence[TrafficRequest], first: int, end: int, first_seed: int) -> list[Recorded]:
    """Those that can be walked. The scorer goes on from what it has seen."""
    found = []
    for place in tqdm(range(first, end), desc="scoring", unit="request"):
        request = requests[place]
        if why := why_not(request):
            print(f"left out: a request of {request.segment}: {why}", file=sys.stderr)
            continue
        found.append(Recorded(request, first_seed + place, scorer.score(request)))
    return found


def tune(
    model: Any,
    sources: Mapping[str, DraftSource],
    past: Sequence[Recorded],
    options: argparse.Namespace,
    scoring_seconds: float,
) -> Tuning:
    """As `autospec tune` does it, with costs measured now."""
    laps = {"scoring": scoring_seconds}
    started = time.perf_counter()
    table = calibrate(model, sources)
    laps["calibration"] = time.perf_counter() - started
    setting = Setting(CostModel(table), Luck(options.seed), host_seconds([each.request for each in past]) or 0.0)
    choice, searched = search([each.scored for each in past], setting, list(sources), table, options)
    return Tuning(choice, setting, table, {**laps, **searched})


def search(
    requests: Sequence[ScoredRequest], setting: Setting, sources: Sequence[str], table: Any, options: argparse.Namespace
) -> tuple[Choice, dict[str, float]]:
    """A policy, and the seconds of searching and of choosing."""
    started = time.perf_counter()
    train, rest = split(requests, held_out=HELD_OUT)
    study = Search(train, setting, sources=sources, block_lengths=table.block_lengths, seed=options.seed)
    list(tqdm(study.run(trials=options.trials), total=options.trials, desc="search", unit="policy"))
    searched = time.perf_counter() - started
    choice = choose(study.tried(), train, rest, setting)
    return choice, {"search": searched, "choice": time.perf_counter() - started - searched}


def predictions(
    tuning: Tuning, past: Sequence[Recorded], live: Sequence[Recorded], fixed: Sequence[str]
) -> dict[str, dict[str, Walked]]:
    """Of each arm, walks along the recorded answers to the live prompts, by request; the tuned policy learns before."""
    wanted = {each.request.request_id for each in live}
    before, here = [each.scored for each in past], [each.scored for each in live]
    walked = {TUNED: list(walk_policy(tuning.policy(CostModel(tuning.table)), [*before, *here], tuning.setting))}
    walked |= {name: list(walk_policy(fixed_policy(name), here, tuning.setting)) for name in fixed}
    return {
        name: {each.request.request_id: each for each in found if each.request.request_id in wanted}
        for name, found in walked.items()
    }


def fixed_policy(name: str) -> Fixed:
    source, _, length = name.partition(":")
    return Fixed(source, block_length=int(length))


def live_arms(
    model: Any, tokenizer: Any, assistant: Any, tuning: Tuning, past: Sequence[Recorded], fixed: Sequence[str]
) -> dict[str, Arm]:
    """Plain steps, the tuned policy, and fixed actions; each with sources of its own that know the tuning answers.

    The tuned policy has seen the tuning answers in a walk, and its costs go on learning, as in service. A fixed action
    has the one source that it drafts with, as somebody who had chosen it would.
    """
    requests = [each.request for each in past]
    costs = CostModel(tuning.table)
    policy = tuning.policy(costs)
    list(walk_policy(policy, [each.scored for each in past], tuning.setting))
    used = sorted(tuning.choice.sources)
    drafts = teach(model, new_sources(assistant, used), requests)
    arms = {OFF: Arm(model, tokenizer, None), TUNED: Arm(model, tokenizer, policy, drafts, costs=costs)}
    for name in fixed:
        one = teach(model, new_sources(assistant, [name.partition(":")[0]]), requests)
        arms[name] = Arm(model, tokenizer, fixed_policy(name), one)
    return arms


def answered(
    arms: Mapping[str, Arm], past: Sequence[Recorded], live: Sequence[Recorded], controls: Collection[str]
) -> dict[str, dict[str, Answer]]:
    """Of each request, the answer of each arm, with the noise of the recorded answer.

    Args:
        controls: ids of the requests that are controls of the tuned policy in its walk.
    """
    for arm in arms.values():
        arm.answer(past[0].request, learns=False, most_tokens=WARM_UP_TOKENS)
    found: dict[str, dict[str, Answer]] = {}
    for number, each in enumerate(tqdm(live, desc="live", unit="prompt")):
        names = [*arms]
        turned = names[number % len(names) :] + names[: number % len(names)]
        made = {}
        for name in turned if number % 2 == 0 else turned[::-1]:
            is_control = name == TUNED and each.request.request_id in controls
            made[name] = arms[name].answer(each.request, seed=each.seed, is_control=is_control)
        found[each.request.request_id] = made
    return found


def described(tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    """What ran, with what, and what tuning gave."""
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            name: getattr(options, name)
            for name in ("dtype", "temperature", "tuning", "live", "tokens", "trials", "arms", "seed", "quick")
        },
        "tuning_seconds": {name: round(value, 2) for name, value in tuning.seconds.items()},
        "host_seconds": round(tuning.setting.host_seconds, 6),
        "spread_of_calibration": round(tuning.table.spread, 4),
        "policy": tuning.choice.contents({}),
    }


def measured(
    compared: Mapping[str, Sequence[Compared]],
    confirmed: Mapping[str, Sequence[Confirmed]],
    predicted: Mapping[str, Mapping[str, Walked]],
) -> dict[str, Any]:
    """Predicted beside measured of each arm, and the tuned policy beside the best fixed action in hindsight."""
    usable = [i for i in range(len(compared[TUNED])) if all(found[i].error is None for found in compared.values())]
    seconds = {name: [found[i].seconds for i in usable] for name, found in compared.items()}
    seconds[OFF] = [compared[TUNED][i].off_seconds for i in usable]
    best = min((name for name in seconds if name != TUNED), key=lambda name: sum(seconds[name]))
    worst = min(confirmed[TUNED][:-1], key=lambda each: each.measured.ratio)
    return {
        "arms": {
            name: [asdict(each) | {"surplus": each.surplus} for each in found] for name, found in confirmed.items()
        },
        "predicted_seconds": {  # plainly and by the arm, without prefill, of all requests
            name: [round(sum(each.off_seconds for each in found), 3), round(sum(each.seconds for each in found), 3)]
            for name, found in ((name, walked.values()) for name, walked in predicted.items())
        },
        "segments": len(confirmed[TUNED]) - 1,
        "segments_within": {
            name: sum(abs(each.surplus) <= WITHIN for each in found[:-1]) for name, found in confirmed.items()
        },
        "best_fixed_in_hindsight": best,
        "tuned_over_best_fixed": asdict(speed_up(seconds[best], seconds[TUNED])),
        "worst_segment": [worst.segment, worst.measured.ratio],
    }


def plain_milliseconds(answers: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of a token after prefill, by prompt: how far the machine is from repeating itself. Args: plain answers."""
    found = []
    for each in answers:
        tokens = each["tokens"] if isinstance(each["tokens"], int) else len(each["tokens"])
        if tokens > 1:
            found.append(1000.0 * (each["seconds"] - each["prefill_seconds"]) / (tokens - 1))
    names = {"least": 0.0, "lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75, "most": 1.0}
    return {name: round(float(np.quantile(found, share)), 1) for name, share in names.items()}


def pair(model: Any, request: TrafficRequest, made: Mapping[str, Answer], name: str) -> Compared:
    """An arm's answer beside the plain one. Where they part, that of the tuned policy alone is examined."""
    off, on = made[OFF], made[name]
    try:
        kind = judge(model, request, off, on) if name == TUNED or off.tokens == on.tokens else PARTED
        return compare(request, [(off, on)], [kind])
    except AutospecError as error:
        return Compared(request, error=str(error))


def tuning_time(requests: Sequence[ScoredRequest], tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of search and choice on scores that are there: 500 requests of 128 tokens, put together of these."""
    made = replicas(requests, REPLICAS, REPLICA_TOKENS)
    sources = list(made[0].sources)
    _, seconds = search(made, replace(tuning.setting, luck=Luck(options.seed)), sources, tuning.table, options)
    return {"requests": REPLICAS, "tokens": REPLICA_TOKENS, **{name: round(each, 2) for name, each in seconds.items()}}


def replicas(requests: Sequence[ScoredRequest], count: int, tokens: int) -> list[ScoredRequest]:
    """Scores of so many requests with so long answers: those of one segment, one after the other, cut to the length.

    A draft that reaches over a joint is right up to it at most: blocks are a little shorter there, and more.
    """
    by_segment: dict[str, list[ScoredRequest]] = defaultdict(list)
    for request in requests:
        by_segment[request.segment].append(request)
    names, made = list(by_segment), []
    for number in range(count):
        group = by_segment[names[number % len(names)]]
        start, pieces = number // len(names), []
        while sum(piece.output_tokens for piece in pieces) - len(pieces) < tokens:
            pieces.append(group[(start + len(pieces)) % len(group)])
        made.append(
            replace(
                pieces[0],
                request_id=f"replica {number:05}",
                started_at=requests[0].started_at + timedelta(seconds=number),
                conversation=None,
                output_tokens=tokens,
                max_new_tokens=tokens,
                drafts={name: joined([piece.drafts[name] for piece in pieces], tokens) for name in pieces[0].drafts},
                offers={name: joined([piece.offers[name] for piece in pieces], tokens) for name in pieces[0].offers},
            )
        )
    return made


def joined(parts: Sequence[Any], tokens: int) -> Any:
    """Scores of one source; the first position of an answer, where nothing is drafted, stays at the beginning alone."""
    columns: dict[str, Any] = {}
    for each in fields(parts[0]):
        values = [getattr(part, each.name) for part in parts]
        if isinstance(values[0], tuple):
            columns[each.name] = sum((value[1:] for value in values[1:]), values[0])[:tokens]
        else:
            columns[each.name] = np.concatenate([values[0], *(value[1:] for value in values[1:])])[:tokens]
    if "num_right" in columns:
        left = np.arange(tokens, 0, -1)
        columns["num_right"] = np.minimum(columns["num_right"], left).astype(columns["num_right"].dtype)
    return type(parts[0])(**columns)


def bars(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    within, num_segments = results["segments_within"][TUNED], results["segments"]
    over, (worst, ratio) = results["tuned_over_best_fixed"]["ratio"], results["worst_segment"]
    seconds = sum(results["tuning_seconds"].values())
    found: list[tuple[str, bool, str]] = [
        (
            f"predicted within {WITHIN:.0%} of measured in five of six segments",
            within >= LEAST_SHARE_WITHIN * num_segments,
            f"in {within} of {num_segments}",
        ),
        ("tuned at least as fast as the best fixed action in hindsight", over >= 1.0, f"{over:.3f}x"),
        (f"no segment below {WORST_SEGMENT} of plain decoding", ratio >= WORST_SEGMENT, f"{worst} {ratio:.3f}x"),
        ("tuning within ten minutes", seconds <= MOST_TUNING_SECONDS, f"{seconds:.0f} s, scoring included"),
    ]
    if "tuning_time" in results:
        timed = results["tuning_time"]
        seconds = timed["search"] + timed["choice"]
        what = f"search on {timed['requests']} requests of {timed['tokens']} tokens within ten minutes"
        found.append((what, seconds <= MOST_TUNING_SECONDS, f"{seconds:.0f} s, after scoring"))
    return [{"bar": bar, "is_met": bool(is_met), "found": value} for bar, is_met, value in found]


def report(
    results: Mapping[str, Any], confirmed: Mapping[str, Sequence[Confirmed]], options: argparse.Namespace
) -> None:
    print(f"\n{options.dtype}, {f'T = {options.temperature:g}' if options.temperature else 'greedy'}")
    print("the policy:", json.dumps({key: results["policy"][key] for key in ("default", "segments")}))
    for name, rows in confirmed.items():
        every, within = rows[-1], results["segments_within"][name]
        found = f"{every.measured.ratio:.3f}x ({every.measured.low:.3f} to {every.measured.high:.3f})"
        print(
            f"{name:12} predicted {every.predicted.ratio:.3f}x, measured {found}; within {WITHIN:.0%} in {within} of "
            f"{len(rows) - 1} segments; {every.same_output} of {every.requests} answers were the plain ones"
        )
    print(f"{results['plain_answers_as_recorded']} plain answers were the recorded ones, token by token\n")
    for line in confirm_lines(confirmed[TUNED]):
        print(line)
    over = results["tuned_over_best_fixed"]
    print(
        f"tuned over {results['best_fixed_in_hindsight']}, the best fixed in hindsight: "
        f"{over['ratio']:.3f}x ({over['low']:.3f} to {over['high']:.3f})"
    )
    print("seconds of tuning:", json.dumps(results["tuning_seconds"]))
    for bar in results["bars"]:
        verdict = "not judged" if options.quick else "met" if bar["is_met"] else "MISSED"
        print(f"{verdict}: {bar['bar']}: {bar['found']}")


def write(results: Mapping[str, Any], rows: Mapping[str, Mapping[str, Answer]], options: argparse.Namespace) -> None:
    """One file for this dtype and decoding, and its main numbers beside those of others in `results.json`."""
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    live = [{name: numbers(each) for name, each in made.items()} for made in rows.values()]
    name = run_name(options)
    text = json.dumps({**results, "live": live}, indent=1)
    (options.out / f"results_{name}.json").write_text(text + "\n", encoding="utf-8")
    path = options.out / "results.json"
    every = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    every[name] = {key: value for key, value in results.items() if key not in ("arms", "policy")}
    path.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


def numbers(answer: Answer) -> dict[str, float]:
    seconds, prefill = round(answer.seconds, 5), round(answer.prefill_seconds, 5)
    return {"seconds": seconds, "prefill_seconds": prefill, "tokens": len(answer.tokens)}


if __name__ == "__main__":
    sys.exit(main())
