"""What verifying one block costs, in microseconds, beside transformers' assisted verification of the same tensors.

    python experiments/07_verification/run.py [--out DIR] [--device cpu] [--repeats 31]

Timed is all work on the vocabulary and the host from the target's logits to the committed tokens: number format,
logits processors, accepting, recovering, stopping. No forward is in it. Sides alternate within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import _speculative_sampling

from autospec.decoding.answer import Answer
from autospec.decoding.selection import make_rule
from autospec.decoding.tokens import Tokens
from autospec.decoding.verification import Verification
from autospec.deployment import device_name
from autospec.drafts import Proposal
from autospec.randomness import TorchRandomness

VOCABULARIES = (49_152, 151_936)
BLOCK_LENGTHS = (1, 4, 8, 16)
ACCEPTED = ("none", "half", "all")
PROMPT_TOKENS = 512
EOS = 2


@dataclass(frozen=True)
class Kind:
    """A way to decode: what is drafted, and how the target chooses."""

    name: str
    do_sample: bool
    sampling: str
    is_drawn: bool
    processors: tuple[str, ...] = ()


KINDS = (
    Kind("greedy", do_sample=False, sampling="paired", is_drawn=False),
    Kind("greedy, repetition penalty", False, "paired", False, ("repetition",)),
    Kind("T, top-k; one-hot", True, "paired", False, ("temperature", "top_k")),
    Kind("T, top-k; drawn, paired", True, "paired", True, ("temperature", "top_k")),
    Kind("T, top-k; drawn, maximal", True, "maximal", True, ("temperature", "top_k")),
    Kind("T, top-k, top-p; one-hot", True, "paired", False, ("temperature", "top_k", "top_p")),
    Kind("T, top-k, top-p; drawn, maximal", True, "maximal", True, ("temperature", "top_k", "top_p")),
)

PROCESSORS: dict[str, Callable[[], Any]] = {
    "repetition": lambda: transformers.RepetitionPenaltyLogitsProcessor(1.1),
    "temperature": lambda: transformers.TemperatureLogitsWarper(0.7),
    "top_k": lambda: transformers.TopKLogitsWarper(50),
    "top_p": lambda: transformers.TopPLogitsWarper(0.9),
}


@dataclass(frozen=True)
class Block:
    """One block to verify, the same for both sides."""

    prompt: Tensor  # [1, n]
    logits: Tensor  # [k + 1, vocab_size], bfloat16
    draft_tokens: list[int]  # [k]
    draft_scores: Tensor  # [k, vocab_size], processed
    processors: LogitsProcessorList


@dataclass(frozen=True)
class Row:
    """Medians in microseconds, and the ratio peer / ours with its 95 % interval."""

    kind: str
    vocab_size: int
    block_length: int
    accepted: str
    ours_us: float
    peer_us: float
    ratio: float
    low: float
    high: float


def make_block(kind: Kind, vocab_size: int, block_length: int, accepted: str, device: torch.device) -> Block:
    """Peaked logits, so that a draft token at the peak is accepted and one elsewhere is not."""
    generator = torch.Generator().manual_seed(vocab_size + block_length)
    logits = torch.randn(block_length + 1, vocab_size, generator=generator) * 2.0
    peaks = torch.randint(EOS + 1, vocab_size, (block_length + 1,), generator=generator)
    logits[torch.arange(block_length + 1), peaks] = 40.0
    right = {"none": 0, "half": block_length // 2, "all": block_length}[accepted]
    drafts = [int(t) if i < right else (int(t) + 1) % vocab_size for i, t in enumerate(peaks[:block_length])]
    draft_scores = torch.full((block_length, vocab_size), -torch.inf)
    draft_scores[torch.arange(block_length), torch.tensor(drafts)] = 5.0
    draft_scores[:, 3:60] = 0.0
    prompt = torch.randint(EOS + 1, vocab_size, (1, PROMPT_TOKENS), generator=generator)
    processors = LogitsProcessorList([PROCESSORS[name]() for name in kind.processors])
    return Block(prompt.to(device), logits.to(device, torch.bfloat16), drafts, draft_scores.to(device), processors)


def ours(kind: Kind, block: Block) -> Callable[[], list[int]]:
    """Prepare a request; returns what is timed."""
    tokens = Tokens(block.prompt)
    answer = Answer(tokens, _criteria(block), GenerationConfig(), None)
    rule = make_rule(do_sample=kind.do_sample, sampling=kind.sampling, randomness=TorchRandomness(tokens.device))
    verification = Verification(answer, block.processors, rule, [], torch.float32)
    drawn = block.draft_scores.softmax(dim=-1) if kind.is_drawn and kind.sampling == "maximal" else None
    proposal = Proposal(block.draft_tokens, drawn)

    def verify() -> list[int]:
        verification.run(block.logits, proposal, tokens.followed_by(block.draft_tokens))
        return tokens.on_host[0, PROMPT_TOKENS:].tolist()

    return verify


def peer(kind: Kind, block: Block) -> Callable[[], list[int]]:
    """The steps of transformers' assisted decoding between a forward and the next, with its own functions."""
    drafted = torch.tensor([block.draft_tokens], device=block.prompt.device)
    ids = torch.cat([block.prompt, drafted], dim=-1)
    criteria, eos = _criteria(block), torch.tensor([EOS], device=ids.device)
    num_drafts = len(block.draft_tokens)
    logits, draft_scores = block.logits[None], block.draft_scores[None] if kind.is_drawn else None

    def verify() -> list[int]:
        scores = logits.to(dtype=torch.float32)
        kept = scores.clone()  # it keeps the unprocessed ones in any case
        for i in range(num_drafts + 1) if block.processors else ():
            scores[:, i, :] = block.processors(ids[:, : PROMPT_TOKENS + i], scores[:, i, :])
        if draft_scores is not None:
            chosen, _ = _speculative_sampling(ids, draft_scores, num_drafts, scores)
        else:
            chosen = (
                torch.multinomial(scores.softmax(dim=-1)[0], num_samples=1).T
                if kind.do_sample
                else scores.argmax(dim=-1)
            )
            num_equal = (chosen[:, :-1] == drafted).long().cumprod(dim=-1).sum()
            chosen = chosen[:, : num_equal + 1]
        ends = torch.isin(chosen[0], eos).nonzero()
        if ends.numel():
            chosen = chosen[:, : int(ends[0]) + 1]
        answer = torch.cat([block.prompt, chosen], dim=-1)
        bool(criteria(answer, None).all())
        del kept
        return answer[0, PROMPT_TOKENS:].tolist()

    return verify


