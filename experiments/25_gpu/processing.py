"""Logits processors over a block in one call each, as accelerators do it, against one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from exactness import Check
from torch import Tensor
from transformers import LogitsProcessorList

from autospec.decoding.processors import BlockProcessors
from autospec.decoding.selection import Greedy, Paired, target_probs
from autospec.randomness import TorchRandomness

MADE: dict[str, Callable[[torch.device], list[Any]]] = {
    "temperature": lambda device: [transformers.TemperatureLogitsWarper(0.7)],
    "top_k": lambda device: [transformers.TopKLogitsWarper(50)],
    "top_p": lambda device: [transformers.TopPLogitsWarper(0.9)],
    "min_p": lambda device: [transformers.MinPLogitsWarper(0.1)],
    "typical": lambda device: [transformers.TypicalLogitsWarper(0.9)],
    "epsilon": lambda device: [transformers.EpsilonLogitsWarper(3e-4)],
    "eta": lambda device: [transformers.EtaLogitsWarper(3e-4, device=str(device))],
    "repetition": lambda device: [transformers.RepetitionPenaltyLogitsProcessor(1.1)],
    "temperature, top_k, top_p": lambda device: [
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(50),
        transformers.TopPLogitsWarper(0.9),
    ],
}
BLOCK_LENGTH = 8
PROMPT_TOKENS = 64


def compare(device: torch.device, vocab_sizes: tuple[int, ...], repeats: int = 4) -> list[dict[str, Any]]:
    """One row for each processor and vocabulary.

    The logits are such as bfloat16 gives: many of them are equal, so that cuts go through ties. One row less than a
    block has is among them, too, as kernels may choose their ways by the number of rows.
    """
    found = []
    for vocab_size in vocab_sizes:
        for name, make in MADE.items():
            row = {"processor": name, "vocab_size": vocab_size, "blocks": 0, "same_bits": 0, "same_probs": 0}
            row |= {"same_greedy": 0, "same_drawn": 0, "largest_change": 0.0}
            for repeat in range(repeats):
                _add(row, LogitsProcessorList(make(device)), _block(device, vocab_size, repeat), seed=repeat)
            found.append(row)
    return found


def checks(found: list[dict[str, Any]]) -> Iterator[Check]:
    blocks = sum(row["blocks"] for row in found)
    for key, text in (("same_greedy", "likeliest"), ("same_drawn", "drawn")):
        same = sum(row[key] for row in found)
        yield Check(f"processors, block against rows: same {text} tokens", same == blocks > 0, f"{same} of {blocks}")


def _block(device: torch.device, vocab_size: int, repeat: int) -> tuple[Tensor, Tensor]:
    """Ids, [1, m + n - 1], and scores, [n, vocab_size], float32."""
    generator = torch.Generator().manual_seed(repeat)
    num_rows = BLOCK_LENGTH + 1 - repeat % 2
    logits = 3.0 * torch.randn((num_rows, vocab_size), generator=generator)
    ids = torch.randint(0, vocab_size, (1, PROMPT_TOKENS + num_rows - 1), generator=generator)
    return ids.to(device), logits.to(device, torch.bfloat16).float()


def _add(row: dict[str, Any], processors: LogitsProcessorList, block: tuple[Tensor, Tensor], seed: int) -> None:
    ids, raw = block
    together = _together(BlockProcessors(processors, raw.device), ids, raw.clone())
    committed = ids.shape[1] - len(raw) + 1
    single = torch.cat([processors(ids[:, : committed + i], raw[i : i + 1].clone()) for i in range(len(raw))])
    is_finite = torch.isfinite(together) & torch.isfinite(single)
    change = (together - single).abs()[is_finite]
    probs = torch.cat([target_probs(single[i : i + 1]) for i in range(len(raw))])
    row["blocks"] += 1
    row["same_bits"] += torch.equal(together, single)
    row["same_probs"] += torch.equal(target_probs(together), probs)
    row["same_greedy"] += _greedy(together) == _greedy(single)
    row["same_drawn"] += _drawn(together, seed) == _drawn(single, seed)
    row["largest_change"] = max(row["largest_change"], float(change.max()) if len(change) else 0.0)


def _together(processors: BlockProcessors, ids: Tensor, scores: Tensor) -> Tensor:
    """As verification calls them."""
    scores = processors.first_stage(ids, scores)
    if processors.num_together is None:
        return scores
    step, committed = processors.num_together, ids.shape[1] - len(scores) + 1
    parts = [slice(start, min(start + step, len(scores))) for start in range(0, len(scores), step)]
    return torch.cat([processors.second_stage(ids[:, : committed + p.stop - 1], scores[p]) for p in parts])


def _greedy(scores: Tensor) -> list[int]:
    likeliest: list[int] = scores.argmax(dim=-1).tolist()
    return Greedy().select(scores, likeliest[:-1], None).tokens


def _drawn(scores: Tensor, seed: int) -> list[int]:
    """All positions: each row's own draw is what was drafted."""
    noise = TorchRandomness(scores.device, torch.Generator(scores.device).manual_seed(seed))
    drafts: list[int] = []
    while len(drafts) < len(scores):
        drafts = Paired(noise.fork()).select(scores, drafts, None).tokens
    return drafts
