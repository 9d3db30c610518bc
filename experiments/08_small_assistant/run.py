"""Distil a small assistant for SmolLM2-135M from text that it writes itself.

    python experiments/08_small_assistant/run.py [--out DIR] [--work DIR] [--weights DIR]

Three stages: the target writes conversations, and its likeliest tokens at each position are kept; a model of three
narrow layers over its most frequent tokens learns them; acceptance is measured on prompts it never saw. Each piece of
text is a file of the work folder and is not made again when a run is started anew. Everything is seeded. About an hour
on two cores with bfloat16 matrix units.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import MistralConfig, MistralForCausalLM

from autospec import models
from autospec.caches import CACHE_KEYWORD, new_cache
from autospec.data import interleaved, load_prompts
from autospec.deployment import device_name
from autospec.draft_bench import bench
from autospec.drafts import Assistant
from autospec.drafts.vocabulary import fingerprint
from autospec.replay import record

TARGET = "smollm2-135m"
SEED = 20
FOLDER = Path(__file__).parent
WEIGHTS = FOLDER.parent.parent / "autospec" / "data" / "smollm2-135m-assistant"

# How a conversation begins; the target writes the rest of the question, the answer, and what comes after. None of it
# is in Spec-Bench or among the demonstration prompts.
STARTERS = (
    "",
    "What",
    "",
    "Summarise the text below in a few sentences.\n\n",
    "",
    "Translate into German:",
    "",
    "Write a",
    "",
    "Answer the question from the passage.\n\nPassage:",
    "",
    "How many",
    "",
    "Write a Python function that",
    "",
    "Explain",
    "",
    "Return a JSON object with",
    "",
    "Read these documents and answer the question.\n\n[1]",
)
TEMPERATURES = (0.7, 1.0)
ROWS = 48  # conversations written side by side
NEW_TOKENS = 320
SAMPLED_FROM = 50  # the likeliest tokens that text is drawn from
KEPT = 20  # of them, those that the assistant learns

VOCABULARY = 8192
SHARPNESS = 1 / 0.8  # what is learnt is the target at temperature 0.8, between greedy and plain sampling
SEQUENCE = 512
BATCH = 8
HELD_OUT = 2  # last pieces of text, for the loss curve
JUDGED_PROMPTS = 18
JUDGED_TOKENS = 48
BLOCK_LENGTH = 4
LAYOUT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "sliding_window": 256,  # no distance in use is longer than those that were trained
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Text:
    """Written text, with what the target thought of each next token."""

    tokens: Tensor  # [n]
    top_ids: Tensor  # [n, KEPT], of the target, for the token after each
    top_logprobs: Tensor  # [n, KEPT], -inf where the target was not asked

    def __len__(self) -> int:
        return len(self.tokens)


# --- the target writes ------------------------------------------------------------------------------------------------


@torch.no_grad()
def write(model: Any, tokenizer: Any, number: int) -> dict[str, Tensor]:
    """One piece of text: some conversations from the same starter, none of them ended before its time."""
    starter, temperature = STARTERS[number % len(STARTERS)], TEMPERATURES[number % len(TEMPERATURES)]
    turn = [{"role": "user", "content": "@"}]
    opening = tokenizer.apply_chat_template(turn, tokenize=False).split("@")[0] + starter
    prompt = tokenizer(opening, add_special_tokens=False, return_tensors="pt")["input_ids"]
    generator = torch.Generator().manual_seed(SEED + number)
    cache, step = new_cache(model), prompt.repeat(ROWS, 1)
    tokens, ids, logprobs = [step], [], []
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=step, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits[:, -1].float()
        top = (logits - logits.logsumexp(-1, keepdim=True)).topk(SAMPLED_FROM)
        drawn = torch.multinomial((top.values / temperature).softmax(-1), 1, generator=generator)
        step = top.indices.gather(1, drawn)
        tokens.append(step)
        ids.append(top.indices[:, :KEPT])
        logprobs.append(top.values[:, :KEPT])
    return {
        "tokens": torch.cat(tokens, 1).int(),
        "top_ids": torch.stack(ids, 1).int(),
        "top_logprobs": torch.stack(logprobs, 1).half(),
    }


def written(work: Path, pieces: int) -> list[Text]:
    """All pieces, made where they are not there yet."""
    texts: list[Text] = []
    missing = [number for number in range(pieces) if not piece(work, number).exists()]
    if missing:
        model, tokenizer = models.load(TARGET, dtype="bfloat16")
        for number in tqdm(missing, desc="text", unit="piece"):
            unfinished = piece(work, number).with_suffix(".partial")
            save_file(write(model, tokenizer, number), unfinished)
            unfinished.rename(piece(work, number))
    for number in range(pieces):
        made = load_file(piece(work, number))
        texts += [row_of(made, index) for index in range(len(made["tokens"]))]
    return texts


def piece(work: Path, number: int) -> Path:
    return work / f"text-{number:03}.safetensors"


def row_of(made: dict[str, Tensor], index: int) -> Text:
    tokens, count = made["tokens"][index].long(), made["top_ids"].shape[1]
    ids = torch.zeros((len(tokens), KEPT), dtype=torch.long)
    logprobs = torch.full((len(tokens), KEPT), -torch.inf)
    start = len(tokens) - count - 1  # the last prompt token has the first answer
    ids[start:-1], logprobs[start:-1] = made["top_ids"][index].long(), made["top_logprobs"][index].float()
    return Text(tokens, ids, logprobs)


# --- the assistant learns ---------------------------------------------------------------------------------------------


def frequent_ids(texts: list[Text], unknown: int, specials: list[int]) -> list[int]:
    """The target's ids that it expects most often, in order of id."""
    counts = torch.zeros(max(int(text.top_ids.max()) for text in texts) + 1, dtype=torch.float64)
    for text in texts:
        counts.index_add_(0, text.top_ids.flatten(), text.top_logprobs.exp().flatten().double())
    counts[torch.tensor([unknown, *specials])] = torch.inf
    return sorted(counts.topk(VOCABULARY).indices.tolist())


