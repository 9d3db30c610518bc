"""`auto` against every fixed choice and transformers' own speculation, live, on six segments of Spec-Bench.

    python experiments/15_live/run.py --prompts spec_bench.jsonl [--limit 3] [--tokens 40] [--dtypes bfloat16,float32]

Every prompt is answered by every arm before the next one, in an order that turns by one from prompt to prompt. `auto,
cold` begins with nothing learned; `auto, warm` has seen other prompts of the same segments. Each arm has draft sources
of its own, so that a pool holds what this arm has answered. Times are those of whole `generate` calls, prefill
included. Run it on an idle machine. Each dtype and decoding that is done is kept in the work file, and not done again.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import transformers
from common import DECODINGS, add_prompts, need_prompts
from tqdm import tqdm

import autospec
from autospec import models
from autospec.costs import CostModel
from autospec.costs.calibration import calibrate
from autospec.data import DemoPrompt, encode, interleaved
from autospec.deployment import device_name
from autospec.drafts import Assistant, Blend, NGram, Suffix
from autospec.policies import Fixed, Goodput, Guard, Policy
from autospec.types import Action, BlockContext, BlockOutcome

FOLDER = Path(__file__).parent
FIXED = (
    ("ngram", 4),
    ("ngram", 8),
    ("ngram", 16),
    ("suffix", 4),
    ("suffix", 8),
    ("suffix", 16),
    ("assistant", 1),
    ("assistant", 2),
    ("blend", 4),
    ("blend", 8),
)
THEIRS = (
    ("prompt_lookup", 4),
    ("prompt_lookup", 8),
    ("prompt_lookup", 16),
    ("assistant_model", 2),
    ("assistant_model", 0),
)
RESAMPLES = 2_000


class Learning:
    """A policy whose cost estimates learn from what it sees, as they do when `wrap` makes them."""

    def __init__(self, policy: Policy, costs: CostModel) -> None:
        self._policy, self._costs = policy, costs
        self.name = policy.name
        self.wants_offers = bool(getattr(policy, "wants_offers", False))
        self.verify_width = getattr(policy, "verify_width", lambda num_tokens, context_tokens: num_tokens)
        self.seconds = 0.0  # of choosing and learning

    def choose(self, context: BlockContext) -> Action:
        started = time.perf_counter()
        action = self._policy.choose(context)
        self.seconds += time.perf_counter() - started
        return action

    def observe(self, outcome: BlockOutcome) -> None:
        started = time.perf_counter()
        self._policy.observe(outcome)
        self._costs.observe(outcome)
        self.seconds += time.perf_counter() - started


@dataclass
class Arm:
    """One way to answer: `generate` with these options, under this policy if there is one."""

    name: str
    options: Mapping[str, Any]
    policy: Policy | None = None
    sources: Sequence[Any] = ()

    def answer(
        self, model: Any, tokenizer: Any, prompt: DemoPrompt, seed: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        inputs = encode(tokenizer, prompt, model)
        torch.manual_seed(seed)
        everything = {**inputs, **options, **self.options, "max_new_tokens": prompt.max_new_tokens}
        if self.policy is None:
            started = time.perf_counter()
            output = model.generate(**everything)
            seconds = time.perf_counter() - started
            return {"seconds": seconds, "tokens": output.shape[1] - inputs["input_ids"].shape[1]}
        learned = self.policy.seconds if isinstance(self.policy, Learning) else 0.0
        with autospec.wrap(
            model,
            tokenizer=tokenizer,
            drafts=self.sources,
            policy=self.policy,
            control_share=0.0,
            backend="eager",
        ) as speculator:
            started = time.perf_counter()
            output = model.generate(**everything, segment=prompt.segment)
            seconds = time.perf_counter() - started
            record = speculator.last_request
        assert record is not None
        assert record.fallback_reason is None, record.fallback_reason
        made = {
            "seconds": seconds,
            "tokens": output.shape[1] - inputs["input_ids"].shape[1],
            "blocks": record.blocks,
            "drafted": record.num_draft_tokens,
            "accepted": record.num_accepted_tokens,
            "actions": dict(record.actions),
            "other_seconds": record.seconds.other,
        }
        if isinstance(self.policy, Learning):
            made["policy_seconds"] = self.policy.seconds - learned
        return made


def sources(assistant: Any) -> list[Any]:
    """All of them, new."""
    return [NGram(), Suffix(), Assistant(assistant), Blend(Assistant(assistant), Suffix())]


def arms(assistant: Any, whole: Any, warm: Policy, costs: Callable[[], CostModel]) -> list[Arm]:
    """Every way to answer, each with draft sources of its own."""
    made = [Arm("generate", {}), Arm("off", {}, Fixed(), sources(assistant))]
    made += [
        Arm(f"{source}:{length}", {}, Fixed(source, block_length=length), sources(assistant))
        for source, length in FIXED
    ]
    for kind, length in THEIRS:
        if kind == "prompt_lookup":
            made.append(Arm(f"transformers lookup:{length}", {"prompt_lookup_num_tokens": length}))
        else:
            made.append(Arm(f"transformers assistant:{length}", {"assistant_model": with_schedule(whole, length)}))
    cold = costs()
    made.append(Arm("auto, cold", {}, Learning(Guard(Goodput(cold), cold, name="auto"), cold), sources(assistant)))
    made.append(Arm("auto, warm", {}, warm, sources(assistant)))
    return made


class WholeVocabulary(transformers.MistralForCausalLM):
    """The packaged assistant under the target's ids, as transformers' assisted generation wants it."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(self.ids_of[input_ids], **kwargs)
        whole = outputs.logits.new_full((*outputs.logits.shape[:-1], self.config.vocab_size), -torch.inf)
        whole[..., self.target_ids] = outputs.logits
        whole[..., self.target_ids[self.config.unknown_id]] = -torch.inf
        outputs.logits = whole
        return outputs


