"""What does paired sampling cost in accepted draft tokens, against the most that any rule could accept?

    python experiments/06_paired_acceptance/run.py [--out DIR] [--prompts 12] [--new-tokens 48]

Acceptance is computed, not drawn: along answers that the target sampled, from both models' probabilities at each
position. Two pairs are also decoded for good, in both modes, and counted. Exits 1 if the formula and a simulation with
torch's own noise disagree.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from autospec import models, wrap
from autospec.caches import append, new_cache
from autospec.data import DemoPrompt, encode, interleaved, load_prompts
from autospec.deployment import device_name
from autospec.drafts import Assistant
from autospec.drafts.early_exit import first_layers_of

TARGET = "smollm2-135m"
LAYERS = (10, 15, 20, 25, 28)
BITS = (8, 4, 3, 2)
NUM_DRAFTS = len(LAYERS) + 1 + len(BITS)
BLOCK_LENGTH = 4
CONTEXT_TOKENS = 300  # at most: the last ones of each prompt
LIVE_PAIRS = ("25 layers", "4 bits")
SIMULATED_DRAWS = 100_000


class Setting(NamedTuple):
    temperature: float
    top_p: float | None

    def options(self) -> dict[str, Any]:
        """As `generate` takes them."""
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": 0}

    def probs(self, logits: Tensor) -> Tensor:
        """What is drawn from, [n, vocab_size], float64. Args: logits: [n, vocab_size]."""
        processors = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_p is not None:
            processors.append(TopPLogitsWarper(self.top_p))
        no_ids = torch.zeros((len(logits), 0), dtype=torch.long)
        return processors(no_ids, logits.float()).softmax(dim=-1).double()


SETTINGS = [Setting(temperature, top_p) for temperature in (0.7, 1.0) for top_p in (0.9, None)]
LIVE_SETTING = Setting(1.0, 0.9)


def paired_tokens(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability of each token that both models draw it from the same noise.

    `torch.multinomial` takes argmax p_x / E_x over exponential noise. Both races are won by x when E_y >= E_x * m_y for
    every other y, with m_y = max(p_y / p_x, q_y / q_x): that has probability 1 / (1 + sum of m_y over y != x), which is
    1 / sum_y m_y. With r = p / q, m_y is p_y / p_x where r_y >= r_x and q_y / q_x elsewhere, so sorting by r gives all
    the sums at once.

    Args:
        target_probs, draft_probs: [vocab_size], float64.

    Returns:
        [vocab_size]; its sum is the acceptance rate of paired sampling.
    """
    order = torch.argsort(target_probs / draft_probs, descending=True)  # 0 / 0 is nan: never drawn, wherever it lands
    p, q = target_probs[order], draft_probs[order]
    p_from_here_up = p.cumsum(dim=0)
    q_below = (q.sum() - q.cumsum(dim=0)).clamp(min=0.0)
    sums = p_from_here_up / p + q_below / q  # infinite or nan where p or q is 0
    both = torch.where((p > 0.0) & (q > 0.0), 1.0 / sums, 0.0)
    return torch.empty_like(both).scatter_(0, order, both)


class Acceptance(NamedTuple):
    """At one position of an answer."""

    maximal: float  # 1 - TV
    paired: float
    bound: float  # (1 - TV) / (1 + TV), Daliri, Musco and Suresh 2024
    maximal_of_token: float  # given the token that the target drew
    paired_of_token: float


def acceptance(target_probs: Tensor, draft_probs: Tensor, token: int) -> Acceptance:
    """Args: target_probs, draft_probs: [vocab_size], float64."""
    is_possible = (target_probs > 0.0) | (draft_probs > 0.0)
    place = int(is_possible[:token].sum())
    p, q = target_probs[is_possible], draft_probs[is_possible]
    p, q = p / p.sum(), q / q.sum()
    both = paired_tokens(p, q)
    maximal = float(torch.minimum(p, q).sum())
    p_token, q_token = float(p[place]), float(q[place])
    return Acceptance(
        maximal=maximal,
        paired=float(both.sum()),
        bound=maximal / (2.0 - maximal),
        maximal_of_token=min(1.0, q_token / p_token),
        paired_of_token=float(both[place]) / p_token,
    )


def survival(of_token: Sequence[Sequence[float]], block_length: int) -> list[float]:
    """Chance that at least j drafts of a block are accepted, j = 1 ... block_length, over all starts in all answers.

    Given the text that the target sampled, each draft token is accepted with the given probability.
    """
    products = [
        torch.tensor(answer[start : start + block_length], dtype=torch.float64).cumprod(dim=0)
        for answer in of_token
        for start in range(len(answer) - block_length + 1)
    ]
    return torch.stack(products).mean(dim=0).tolist()


