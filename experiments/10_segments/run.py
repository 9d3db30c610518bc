"""What segments are worth: how built-in and learned ones agree with the true ones of Spec-Bench, and what they keep.

    python experiments/10_segments/run.py --prompts spec_bench.jsonl [--limit 20] [--new-tokens 32] [--out DIR]

The target answers prompts of six segments; draft sources are replayed along the answers. Then, again and again, the
best action of each segment is chosen on one half of the prompts and tried on the other, under a stated cost curve:
for the true segments, for the built-in ones, for learned clusters, and for one segment that holds everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import sklearn
import torch
import transformers
from common import add_prompts, need_prompts
from sklearn.metrics import adjusted_mutual_info_score
from tqdm import tqdm
from transformers import LogitsProcessorList

from autospec import models
from autospec.calls import Call
from autospec.cluster_choice import COUNTS, BlockCounts, MeasuredPrompt, best, candidates, squared_errors
from autospec.data import DemoPrompt, encode, interleaved
from autospec.deployment import describe_deployment
from autospec.drafts import Assistant, NGram, Suffix
from autospec.drafts.base import DraftRequest
from autospec.randomness import TorchRandomness
from autospec.replay import Recording, Replay
from autospec.segments import OTHER, Prompt, Rule, Segmenter
from autospec.segments.clusters import Clusters, fit_clusters, points_of
from autospec.segments.requests import RequestSegments

TARGET = "smollm2-135m"
ASSISTANT = "smollm2-135m-assistant"
RETRIEVAL_LENGTHS = (1, 2, 4, 8, 16)
ASSISTANT_LENGTHS = (1, 2, 4)
OFF = "none"
ONE, TRUE = "one segment", "true segments"
# Milliseconds of one target forward by tokens verified (drafts + 1). The first two were measured for this target on two
# threads of a CPU; in the third, which is made up, each further token costs a quarter of a plain step.
CURVES = {
    "bfloat16": {1: 38.5, 2: 38.6, 4: 39.6, 8: 42.8, 16: 52.5},
    "float32": {1: 56.0, 2: 92.0, 4: 86.0, 8: 78.0, 16: 95.0},
    "steep": {1: 40.0, 2: 50.0, 4: 70.0, 8: 110.0, 16: 190.0},
}
PRIORS = (0, 10)  # prompts
# Milliseconds of drafting: of a block, and of each token in it (experiments/09_draft_sources).
DRAFT_MS = {"ngram": (0.01, 0.0), "suffix": (0.1, 0.0), "assistant": (0.0, 4.0)}
SPLITS = 40
RESAMPLES = 2_000
FEWEST = 3  # prompts in a half from which an action of its own is chosen
LONG_PROMPT = 4096
TIMED = 300
BATCH = 10
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one action did along one answer."""

    by_drafts: dict[int, int]  # proposed tokens -> blocks
    accepted: int
    committed: int

    def seconds(self, action: str, curve: dict[int, float]) -> float:
        """Under a cost curve."""
        fixed, each = DRAFT_MS.get(action.split(":")[0], (0.0, 0.0))
        widths, ms = list(curve), list(curve.values())
        return (
            sum(
                count * (float(np.interp(drafts + 1, widths, ms)) + fixed + each * drafts)
                for drafts, count in self.by_drafts.items()
            )
            / 1000
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, its true segment, and what every action did."""

    prompt_id: str
    segment: str
    prompt: Prompt
    blocks: dict[str, Blocks]

    def measured(self) -> MeasuredPrompt:
        counts = {
            action: BlockCounts(sum(each.by_drafts.values()), each.accepted)
            for action, each in self.blocks.items()
            if action != OFF
        }
        return MeasuredPrompt(self.prompt, self.segment, counts)


Segmentation = Callable[[Case], str]


def main() -> int:
    options = parse_options()
    questions = first_turns(options.prompts)
    model, tokenizer = models.load(TARGET, dtype="float32")
    everything = [
        (q.segment, Prompt.of_ids(encode(tokenizer, q, model)["input_ids"][0].tolist(), tokenizer)) for q in questions
    ]
    cases = measure(model, tokenizer, spread(questions, options.limit), options.new_tokens, options.work)
    results = {
        "target": TARGET,
        "assistant": ASSISTANT,
        "dtype": "float32",
        "prompts": len(cases),
        "new_tokens": options.new_tokens,
        "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
        "device": describe_deployment(model, {}).device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "scikit_learn": sklearn.__version__,
        "curves_ms": CURVES,
        "draft_ms": DRAFT_MS,
        "agreement": agreement(everything, cases),
        "separation": separation(cases),
        "kept": {name: {str(prior): kept(cases, curve, prior) for prior in PRIORS} for name, curve in CURVES.items()},
        "best_by_segment": {name: best_by_segment(cases, curve) for name, curve in CURVES.items()},
        "chosen_and_tried_on_the_same": {name: on_the_same(cases, curve) for name, curve in CURVES.items()},
        "microseconds": timings(model, tokenizer, questions),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(
        json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print_tables(results)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    parser.add_argument("--limit", type=int, default=20, help="answered prompts of each segment")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--work", type=Path, help="counts of an earlier run, or where to keep them; no text is in it")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    return options


def first_turns(path: Path) -> list[DemoPrompt]:
    questions = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [
        DemoPrompt(str(q["question_id"]), q["segment"], ({"role": "user", "content": q["turns"][0]},), 1)
        for q in questions
    ]


def spread(questions: Sequence[DemoPrompt], limit: int) -> list[DemoPrompt]:
    """Of each segment so many, evenly spread over the file, segments in turn."""
    found: defaultdict[str, list[DemoPrompt]] = defaultdict(list)
    for question in questions:
        found[question.segment].append(question)
    return list(interleaved([q for each in found.values() for q in each[:: max(1, len(each) // limit)][:limit]]))


def measure(
    model: Any, tokenizer: Any, prompts: Sequence[DemoPrompt], new_tokens: int, work: Path | None
) -> list[Case]:
    """Greedy answers, and all actions along them."""
    if work is not None and work.exists():
        kept_counts = json.loads(work.read_text(encoding="utf-8"))
        return [
            Case(
                prompt.prompt_id,
                prompt.segment,
                Prompt.of_ids(encode(tokenizer, prompt, model)["input_ids"][0].tolist(), tokenizer),
                {
                    action: Blocks({int(drafts): n for drafts, n in by_drafts.items()}, accepted, committed)
                    for action, (by_drafts, accepted, committed) in kept_counts[prompt.prompt_id].items()
                },
            )
            for prompt in prompts
            if prompt.prompt_id in kept_counts
        ]
    recordings = record_in_batches(model, tokenizer, prompts, new_tokens)
    assistant = Assistant(models.load_model(ASSISTANT, dtype="float32"))
    sources = [(NGram(), RETRIEVAL_LENGTHS), (Suffix(), RETRIEVAL_LENGTHS), (assistant, ASSISTANT_LENGTHS)]
    for source, _ in sources:
        source.attach(model, tokenizer)
    cases = []
    for recording in tqdm(recordings, desc="replays"):
        steps = len(recording.answer) - 1  # the first token comes from the prompt's forward
        blocks = {OFF: Blocks({0: steps}, 0, steps)}
        for source, lengths in sources:
            for length in lengths:
                blocks[f"{source.name}:{length}"] = replayed(Replay(source, recording), length)
        prompt = Prompt.of_ids(recording.prompt, tokenizer)
        cases.append(Case(recording.prompt_id, recording.segment, prompt, blocks))
    if work is not None:
        counts = {
            case.prompt_id: {a: (b.by_drafts, b.accepted, b.committed) for a, b in case.blocks.items()}
            for case in cases
        }
        work.write_text(json.dumps(counts), encoding="utf-8")
    return cases


def replayed(replay: Replay, length: int) -> Blocks:
    outcomes = list(replay.run(length))
    return Blocks(
        dict(Counter(outcome.num_draft_tokens for outcome in outcomes)),
        sum(outcome.num_accepted_tokens for outcome in outcomes),
        sum(outcome.num_committed_tokens for outcome in outcomes),
    )


@torch.no_grad()
def record_in_batches(model: Any, tokenizer: Any, prompts: Sequence[DemoPrompt], new_tokens: int) -> list[Recording]:
    """The target's greedy answers; prompts of like length share a left-padded batch."""
    encoded = [encode(tokenizer, prompt, model)["input_ids"][0].tolist() for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    pad = model.generation_config.pad_token_id or 0
    ends = set(torch.as_tensor(model.generation_config.eos_token_id).flatten().tolist())
    request = DraftRequest(
        device=model.device,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        do_sample=False,
        processors=LogitsProcessorList(),
        randomness=TorchRandomness(model.device),
        scores_dtype=torch.float32,
        is_paired=True,
    )
    found: dict[int, Recording] = {}
    for first in tqdm(range(0, len(order), BATCH), desc="answers"):
        batch = order[first : first + BATCH]
        width = max(len(encoded[index]) for index in batch)
        rows = [[pad] * (width - len(encoded[index])) + encoded[index] for index in batch]
        mask = [[0] * (width - len(encoded[index])) + [1] * len(encoded[index]) for index in batch]
        output = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=pad,
        )
        for index, row in zip(batch, output[:, width:].tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            if length < 3:
                continue  # no block in it has room for a draft
            prompt = prompts[index]
            found[index] = Recording(
                prompt.prompt_id, prompt.segment, tuple(encoded[index]), tuple(row[:length]), new_tokens, request, ()
            )
    return [found[index] for index in sorted(found)]


def agreement(everything: Sequence[tuple[str, Prompt]], cases: Sequence[Case]) -> dict[str, Any]:
    """Adjusted mutual information and confusion with the true segments: built-in on all prompts, clusters on halves."""
    segmenter = Segmenter(builtin=True)
    truth = [segment for segment, _ in everything]
    found = [segmenter.assign(prompt).segment for _, prompt in everything]
    by_cases = [segmenter.assign(case.prompt).segment for case in cases]
    halves = []
    for known, unseen in splits(cases):
        clusters, _ = learned(known)
        names = [clusters.nearest(case.prompt) for case in unseen]
        halves.append(adjusted_mutual_info_score([case.segment for case in unseen], names))
    clusters, count = learned(cases)
    return {
        "built_in": {
            "prompts": len(truth),
            "adjusted_mutual_information": round(float(adjusted_mutual_info_score(truth, found)), 3),
            "on_answered_prompts": round(
                float(adjusted_mutual_info_score([case.segment for case in cases], by_cases)), 3
            ),
            "confusion": confusion(truth, found),
        },
        "clusters": {
            "prompts": len(cases),
            "adjusted_mutual_information_on_unseen_halves": round(statistics.fmean(halves), 3),
            "number_made_from_all": count,
            "confusion": confusion([case.segment for case in cases], [clusters.nearest(case.prompt) for case in cases]),
        },
    }


def confusion(truth: Sequence[str], found: Sequence[str]) -> dict[str, dict[str, int]]:
    table: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for true, name in zip(truth, found, strict=True):
        table[true][name] += 1
    return {true: dict(row.most_common()) for true, row in table.items()}


def splits(cases: Sequence[Case]) -> list[tuple[list[Case], list[Case]]]:
    """Halves with as many prompts of each true segment, each way round."""
    made = []
    for seed in range(SPLITS // 2):
        generator = random.Random(seed)
        sides: tuple[list[Case], list[Case]] = ([], [])
        for segment in dict.fromkeys(case.segment for case in cases):
            own = [case for case in cases if case.segment == segment]
            generator.shuffle(own)
            for place, case in enumerate(own):
                sides[place % 2].append(case)
        made += [(sides[0], sides[1]), (sides[1], sides[0])]
    return made


_learned: dict[tuple[str, ...], tuple[Clusters, int]] = {}


def learned(cases: Sequence[Case]) -> tuple[Clusters, int]:
    """Clusters of these prompts, as many as `autospec segments fit` would make; one if none is better."""
    key = tuple(case.prompt_id for case in cases)
    if key not in _learned:
        choice = best(list(candidates([case.measured() for case in cases], COUNTS)))
        count = choice.clusters if choice is not None else 1
        _learned[key] = fit_clusters(points_of([case.prompt for case in cases]), count), count
    return _learned[key]


def segmentations(clusters: Clusters) -> dict[str, Segmentation]:
    """All that are compared; the clusters are those of the known half."""
    built_in = Segmenter(builtin=True)

    def by_signs(case: Case) -> str:
        return built_in.assign(case.prompt).segment

    def by_clusters(case: Case) -> str:
        return clusters.nearest(case.prompt)

    return {
        ONE: lambda case: ONE,
        TRUE: lambda case: case.segment,
        "built-in": by_signs,
        "clusters": by_clusters,
        "built-in, then clusters": lambda case: by_clusters(case) if by_signs(case) == OTHER else by_signs(case),
    }


def separation(cases: Sequence[Case]) -> dict[str, Any]:
    """Share of the squared error of accepted tokens per block that segments take away on the unseen half."""
    measured = [case.measured() for case in cases]
    index = {case.prompt_id: place for place, case in enumerate(cases)}
    error: defaultdict[str, float] = defaultdict(float)
    base: defaultdict[str, float] = defaultdict(float)
    for known, unseen in splits(cases):
        for name, segmentation in segmentations(learned(known)[0]).items():
            labels = [segmentation(case) for case in cases]
            numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
            sides = ([index[case.prompt_id] for case in side] for side in (known, unseen))
            found = squared_errors(measured, [numbers[label] for label in labels], *sides)
            error[name] += found[0]
            base[name] += found[1]
    shares = {name: 1 - error[name] / base[name] for name in error}
    return {
        "halves": SPLITS,
        "rows": {
            name: {"separation": round(share, 3), "share_of_true": round(share / shares[TRUE], 3)}
            for name, share in shares.items()
        },
        "by_number_of_clusters": {
            str(each.clusters): round(each.separation, 3) for each in candidates(measured, COUNTS)
        },
        "numbers_chosen": dict(sorted(Counter(str(learned(known)[1]) for known, _ in splits(cases)).items())),
    }


def kept(cases: Sequence[Case], curve: dict[int, float], prior: int) -> dict[str, Any]:
    """Expected speed-up on prompts that no action was chosen on, and the share of the true segments' gain.

    Args:
        prior: a segment's seconds start at those of all known prompts, as if it had seen so many.
    """
    seconds = all_seconds(cases, curve)
    spent: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for known, unseen in splits(cases):
        for name, segmentation in segmentations(learned(known)[0]).items():
            actions, usual = chosen_actions(known, segmentation, seconds, prior)
            for case in unseen:
                spent[name][case.prompt_id].append(seconds[case.prompt_id][actions.get(segmentation(case), usual)])
    names = [case.prompt_id for case in cases]
    plain = np.asarray([seconds[name][OFF] for name in names])
    mean = {name: np.asarray([statistics.fmean(found[each]) for each in names]) for name, found in spent.items()}
    mean["each prompt's best"] = np.asarray([min(seconds[name].values()) for name in names])
    draws = np.random.default_rng(0).integers(0, len(names), (RESAMPLES, len(names)))
    gains = {}
    for name, found in mean.items():
        resampled = plain[draws].sum(axis=1) * (1 / found[draws].sum(axis=1) - 1 / mean[ONE][draws].sum(axis=1))
        low, high = np.quantile(resampled, [0.025, 0.975])
        gains[name] = (plain.sum() / found.sum() - plain.sum() / mean[ONE].sum(), float(low), float(high))
    full = gains[TRUE]
    return {
        name: {
            "speed_up": round(float(plain.sum() / mean[name].sum()), 4),
            "gain": round(float(gain), 4),
            "gain_95": [round(low, 4), round(high, 4)],
            "share_of_true_gain": round(float(gain / full[0]), 2) if full[1] > 0 else None,
        }
        for name, (gain, low, high) in gains.items()
    }


def all_seconds(cases: Sequence[Case], curve: dict[int, float]) -> dict[str, dict[str, float]]:
    """By prompt and action."""
    return {
        case.prompt_id: {action: blocks.seconds(action, curve) for action, blocks in case.blocks.items()}
        for case in cases
    }


def chosen_actions(
    known: Sequence[Case], segmentation: Segmentation, seconds: dict[str, dict[str, float]], prior: int
) -> tuple[dict[str, str], str]:
    """The best action of each segment, and that of all prompts."""
    groups: defaultdict[str, list[Case]] = defaultdict(list)
    for case in known:
        groups[segmentation(case)].append(case)
    mean = {a: statistics.fmean(seconds[case.prompt_id][a] for case in known) for a in known[0].blocks}
    actions = {
        name: min(mean, key=lambda a, own=own: prior * mean[a] + sum(seconds[c.prompt_id][a] for c in own))
        for name, own in groups.items()
        if len(own) >= FEWEST
    }
    return actions, min(mean, key=lambda a: mean[a])


def best_by_segment(cases: Sequence[Case], curve: dict[int, float]) -> dict[str, dict[str, Any]]:
    """On all answers: the best action of each true segment, and its speed-up."""
    seconds = all_seconds(cases, curve)
    rows = {}
    for segment in [*dict.fromkeys(case.segment for case in cases), "all"]:
        own = [case for case in cases if segment in ("all", case.segment)]
        action = min(own[0].blocks, key=lambda a, own=own: sum(seconds[case.prompt_id][a] for case in own))
        plain, spent = (sum(seconds[case.prompt_id][each] for case in own) for each in (OFF, action))
        rows[segment] = {"action": action, "speed_up": round(plain / spent, 3)}
    return rows


def on_the_same(cases: Sequence[Case], curve: dict[int, float]) -> dict[str, float]:
    """Speed-up of actions on the very prompts that they were chosen on: what hindsight promises."""
    seconds = all_seconds(cases, curve)
    plain = sum(seconds[case.prompt_id][OFF] for case in cases)
    rows = {}
    for name, segmentation in segmentations(learned(cases)[0]).items():
        actions, usual = chosen_actions(cases, segmentation, seconds, 0)
        spent = sum(seconds[case.prompt_id][actions.get(segmentation(case), usual)] for case in cases)
        rows[name] = round(plain / spent, 4)
    return rows


def timings(model: Any, tokenizer: Any, questions: Sequence[DemoPrompt]) -> dict[str, dict[str, float]]:
    """Microseconds to find the segment of a call with a prompt of 4,096 tokens of real text."""
    text = " ".join(q.messages[0]["content"] for q in questions if q.segment in ("rag", "summarization"))
    ids = torch.tensor([tokenizer.encode(text)[:LONG_PROMPT]])
    assert ids.shape[1] == LONG_PROMPT
    rules = [
        Rule("sql", text=r"(?i)\bselect\b.+\bfrom\b"),
        Rule("legal", text=r"(?i)\b(contract|clause|hereby|whereas)\b.{0,80}\bparty\b"),
        Rule("acme", tenant="^acme$"),
        Rule("short", max_prompt_tokens=50),
        Rule("forms", text=r"Form [A-Z]-\d{4}"),
    ]
    points = points_of([Prompt.of_text(q.messages[0]["content"]) for q in questions])
    with tempfile.TemporaryDirectory() as folder:
        fit_clusters(points, 8).save(Path(folder) / "clusters.npz")
        clusters = Clusters.load(Path(folder) / "clusters.npz")
    kinds = {
        "labels alone": Segmenter(),
        "built-in": Segmenter(builtin=True),
        "5 rules, built-in": Segmenter(rules, builtin=True),
        "8 clusters": Segmenter(clusters=clusters),
        "5 rules, 8 clusters": Segmenter(rules, clusters=clusters),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for turn in range(TIMED + 20):  # in turn, so that a slow moment of the machine touches all
        for name, segmenter in kinds.items():
            call = Call(model, (), {"input_ids": ids, "do_sample": False})
            segments = RequestSegments(segmenter)
            started, used = time.perf_counter(), time.thread_time()
            segments.of(None, call, tokenizer)
            seconds = time.perf_counter() - started, time.thread_time() - used
            if turn >= 20:
                samples[name].append(seconds)
    return {
        name: {
            f"{kind}_{what}": round(1e6 * found, 1)
            for kind, column in zip(("elapsed", "processor"), zip(*values, strict=True), strict=True)
            for what, found in (
                ("median", statistics.median(column)),
                ("95th_percentile", statistics.quantiles(column, n=20)[-1]),
            )
        }
        for name, values in samples.items()
    }


def print_tables(results: dict[str, Any]) -> None:
    for name, found in results["agreement"].items():
        print(f"\n{name}: { ({key: value for key, value in found.items() if key != 'confusion'}) }")
        columns = list(dict.fromkeys(column for row in found["confusion"].values() for column in row))
        print(f"| true | {' | '.join(columns)} |")
        for true, row in found["confusion"].items():
            print(f"| {true} | {' | '.join(str(row.get(column, 0)) for column in columns)} |")
    print("\nseparation:", results["separation"])
    for curve, priors in results["kept"].items():
        for prior, rows in priors.items():
            print(f"\n{curve}, prior of {prior} prompts")
            print("| segments | speed-up | gain | 95 % | share |\n|---|---|---|---|---|")
            for name, row in rows.items():
                share = "-" if row["share_of_true_gain"] is None else f"{row['share_of_true_gain']:.0%}"
                low, high = row["gain_95"]
                print(f"| {name} | {row['speed_up']:.3f} | {row['gain']:.3f} | {low:.3f} to {high:.3f} | {share} |")
        print({segment: tuple(row.values()) for segment, row in results["best_by_segment"][curve].items()})
    print("\non the very prompts chosen on:", results["chosen_and_tried_on_the_same"])
    print("\nmicroseconds, 4,096 tokens:", results["microseconds"])


if __name__ == "__main__":
    sys.exit(main())