def _criteria(block: Block) -> StoppingCriteriaList:
    eos = EosTokenCriteria(torch.tensor([EOS], device=block.prompt.device))
    return StoppingCriteriaList([MaxLengthCriteria(PROMPT_TOKENS + 1000), eos])


def measure(kind: Kind, block: Block, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds of each side, in alternating order. The tokens must agree."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 3):
        sides = [(0, ours(kind, block)), (1, peer(kind, block))]
        tokens = {}
        for index, verify in sides if repeat % 2 else reversed(sides):
            _wait(block.logits.device)
            started = time.perf_counter()
            tokens[index] = verify()
            if repeat >= 3:
                seconds[index].append((time.perf_counter() - started) * 1e6)
        if tokens[0] != tokens[1]:
            raise RuntimeError(f"{kind.name}: the sides chose different tokens, {tokens}")
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(kind: Kind, block: Block, accepted: str, mine: list[float], peers: list[float]) -> Row:
    generator = np.random.default_rng(0)
    ratios = np.asarray(peers) / np.asarray(mine)  # of neighbours in time
    draws = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    return Row(
        kind=kind.name,
        vocab_size=block.logits.shape[1],
        block_length=len(block.draft_tokens),
        accepted=accepted,
        ours_us=statistics.median(mine),
        peer_us=statistics.median(peers),
        ratio=float(np.median(ratios)),
        low=float(np.quantile(draws, 0.025)),
        high=float(np.quantile(draws, 0.975)),
    )


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    for kind, vocab_size, block_length, accepted in product(KINDS, VOCABULARIES, BLOCK_LENGTHS, ACCEPTED):
        if accepted == "half" and block_length == 1:
            continue
        block = make_block(kind, vocab_size, block_length, accepted, device)
        yield summarise(kind, block, accepted, *measure(kind, block, repeats))


def costs_by_row(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Microseconds for each row when 1, 2, 5, 9 or 17 rows are processed together."""
    found = []
    made = {**PROCESSORS, "min_p": lambda: transformers.MinPLogitsWarper(0.1)}
    ids = torch.zeros((1, PROMPT_TOKENS), dtype=torch.long, device=device)
    for vocab_size, name in product(VOCABULARIES, made):
        processor, entry = made[name](), {}
        for count in (1, 2, 5, 9, 17):
            prefixes = ids.expand(count, -1)  # the repetition penalty wants a prefix for each row
            scores = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0)).to(device) * 3
            microseconds = []
            for _ in range(repeats):
                _wait(device)
                started = time.perf_counter()
                processor(prefixes, scores)
                _wait(device)
                microseconds.append((time.perf_counter() - started) * 1e6 / count)
            entry[str(count)] = statistics.median(microseconds)
        found.append({"processor": name, "vocab_size": vocab_size, "us_per_row": entry})
    return found


def print_costs(found: list[dict[str, Any]]) -> None:
    print(f"\n{'us for each row of':20}{'vocab':>8}" + "".join(f"{n:>9}" for n in found[0]["us_per_row"]))
    for entry in found:
        costs = "".join(f"{us:>9.0f}" for us in entry["us_per_row"].values())
        print(f"{entry['processor']:20}{entry['vocab_size']:>8}{costs}")


def print_rows(found: list[Row]) -> None:
    print(f"{'':34}{'vocab':>8}{'k':>4}{'accepted':>10}{'ours us':>10}{'peer us':>10}{'ratio':>8}{'95 %':>16}")
    for row in found:
        interval = f"{row.low:.2f} to {row.high:.2f}"
        print(
            f"{row.kind:34}{row.vocab_size:>8}{row.block_length:>4}{row.accepted:>10}{row.ours_us:>10.0f}"
            f"{row.peer_us:>10.0f}{row.ratio:>8.2f}{interval:>16}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    device = torch.device(options.device)
    found = []
    with torch.inference_mode():
        for row in tqdm(rows(device, options.repeats), total=len(KINDS) * len(VOCABULARIES) * (3 * 4 - 1)):
            found.append(row)
        costs = costs_by_row(device, options.repeats)
    print_rows(found)
    print_costs(costs)
    results = {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "repeats": options.repeats,
        "rows": [asdict(row) for row in found],
        "costs_by_row": costs,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