def main() -> int:
    options = parse_options()
    model, tokenizer = models.load(TARGET, dtype="float32")
    prompts = list(interleaved(load_prompts()))[: options.prompts]
    results: dict[str, Any] = {
        "target": TARGET,
        "dtype": "float32",
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "block_length": BLOCK_LENGTH,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(model.device),
        "simulations": simulations(),
    }
    contexts = [encode(tokenizer, prompt, model)["input_ids"][:, -CONTEXT_TOKENS:] for prompt in prompts]
    answers = sampled_answers(model, contexts, options.new_tokens)
    results["pairs"] = pairs(model, contexts, answers)
    results["live"] = live(model, tokenizer, prompts, contexts, options.new_tokens, results["pairs"])
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_tables(results)
    return 0 if all(row["standard_errors"] < 4.0 for row in results["simulations"]) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json")
    parser.add_argument("--prompts", type=int, default=12, help="of the demonstration, of all segments in turn")
    parser.add_argument("--new-tokens", type=int, default=48)
    return parser.parse_args()


def simulations() -> list[dict[str, float]]:
    """The formula against torch's own draws from the same noise, for pairs from alike to unlike."""
    rows = []
    for seed, spread in enumerate((0.1, 0.5, 1.0, 3.0)):
        generator = torch.Generator().manual_seed(seed)
        logits = 2.0 * torch.randn(60, generator=generator, dtype=torch.float64)
        other = logits + spread * torch.randn(60, generator=generator, dtype=torch.float64)
        p, q = logits.softmax(dim=0), other.softmax(dim=0)
        drawn = [
            torch.multinomial(probs.expand(SIMULATED_DRAWS, -1), 1, generator=torch.Generator().manual_seed(100 + seed))
            for probs in (p, q)
        ]
        exact = float(paired_tokens(p, q).sum())
        simulated = float((drawn[0] == drawn[1]).double().mean())
        error = (exact * (1.0 - exact) / SIMULATED_DRAWS) ** 0.5
        rows.append(
            {
                "maximal": float(torch.minimum(p, q).sum()),
                "paired": exact,
                "simulated": simulated,
                "standard_errors": abs(simulated - exact) / error,
            }
        )
    return rows


def sampled_answers(model: Any, contexts: Sequence[Tensor], new_tokens: int) -> list[dict[Setting, Tensor]]:
    """For each prompt the target's answer under each setting, [1, new_tokens]."""
    answers: list[dict[Setting, Tensor]] = []
    for number, ids in enumerate(tqdm(contexts, desc="answers")):
        answers.append({})
        for setting in SETTINGS:
            torch.manual_seed(number)
            output = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **setting.options())
            answers[-1][setting] = output[:, ids.shape[1] :]
    return answers


def pairs(model: Any, contexts: Sequence[Tensor], answers: Sequence[dict[Setting, Tensor]]) -> list[dict[str, Any]]:
    """Acceptance of every draft under every setting."""
    target_logits = teacher_forced(model, contexts, answers)
    rows = []
    for name, draft in tqdm(drafts(model), desc="pairs", total=NUM_DRAFTS):
        draft_logits = teacher_forced(draft, contexts, answers)
        for setting in SETTINGS:
            found = [
                along(setting, target[setting], other[setting], answer[setting][0].tolist())
                for target, other, answer in zip(target_logits, draft_logits, answers, strict=True)
            ]
            rows.append({"draft": name, "temperature": setting.temperature, "top_p": setting.top_p, **summary(found)})
    return rows


def drafts(model: Any) -> Iterator[tuple[str, Any]]:
    """From poor to nearly perfect; each is dropped before the next is made."""
    for num_layers in LAYERS:
        yield f"{num_layers} layers", first_layers_of(model, num_layers)
    yield "bfloat16", copy.deepcopy(model).bfloat16()
    for bits in BITS:
        yield f"{bits} bits", rounded(model, bits)


@torch.no_grad()
def rounded(model: Any, bits: int) -> Any:
    """A copy whose linear layers have their weights rounded to so many bits, one scale for each output channel."""
    draft = copy.deepcopy(model)
    largest = 2 ** (bits - 1) - 1
    for module in draft.model.modules():
        if isinstance(module, nn.Linear):
            scale = (module.weight.abs().amax(dim=1, keepdim=True) / largest).clamp(min=1e-12)
            module.weight.copy_((module.weight / scale).round() * scale)
    return draft


