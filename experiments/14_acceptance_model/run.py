"""Is the acceptance model calibrated? Offers along real answers, each predicted before it is judged.

    python experiments/14_acceptance_model/run.py --prompts spec_bench.jsonl [--limit 10] [--tokens 48] [--work FILE]

The target answers every prompt greedily and sampled, in mixed order. Policy `goodput` then walks along the answers as
it would decode them; what the acceptance model says of every offer is written down before the model learns what became
of it. Nothing is timed, so that the machine need not be idle.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from common import DECODINGS, add_prompts, need_prompts
from tqdm import tqdm
from transformers import LogitsProcessorList

from autospec import models
from autospec.data import DemoPrompt, interleaved
from autospec.decoding.offers import Offers
from autospec.drafts import Assistant, NGram, Suffix
from autospec.drafts.base import DraftRequest
from autospec.policies import Goodput
from autospec.policies.acceptance import AcceptanceModel
from autospec.policies.stopping import MarginalStop
from autospec.randomness import TorchRandomness
from autospec.replay import record
from autospec.types import Action, BlockContext, BlockOutcome, OfferOutcome, RequestContext

FOLDER = Path(__file__).parent
SEGMENTS = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag")
MOST = 16
DRAFTED = 4
"""Tokens that the model draft is asked for at each block."""


@dataclass(frozen=True)
class Costs:
    """A two-core processor in bfloat16, SmolLM2-135M: verifying eight tokens costs 1.1 times one."""

    block_lengths: tuple[int, ...] = (1, 2, 4, 8, 16)
    version: int = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return float(np.interp(num_tokens, [1, 2, 4, 8, 16], [38.5e-3, 38.6e-3, 39.6e-3, 42.8e-3, 52.5e-3]))

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 1e-4

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


@dataclass(frozen=True)
class Judged:
    """One draft position of one offer."""

    source: str
    segment: str
    kind: str
    position: int
    expected: float  # with what is known of the offer
    expected_without: float  # from segment, source and position alone
    is_right: bool


@dataclass(frozen=True)
class Answer:
    """An answer of the target, and what the sources are told of its request."""

    kind: str
    segment: str
    prompt: list[int]
    answer: list[int]
    request: DraftRequest


def answers(arguments: argparse.Namespace) -> list[Answer]:
    """Greedy and sampled answers in turn; those in the work file are taken from it."""
    if arguments.work is not None and arguments.work.exists():
        rows = [json.loads(line) for line in arguments.work.read_text(encoding="utf-8").splitlines()]
    else:
        model, tokenizer = models.load("smollm2-135m", dtype=arguments.dtype)
        prompts = first_turns(arguments.prompts, arguments.limit, arguments.tokens, arguments.skip)
        made = {
            kind: record(model, tokenizer, prompts, options, max_new_tokens=arguments.tokens)
            for kind, options in DECODINGS.items()
        }
        by_kind = {kind: list(tqdm(each, total=len(prompts), desc=kind)) for kind, each in made.items()}
        rows = [
            {
                "kind": kind,
                "segment": each.segment,
                "prompt": each.prompt,
                "answer": each.answer,
                "vocab_size": each.request.vocab_size,
            }
            for pair in zip(*by_kind.values(), strict=True)
            for kind, each in zip(by_kind, pair, strict=True)
        ]
        if arguments.work is not None:
            arguments.work.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        Answer(row["kind"], row["segment"], list(row["prompt"]), list(row["answer"]), _request(row)) for row in rows
    ]


def _request(row: dict[str, Any]) -> DraftRequest:
    device = torch.device("cpu")
    return DraftRequest(
        device=device,
        vocab_size=row["vocab_size"],
        do_sample=DECODINGS[row["kind"]]["do_sample"],
        processors=LogitsProcessorList(),
        randomness=TorchRandomness(device),
        scores_dtype=torch.float32,
        is_paired=True,
        segment=row["segment"],
    )


def walk(recordings: Sequence[Answer], assistant: Any) -> Iterator[Judged]:
    """One pass over all answers, in order, with one policy and one pool of earlier answers.

    Args:
        assistant: asked besides at every block, for a few tokens whose margin and entropy are looked at.
    """
    sources = {"ngram": NGram(), "suffix": Suffix()}
    acceptance = AcceptanceModel(discount=0.99, prior_acceptance=0.5)
    policy = Goodput(Costs(), acceptance=acceptance)
    for recording in recordings:
        kind = recording.kind
        temperature = 0.8 if recording.request.do_sample else 0.0
        request = RequestContext(
            recording.segment,
            len(recording.prompt),
            len(recording.answer),
            temperature > 0,
            tuple(sources),
            temperature,
        )
        sessions = {name: source.start(recording.request) for name, source in sources.items()}
        drafting = assistant.start(recording.request)
        offers, text = Offers(), [*recording.prompt, recording.answer[0]]
        expected: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
        while (done := len(text) - len(recording.prompt)) < len(recording.answer):
            room = min(MOST, len(recording.answer) - done - 1)
            proposals = {name: s.propose(text, room) for name, s in sessions.items()} if room > 0 else {}
            offered = {name: offers.add(name, made, len(text), done) for name, made in proposals.items()}
            context = BlockContext(request, len(text), done, tuple(sources), offered)
            for name, offer in offered.items():
                if offer.num_tokens:
                    plain = acceptance.survival(recording.segment, name, offer.num_tokens)
                    expected[name, done] = (acceptance.offer_survival(context, name), plain)
            if room > 0:
                yield from _drafted(drafting, acceptance, request, kind, text, recording.answer[done:], room)
            action = policy.choose(context)
            draft = proposals[action.source].tokens[: action.block_length] if action.block_length else []
            following = recording.answer[done:]
            accepted = next((i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b), len(draft))
            committed = min(accepted + 1, len(following))
            text.extend(following[:committed])
            settled = offers.settle(text, is_finished=done + committed >= len(recording.answer))
            for each in settled:
                if (each.source, each.output_tokens) in expected:
                    yield from _judged(each, kind, recording.segment, *expected[each.source, each.output_tokens])
            policy.observe(
                BlockOutcome(
                    recording.segment,
                    action,
                    context.context_tokens,
                    len(draft),
                    min(committed, len(draft)),
                    min(accepted, len(following)),
                    committed,
                    request=request,
                    offers=settled,
                )
            )
        sources["suffix"].learn(recording.request, recording.answer)


def _drafted(
    session: Any,
    acceptance: AcceptanceModel,
    request: RequestContext,
    kind: str,
    text: Sequence[int],
    following: Sequence[int],
    room: int,
) -> Iterator[Judged]:
    """What is thought of each token of a model draft, from q there before it was drawn, and what became of it."""
    length, segment, output = min(DRAFTED, room), request.segment, len(text) - request.prompt_tokens
    plain = acceptance.rates(segment, "assistant", length)
    confident = acceptance.confident(segment, "assistant", request.temperature, output, length)
    watching = MarginalStop(plain, confident, [0.0] * (length + 1), [0.0] * (length + 1), rate=0.0)
    proposal = session.propose(text, length, stop=watching)
    draft = proposal.tokens
    accepted = next((i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b), len(draft))
    judged = min(accepted + 1, len(draft))
    for j, (margin, entropy) in enumerate(proposal.confidences[:judged]):
        yield Judged("assistant", segment, kind, j + 1, confident(j, margin, entropy), plain[j], j < accepted)
    acceptance.add(
        BlockOutcome(
            segment,
            Action("assistant", length),
            len(text),
            len(draft),
            judged,
            accepted,
            accepted + 1,
            request=request,
            confidences=tuple(proposal.confidences),
        )
    )


def _judged(
    each: OfferOutcome, kind: str, segment: str, with_offer: np.ndarray, without: np.ndarray
) -> Iterator[Judged]:
    before = before_without = 1.0
    for j in range(each.num_judged_tokens):
        if not with_offer[j] or not without[j]:
            return  # so unlikely that the model takes it for impossible
        yield Judged(
            each.source,
            segment,
            kind,
            j + 1,
            float(with_offer[j]) / before,
            float(without[j]) / before_without,
            j < each.num_accepted_tokens,
        )
        before, before_without = float(with_offer[j]), float(without[j])


def reliability(judged: Sequence[Judged], *, without: bool = False, bins: int = 10) -> dict[str, Any]:
    """Expected against actual, in bins of equal width; the mean gap weighted by size; and how much is told apart."""
    expected = np.array([each.expected_without if without else each.expected for each in judged])
    actual = np.array([each.is_right for each in judged], dtype=float)
    place = np.minimum((expected * bins).astype(int), bins - 1)
    rows = [
        {
            "expected": round(float(expected[place == b].mean()), 3),
            "actual": round(float(actual[place == b].mean()), 3),
            "count": int((place == b).sum()),
        }
        for b in range(bins)
        if (place == b).any()
    ]
    error = sum(abs(row["expected"] - row["actual"]) * row["count"] for row in rows) / len(judged)
    bounded = np.clip(expected, 1e-4, 1 - 1e-4)
    loss = -np.mean(actual * np.log(bounded) + (1 - actual) * np.log(1 - bounded))
    rng, chance = np.random.default_rng(0), []
    for _ in range(50):  # fates drawn from the expectations: what a perfect model would show
        fates = rng.random(len(judged)) < expected
        gaps = [abs(float((expected - fates)[place == b].sum())) for b in range(bins)]
        chance.append(sum(gaps) / len(judged))
    return {
        "expected_calibration_error": round(error, 4),
        "by_chance": round(float(np.mean(chance)), 4),
        "log_loss": round(float(loss), 4),
        "bins": rows,
    }


def first_turns(path: Path, limit: int, tokens: int, skip: int) -> list[DemoPrompt]:
    """The first turns of so many prompts of each segment, evenly spread over the file. Args: skip: moves the choice."""
    found: dict[str, list[DemoPrompt]] = {segment: [] for segment in SEGMENTS}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        message = {"role": "user", "content": row["turns"][0]}
        found[row["segment"]].append(DemoPrompt(str(row["question_id"]), row["segment"], (message,), tokens))
    spread = [rows[int(i * len(rows) / limit) + skip] for rows in found.values() for i in range(min(limit, len(rows)))]
    return list(interleaved(spread))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(parser)
    parser.add_argument("--limit", type=int, default=10, help="prompts of each segment")
    parser.add_argument("--skip", type=int, default=1, help="how far the choice of prompts is moved on")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, default=None, help="where the answers are kept, and taken from")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    if arguments.work is None or not arguments.work.exists():
        need_prompts(parser, arguments.prompts)
    mixed = answers(arguments)
    target, tokenizer = models.load("smollm2-135m", dtype=arguments.dtype)
    # its likeliest token: then what becomes of it follows from the answer alone, as in paired sampling
    assistant = Assistant(models.load_model("smollm2-135m-assistant", dtype=arguments.dtype), greedy=True)
    assistant.attach(target, tokenizer)
    judged = list(walk(tqdm(mixed, desc="walk"), assistant))
    late = judged[len(judged) // 2 :]
    slices: dict[str, list[Judged]] = {
        "all": late,
        "first position": [each for each in late if each.position == 1],
        **{source: [each for each in late if each.source == source] for source in ("ngram", "suffix", "assistant")},
        **{kind: [each for each in late if each.kind == kind] for kind in DECODINGS},
        **{segment: [each for each in late if each.segment == segment] for segment in SEGMENTS},
        "from the first offer on": judged,
    }
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "answers": len(mixed),
        "judged": len(judged),
        "with_offer": {name: reliability(part) for name, part in slices.items() if part},
        "without": {name: reliability(part, without=True) for name, part in slices.items() if part},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "reliability.svg").write_text(plot(result["with_offer"]["all"], result["without"]["all"]))
    for name in result["with_offer"]:
        one, other = result["with_offer"][name], result["without"][name]
        print(
            f"{name:24} ECE {one['expected_calibration_error']:.3f} "
            f"(without {other['expected_calibration_error']:.3f}), "
            f"log loss {one['log_loss']:.3f} (without {other['log_loss']:.3f}), "
            f"{sum(row['count'] for row in one['bins'])} positions"
        )


def plot(with_offer: dict[str, Any], without: dict[str, Any]) -> str:
    """The reliability diagram: on the diagonal, what was expected came true as often as expected."""
    size, left, top = 320, 46, 20

    def at(row: dict[str, Any]) -> tuple[float, float]:
        return left + size * row["expected"], top + size * (1 - row["actual"])

    parts = [f'<line x1="{left}" y1="{top + size}" x2="{left + size}" y2="{top}" stroke="#9aa4ae"/>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x, y = left + size * tick, top + size * (1 - tick)
        parts.append(f'<text x="{x}" y="{top + size + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for rows, shade in ((without["bins"], "#b3400a"), (with_offer["bins"], "#0a6e5c")):
        total = sum(row["count"] for row in rows)
        for row in rows:
            x, y = at(row)
            radius = 3 + 14 * (row["count"] / total) ** 0.5
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{shade}" fill-opacity="0.6"/>')
    parts.append(f'<text x="{left + 6}" y="{top + 14}" fill="#0a6e5c">with what is known of the offer</text>')
    parts.append(f'<text x="{left + 6}" y="{top + 30}" fill="#b3400a">from segment, source, position alone</text>')
    parts.append(f'<text x="{left + size / 2}" y="{top + size + 36}" text-anchor="middle">expected acceptance</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + size + 20} {top + size + 46}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    main()