def new_assistant(target: Any, tokenizer: Any, ids: list[int], unknown: int) -> MistralForCausalLM:
    """Random but for its token embeddings: the target's own, on their main axes."""
    torch.manual_seed(SEED)
    known = target.config
    config = MistralConfig(
        vocab_size=len(ids),
        max_position_embeddings=known.max_position_embeddings,
        rms_norm_eps=known.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=ids.index(known.eos_token_id),
        pad_token_id=None,
        **LAYOUT,
    )
    config.target_token_ids = ids
    config.unknown_id = ids.index(unknown)
    config.tokenizer_fingerprint = fingerprint(tokenizer)
    assistant = MistralForCausalLM(config)
    rows = target.get_input_embeddings().weight.detach().float()[ids]
    axes = torch.linalg.svd(rows, full_matrices=False).Vh[: config.hidden_size]
    narrow = rows @ axes.T
    with torch.no_grad():
        assistant.get_input_embeddings().weight.copy_(narrow / narrow.std() / math.sqrt(config.hidden_size))
    return assistant


@dataclass(frozen=True)
class Lessons:
    """Sequences of own ids, with the target's distribution over them after each token."""

    inputs: Tensor  # [sequences, SEQUENCE]
    ids: Tensor  # [sequences, SEQUENCE, KEPT]
    probs: Tensor  # [sequences, SEQUENCE, KEPT]; zero in all of a position that teaches nothing
    best: Tensor  # [sequences, SEQUENCE], the target's likeliest token, -1 where it is none of the own


def lessons(texts: list[Text], ids: list[int], unknown_id: int, seed: int) -> Lessons:
    """Conversations in random order, one after another, cut into sequences."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    own = torch.full((1 + max(ids[-1], *(int(text.top_ids.max()) for text in texts)),), -1)
    own[torch.tensor(ids)] = torch.arange(len(ids))
    count = sum(map(len, texts)) // SEQUENCE

    def joined(name: str) -> Tensor:
        whole = torch.cat([getattr(texts[i], name) for i in order])[: count * SEQUENCE]
        return whole.view(count, SEQUENCE, *whole.shape[1:])

    tokens, top = own[joined("tokens")], own[joined("top_ids")]
    logprobs = (joined("top_logprobs") * SHARPNESS).masked_fill(top < 0, -torch.inf)
    is_asked = logprobs.isfinite().any(-1, keepdim=True)
    probs = torch.where(is_asked, logprobs.softmax(-1), 0.0)
    best = torch.where(joined("top_logprobs")[..., 0].isfinite(), top[..., 0], -2)
    return Lessons(tokens.where(tokens >= 0, unknown_id), top.clamp(min=0), probs, best)


def learnt(assistant: Any, lesson: Lessons) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats over all positions that teach, and the logits, [BATCH, SEQUENCE, VOCABULARY]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = assistant(input_ids=lesson.inputs, use_cache=False).logits.float()
    logprobs = logits.gather(-1, lesson.ids) - logits.logsumexp(-1, keepdim=True)
    return -(lesson.probs * logprobs).sum() / lesson.probs.sum(), logits


def taught(assistant: Any, texts: list[Text], held_out: Lessons, steps: int) -> list[dict[str, float]]:
    """Teach it. Returns: the loss curve."""
    matrices = [p for name, p in assistant.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in assistant.named_parameters() if p.dim() != 2 or "embed" in name]
    optimisers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warm = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            each, lambda step: min((step + 1) / warm, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        )
        for each in optimisers
    ]
    ids, unknown_id = assistant.config.target_token_ids, assistant.config.unknown_id
    curve: list[dict[str, float]] = []
    running: list[float] = []
    batches = endless(texts, ids, unknown_id)
    for step in tqdm(range(steps), desc="learning", unit="step"):
        assistant.train()
        loss, _ = learnt(assistant, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(assistant.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        running.append(loss.item())
        if (step + 1) % max(1, steps // 20) == 0:
            held_loss, agreement = judged(assistant, held_out)
            curve.append(
                {
                    "step": step + 1,
                    "loss": sum(running) / len(running),
                    "held_out_loss": held_loss,
                    "held_out_agreement": agreement,
                }
            )
            running.clear()
            tqdm.write(" ".join(f"{key} {value:.3f}" for key, value in curve[-1].items()))
    return curve


def endless(texts: list[Text], ids: list[int], unknown_id: int) -> Iterator[Lessons]:
    epoch = 0
    while True:
        whole = lessons(texts, ids, unknown_id, SEED + epoch)
        for start in range(0, len(whole.inputs) - BATCH + 1, BATCH):
            yield part(whole, start)
        epoch += 1


def part(whole: Lessons, start: int) -> Lessons:
    cut = slice(start, start + BATCH)
    return Lessons(whole.inputs[cut], whole.ids[cut], whole.probs[cut], whole.best[cut])


@torch.no_grad()
def judged(assistant: Any, held_out: Lessons) -> tuple[float, float]:
    """Mean loss, and the share of positions at which the likeliest token is the target's, over whole batches."""
    assistant.eval()
    starts = range(0, len(held_out.inputs) - BATCH + 1, BATCH)
    losses, shares = [], []
    for start in starts:
        lesson = part(held_out, start)
        loss, logits = learnt(assistant, lesson)
        is_asked = lesson.best > -2
        losses.append(loss.item())
        shares.append((((logits.argmax(-1) == lesson.best) & is_asked).sum() / is_asked.sum()).item())
    return statistics.fmean(losses), statistics.fmean(shares)