def whole_vocabulary(assistant: Any, vocab_size: int) -> Any:
    """A copy that takes and gives the target's ids; what the assistant does not know has probability 0."""
    whole = copy.deepcopy(assistant)
    whole.__class__ = WholeVocabulary
    whole.target_ids = torch.tensor(whole.config.target_token_ids)
    whole.ids_of = torch.full((vocab_size,), whole.config.unknown_id)
    whole.ids_of[whole.target_ids] = torch.arange(len(whole.target_ids))
    whole.config.vocab_size = vocab_size
    return whole


def with_schedule(whole: Any, length: int) -> Any:
    """The same weights, asked for so many tokens in each block. Args: length: 0: as transformers has it by default."""
    made = copy.copy(whole)
    made.generation_config = copy.deepcopy(whole.generation_config)
    if length:
        made.generation_config.num_assistant_tokens = length
        made.generation_config.num_assistant_tokens_schedule = "constant"
        made.generation_config.assistant_confidence_threshold = 0.0
    return made


def first_turns(path: Path, limit: int, tokens: int, *, skip: int = 0) -> list[DemoPrompt]:
    """So many prompts of each segment, evenly spread over the file. Args: skip: how far the choice is moved on."""
    found: dict[str, list[DemoPrompt]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        message = {"role": "user", "content": row["turns"][0]}
        found[row["segment"]].append(DemoPrompt(str(row["question_id"]), row["segment"], (message,), tokens))
    spread = [rows[int(i * len(rows) / limit) + skip] for rows in found.values() for i in range(limit)]
    return list(interleaved(spread))


def run(options: argparse.Namespace, dtype: str, decoding: str) -> Iterator[dict[str, Any]]:
    """All answers of one dtype and decoding, as they come."""
    model, tokenizer = models.load("smollm2-135m", dtype=dtype)
    assistant = models.load_model("smollm2-135m-assistant", dtype=dtype)
    whole = whole_vocabulary(assistant, model.config.vocab_size)
    attached = sources(assistant)
    for source in attached:
        source.attach(model, tokenizer)
    table = calibrate(model, {source.name: source for source in attached})
    costs = CostModel(table)
    warm = Learning(Guard(Goodput(costs), costs, name="auto"), costs)
    rehearsal = Arm("rehearsal", {}, warm, attached)
    others = first_turns(options.prompts, options.rehearse, options.tokens, skip=1)
    for number, prompt in enumerate(tqdm(others, desc=f"{dtype}, {decoding}: other prompts")):
        rehearsal.answer(model, tokenizer, prompt, 1_000 + number, DECODINGS[decoding])
    every = arms(assistant, whole, warm, lambda: CostModel(table))
    wanted = {"off", *options.arms.split(";")}
    every = [arm for arm in every if not options.arms or arm.name in wanted]
    prompts = first_turns(options.prompts, options.limit, options.tokens)
    if clash := {prompt.prompt_id for prompt in prompts} & {prompt.prompt_id for prompt in others}:
        raise SystemExit(f"prompts {sorted(clash)} would be known before they are asked: other --limit or --rehearse")
    for arm in every:  # first calls allocate; with a prompt that is not asked later, as a pool would know its answer
        if arm.policy is None or isinstance(arm.policy, Fixed):
            arm.answer(model, tokenizer, others[0], 0, DECODINGS[decoding])
    for number, prompt in enumerate(tqdm(prompts, desc=f"{dtype}, {decoding}")):
        turned = every[number % len(every) :] + every[: number % len(every)]
        for arm in turned if number % 2 == 0 else turned[::-1]:
            made = arm.answer(model, tokenizer, prompt, number, DECODINGS[decoding])
            yield {
                "dtype": dtype,
                "decoding": decoding,
                "prompt": prompt.prompt_id,
                "segment": prompt.segment,
                "arm": arm.name,
                **made,
            }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups over `off`, seconds per token of all prompts; intervals by resampling prompts."""
    by_arm: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_arm[row["arm"]][row["prompt"]] = row
    prompts = list(by_arm["off"])
    segments = list(dict.fromkeys(row["segment"] for row in rows))
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(prompts), (RESAMPLES, len(prompts)))

    def per_token(arm: str, chosen: Sequence[str]) -> float:
        return sum(by_arm[arm][p]["seconds"] for p in chosen) / sum(by_arm[arm][p]["tokens"] for p in chosen)

    def ratio(arm: str, other: str) -> list[float]:
        """How many times faster, and its 95 % interval."""
        cells = np.array([[by_arm[a][p][k] for p in prompts] for a in (other, arm) for k in ("seconds", "tokens")])
        sums = cells[:, picks].sum(axis=2)
        drawn = (sums[0] / sums[1]) / (sums[2] / sums[3])
        low, high = np.quantile(drawn, [0.025, 0.975])
        return [round(float(v), 3) for v in (per_token(other, prompts) / per_token(arm, prompts), low, high)]

    fixed = [arm for arm in (f"{source}:{length}" for source, length in FIXED) if arm in by_arm]
    in_segment = {segment: [p for p in prompts if by_arm["off"][p]["segment"] == segment] for segment in segments}
    best = {s: min(["off", *fixed], key=lambda arm, s=s: per_token(arm, in_segment[s])) for s in segments}
    hindsight = sum(by_arm[best[s]][p]["seconds"] for s in segments for p in in_segment[s])
    best_fixed = min(fixed, key=lambda arm: per_token(arm, prompts))
    theirs = [arm for arm in by_arm if arm.startswith("transformers")]
    their_best = min(theirs or ["off"], key=lambda arm: per_token(arm, prompts))
    result: dict[str, Any] = {
        "speed_up_over_off": {arm: ratio(arm, "off") for arm in by_arm},
        "by_segment": {
            s: {arm: round(per_token("off", in_segment[s]) / per_token(arm, in_segment[s]), 3) for arm in by_arm}
            for s in segments
        },
        "best_fixed": best_fixed,
        "best_fixed_by_segment": best,
        "best_of_transformers": their_best,
    }
    for arm in ("auto, cold", "auto, warm"):
        seconds = sum(by_arm[arm][p]["seconds"] for p in prompts)
        result[arm] = {
            "over_hindsight_by_segment": round(hindsight / seconds, 3),
            "over_best_fixed": ratio(arm, best_fixed),
            "over_best_of_transformers": ratio(arm, their_best),
            "worst_segment_over_off": min(
                (round(per_token("off", in_segment[s]) / per_token(arm, in_segment[s]), 3), s) for s in segments
            ),
            "policy_share_of_seconds": round(sum(by_arm[arm][p]["policy_seconds"] for p in prompts) / seconds, 4),
            "actions": dict(sum((Counter(by_arm[arm][p]["actions"]) for p in prompts), Counter())),
            "other_seconds": round(sum(by_arm[arm][p].get("other_seconds", 0.0) for p in prompts), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each segment")
    parser.add_argument("--rehearse", type=int, default=7, help="prompts of each segment that warm `auto` has seen")
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--arms", default="", help="only these, separated by semicolons, and `off`")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--work", type=Path, default=Path("live.jsonl"), help="what is done, line by line")
    options = parser.parse_args()
    need_prompts(parser, options.prompts)
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    results: dict[str, Any] = {
        "machine": machine,
        "limit": options.limit,
        "rehearsed": options.rehearse,
        "tokens": options.tokens,
        "results": {},
    }
    done = [json.loads(line) for line in options.work.read_text().splitlines()] if options.work.exists() else []
    for dtype in options.dtypes.split(","):
        for decoding in DECODINGS:
            rows = [row for row in done if (row["dtype"], row["decoding"]) == (dtype, decoding)]
            if not any(row.get("is_last") for row in rows):
                rows = []
                for row in run(options, dtype, decoding):
                    rows.append(row)
                    results["device"] = device_name(torch.device("cpu"))
                rows[-1]["is_last"] = True
                with options.work.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            results["results"][f"{dtype}, {decoding}"] = found = summary(rows)
            print(f"\n{dtype}, {decoding}\n{json.dumps(found, indent=1)}", flush=True)
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