@torch.no_grad()
def teacher_forced(
    model: Any, contexts: Sequence[Tensor], answers: Sequence[dict[Setting, Tensor]]
) -> list[dict[Setting, Tensor]]:
    """The logits from which each token of each answer was or would be drawn, [n, vocab_size]."""
    logits: list[dict[Setting, Tensor]] = []
    for context, by_setting in zip(contexts, answers, strict=True):
        _, cache = append(model, context[:, :-1], new_cache(model))
        logits.append({})
        for setting, answer in by_setting.items():
            tokens = torch.cat([context[:, -1:], answer[:, :-1]], dim=1)
            rows, _ = append(model, tokens, copy.deepcopy(cache), logits_kept=tokens.shape[1])
            rows[:, model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens has it
            logits[-1][setting] = rows.float()
    return logits


def along(setting: Setting, target_logits: Tensor, draft_logits: Tensor, answer: list[int]) -> list[Acceptance]:
    """Args: target_logits, draft_logits: [len(answer), vocab_size]."""
    target_probs, draft_probs = setting.probs(target_logits), setting.probs(draft_logits)
    # the answer was sampled one token at a time, this is one wide forward: a token at the edge of top-p may fall out
    rows = zip(target_probs, draft_probs, answer, strict=True)
    return [acceptance(p, q, token) for p, q, token in rows if p[token] > 0.0]


def summary(found: list[list[Acceptance]]) -> dict[str, Any]:
    """Means over all positions, and what a block of drafts would bring."""
    positions = [position for answer in found for position in answer]
    row: dict[str, Any] = {"positions": len(positions)}
    for name in ("maximal", "paired", "bound"):
        row[name] = sum(getattr(position, name) for position in positions) / len(positions)
    for name in ("maximal", "paired"):
        chances = survival([[getattr(p, f"{name}_of_token") for p in answer] for answer in found], BLOCK_LENGTH)
        row[f"{name}_accepted_per_block"] = sum(chances)
        row[f"{name}_accepted_per_judged"] = sum(chances) / (1.0 + sum(chances[:-1]))
    return row


def live(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[DemoPrompt],
    contexts: Sequence[Tensor],
    new_tokens: int,
    computed: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Two pairs in the production decoder, in both modes: what was accepted, beside what was computed."""
    rows = []
    for name, draft in drafts(model):
        if name not in LIVE_PAIRS:
            continue
        (expected,) = (
            row for row in computed if (row["draft"], row["temperature"], row["top_p"]) == (name, *LIVE_SETTING)
        )
        for sampling in ("maximal", "paired"):
            source = Assistant(draft, tokenizer=tokenizer)
            blocks = judged = accepted = 0
            policy = f"fixed:assistant:{BLOCK_LENGTH}"
            with wrap(model, tokenizer=tokenizer, drafts=[source], policy=policy, sampling=sampling) as speculator:
                for seed, ids in enumerate(tqdm(contexts, desc=f"{name}, {sampling}")):
                    torch.manual_seed(seed)
                    model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **LIVE_SETTING.options())
                    record = speculator.last_request
                    blocks += record.blocks
                    judged += record.num_judged_tokens
                    accepted += record.num_accepted_tokens
            rows.append(
                {
                    "draft": name,
                    "sampling": sampling,
                    "blocks": blocks,
                    "judged": judged,
                    "accepted": accepted,
                    "computed_accepted_per_judged": expected[f"{sampling}_accepted_per_judged"],
                }
            )
    return rows


def print_tables(results: dict[str, Any]) -> None:
    print("| maximal | paired | simulated | standard errors apart |\n|---|---|---|---|")
    for row in results["simulations"]:
        numbers = [f"{row[name]:.4f}" for name in ("maximal", "paired", "simulated")]
        print(f"| {' | '.join(numbers)} | {row['standard_errors']:.1f} |")
    print(
        "\n| draft | T | top-p | maximal | paired | bound | of 4: maximal | paired |\n|---|---|---|---|---|---|---|---|"
    )
    for row in results["pairs"]:
        rates = [f"{row[name]:.3f}" for name in ("maximal", "paired", "bound")]
        blocks = [f"{row[f'{name}_accepted_per_block']:.2f}" for name in ("maximal", "paired")]
        print(f"| {row['draft']} | {row['temperature']} | {row['top_p'] or '-'} | {' | '.join([*rates, *blocks])} |")
    print("\n| draft | sampling | accepted / judged | rate | computed |\n|---|---|---|---|---|")
    for row in results["live"]:
        print(
            f"| {row['draft']} | {row['sampling']} | {row['accepted']} / {row['judged']} "
            f"| {row['accepted'] / row['judged']:.3f} | {row['computed_accepted_per_judged']:.3f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