# --- what it brings ---------------------------------------------------------------------------------------------------


def accepted(weights: Path) -> list[dict[str, Any]]:
    """Acceptance on the demonstration prompts, greedy and sampled, by segment."""
    model, tokenizer = models.load(TARGET, dtype="bfloat16")
    assistant = Assistant(models.load_model(str(weights), dtype="bfloat16"))
    prompts = list(interleaved(load_prompts()))[:JUDGED_PROMPTS]
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 0.8):
        how = {"do_sample": temperature > 0, **({"temperature": temperature, "top_k": 0} if temperature else {})}
        recordings = list(record(model, tokenizer, prompts, how, max_new_tokens=JUDGED_TOKENS))
        (found,) = bench(model, tokenizer, recordings, [lambda: assistant], block_lengths=(BLOCK_LENGTH,))
        for row in found:
            tally = row.tally()
            rows.append(
                {
                    "temperature": temperature,
                    "segment": row.segment,
                    "blocks": tally.blocks,
                    "at_risk": tally.at_risk,
                    "accepted": tally.accepted,
                    "acceptance_length": round(row.mean_acceptance_length, 3),
                }
            )
            shares = " ".join(f"{share:.2f}" for share in row.acceptance_by_position)
            print(f"T {temperature} {row.segment}: {row.mean_acceptance_length:.2f} a block; by position {shares}")
    return rows


# --- all together -----------------------------------------------------------------------------------------------------


def main() -> int:
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    texts = written(options.work, options.pieces)
    target, tokenizer = models.load(TARGET, dtype="float32")
    teaching, kept_back = texts[: -HELD_OUT * ROWS], texts[-HELD_OUT * ROWS :]
    unknown, specials = tokenizer.convert_tokens_to_ids("<|endoftext|>"), tokenizer.all_special_ids
    ids = frequent_ids(teaching, unknown, specials)
    assistant = new_assistant(target, tokenizer, ids, unknown)
    held_out = lessons(kept_back, ids, assistant.config.unknown_id, SEED)
    started = time.perf_counter()
    curve = taught(assistant, teaching, held_out, options.steps)
    learnt_at = time.perf_counter()
    assistant.eval().half().save_pretrained(options.weights)
    (options.weights / "generation_config.json").unlink(missing_ok=True)
    (options.weights / "model.safetensors").chmod((options.weights / "config.json").stat().st_mode)
    acceptance = accepted(options.weights)
    results = {
        "target": TARGET,
        "tokens_learnt_from": sum(map(len, teaching)),
        "vocabulary": VOCABULARY,
        "covered": float((held_out.best >= 0).sum() / (held_out.best > -2).sum()),
        "parameters": sum(p.numel() for p in assistant.parameters()),
        "bytes": sum(path.stat().st_size for path in options.weights.iterdir()),
        "steps": options.steps,
        "tokens_seen": options.steps * BATCH * SEQUENCE,
        "seconds_learning": round(learnt_at - started),
        "curve": curve,
        "block_length": BLOCK_LENGTH,
        "acceptance": acceptance,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(target.device),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="the text, kept between runs")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where the assistant goes")
    parser.add_argument("--pieces", type=int, default=25, help=f"of text, each of {ROWS * NEW_TOKENS} tokens")
    parser.add_argument("--steps", type=int, default=900, help=f"each of {BATCH * SEQUENCE} tokens")
    options = parser.parse_args()
    if options.pieces <= HELD_OUT:
        parser.error(f"--pieces {options.pieces}: more than the {HELD_OUT} that are held out")
    return options


if __name__ == "__main__":
    sys.exit(main())
