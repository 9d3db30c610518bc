"""Does every way to decode say what the model's own `generate` says? In float32, on shapes made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from playing import ANY, PLAIN, PLAINLY, Arm, Stage, troubles
from scipy.stats import chi2, norm
from shapes import Pair
from torch import Tensor

from autospec.decoding import decoder
from autospec.decoding.selection import Maximal
from autospec.decoding.ties import first_difference

LABELS = ("off", "assistant:4", "assistant:8", "early_exit:4", "ngram:4", ANY)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
UNSHAPED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
BOUND = 2e-4
"""A p-value below it is a fault. With three tests of each backend and two of plain sampling, a run in some hundred or
more cries wolf."""
PERMUTATIONS = 9999
FAULT = "planted fault"


class Check(NamedTuple):
    name: str
    is_ok: bool
    shown: str


def same_text(stage: Stage, new_tokens: int, num_prompts: int, is_time: Callable[[], bool]) -> dict[str, Any]:
    """Greedy and paired answers against plain ones from the same seed: all tokens must be the same.

    Args:
        stage: in float32.
        new_tokens: of each answer.
        num_prompts: half of them repeat themselves.
        is_time: is there time for another prompt?
    """
    pair, arms = stage.pair, [Arm(label, backend) for backend in stage.backends for label in LABELS]
    rows = {(mode, arm): {"answers": 0, "same": 0, "differing": []} for mode in ("greedy", "paired") for arm in arms}
    records, judged, accepted = [], 0, 0
    for number in range(num_prompts):
        if number and not is_time():
            break
        length = pair.shape.contexts[0]
        prompt = pair.prompt(length, number) if number % 2 else pair.repetitive_prompt(length, number)
        for mode, options in (("greedy", {}), ("paired", SAMPLED)):
            expected = stage.answer(PLAINLY, prompt, new_tokens, seed=number, **options).tokens
            for arm in arms:
                extra: dict[str, Any] = {}
                if mode == "paired" and number % 2:  # the request's own generator in place of the global one
                    extra["generator"] = torch.Generator(pair.device).manual_seed(number)
                found = stage.answer(arm, prompt, new_tokens, seed=number, **options, **extra)
                row, at = rows[mode, arm], first_difference(expected, found.tokens)
                row["answers"] += 1
                row["same"] += at is None
                if at is not None:
                    row["differing"].append({"prompt": number, "position": at})
                records.append(found.record)
                judged += found.record.num_judged_tokens
                accepted += found.record.num_accepted_tokens
    return {
        "dtype": str(pair.target.dtype),
        "new_tokens": new_tokens,
        "rows": [{"mode": mode, "arm": arm.name, **row} for (mode, arm), row in rows.items()],
        "judged": judged,
        "accepted": accepted,
        "troubles": troubles(records),
    }


def checks_of_text(found: dict[str, Any]) -> Iterator[Check]:
    for mode in ("greedy", "paired"):
        rows = [row for row in found["rows"] if row["mode"] == mode]
        same, answers = (sum(row[key] for row in rows) for key in ("same", "answers"))
        yield Check(f"float32, {mode}: same tokens as generate", 0 < same == answers, f"{same} of {answers} answers")
    yield Check(
        "float32: drafts were judged, and nothing was switched off",
        0 < found["accepted"] < found["judged"] and not found["troubles"],
        f"{found['accepted']} of {found['judged']} accepted" + "".join(f"; {text}" for text in found["troubles"]),
    )


class Sampled(NamedTuple):
    """Answers drawn from one prompt, and how each token stands to both models."""

    counts: np.ndarray  # [answers, vocab_size], how often each answer has each token
    surplus: Tensor  # [vocab_size], float64: tokens counted, less what the target expects after their own prefixes
    covariance: Tensor  # [vocab_size, vocab_size], of the surplus
    score: float  # how much likelier the tokens are under the draft than the target expects, in standard deviations
    acceptance: float | None


class SampleAgain(Maximal):
    """A planted fault: after a rejection it draws from p, not from the residual."""

    def residual(self, probs: Tensor, draft_probs: Tensor, num_accepted: Tensor) -> tuple[Tensor, Tensor]:
        row = probs.index_select(0, num_accepted[None])[0]
        return row, row.sum()


def same_distribution(
    stage: Stage, new_tokens: int, num_answers: int, block_length: int, is_time: Callable[[], bool]
) -> dict[str, Any]:
    """Drawn drafts under `sampling="maximal"`: another text, and it must have the target's distribution.

    Three tests. By tokens: how often each of them came, against the target's own probabilities after the very prefixes
    (chi-square). Toward the draft: whether tokens that the draft prefers came too often (normal); that is how a wrong
    rule shows. Two-sample: token counts of plain and speculative answers (permutations of the answers).

    Args:
        stage: in float32, of few tokens, with maximal sampling.
        new_tokens: of each answer.
        num_answers: of each way.
        block_length: of the draft.
        is_time: is there time for more answers?
    """
    prompt = stage.pair.prompt(stage.pair.shape.contexts[0], 0)
    label = f"assistant:{block_length}"
    ways = {PLAIN: PLAINLY, **{f"maximal, {backend}": Arm(label, backend) for backend in stage.backends}}
    ways[FAULT] = Arm(label, stage.backends[0])
    answers: dict[str, list[list[int]]] = {name: [] for name in ways}
    judged = dict.fromkeys(answers, 0)
    accepted = dict.fromkeys(answers, 0)
    for number in range(num_answers):
        if number >= 8 and not is_time():
            break
        for index, (name, found) in enumerate(answers.items()):
            with planted(name == FAULT):
                answer = stage.answer(ways[name], prompt, new_tokens, seed=1000 + 10 * number + index, **UNSHAPED)
            found.append(answer.tokens)
            if answer.record is not None:
                judged[name] += answer.record.num_judged_tokens
                accepted[name] += answer.record.num_accepted_tokens
    sampled = {
        name: standing(stage.pair, prompt, found, accepted[name] / judged[name] if judged[name] else None)
        for name, found in answers.items()
    }
    return {
        "vocab_size": stage.pair.shape.vocab,
        "new_tokens": new_tokens,
        "answers": len(answers[PLAIN]),
        "block_length": block_length,
        "bound": BOUND,
        "acceptance": {name: each.acceptance for name, each in sampled.items()},
        "p_by_tokens": {name: by_tokens(each) for name, each in sampled.items()},
        "score_toward_draft": {name: round(each.score, 2) for name, each in sampled.items()},
        "p_toward_draft": {name: float(2 * norm.sf(abs(each.score))) for name, each in sampled.items()},
        "p_two_sample": {
            n: two_sample(sampled[PLAIN].counts, each.counts) for n, each in sampled.items() if n != PLAIN
        },
    }


def checks_of_distribution(found: dict[str, Any]) -> Iterator[Check]:
    names = [name for name in found["p_by_tokens"] if name != FAULT]
    for name in names:
        for test in ("by_tokens", "toward_draft"):
            p = found[f"p_{test}"][name]
            yield Check(f"{name} sampling has the target's distribution, {test}", p >= BOUND, f"p = {p:.2g}")
        if name != PLAIN:
            p, acceptance = found["p_two_sample"][name], found["acceptance"][name]
            yield Check(f"{name} and plain sampling alike, two-sample", p >= BOUND, f"p = {p:.2g}")
            yield Check(
                f"{name}: some drafts were accepted", 0.0 < acceptance < 1.0, f"{acceptance:.2f} of those judged"
            )
    p = found["p_toward_draft"][FAULT]
    yield Check("a planted fault is seen", p < BOUND, f"p = {p:.2g}")


@contextmanager
def planted(is_planted: bool) -> Iterator[None]:
    if not is_planted:
        yield
        return
    with mock.patch.object(decoder, "make_rule", lambda randomness, **_: SampleAgain(randomness)):
        yield


@torch.no_grad()
def standing(pair: Pair, prompt: Tensor, answers: Sequence[list[int]], acceptance: float | None) -> Sampled:
    """Args: prompt: [1, n]; answers: of equal lengths, drawn at temperature 1 without other processors."""
    drawn = torch.tensor(answers, device=prompt.device)
    text = torch.cat([prompt.expand(len(answers), -1), drawn], dim=1)
    last = slice(prompt.shape[1] - 1, -1)  # each token's own prefix ends before it
    p, q = (
        model(input_ids=text, use_cache=False).logits[:, last].double().log_softmax(dim=-1)
        for model in (pair.target, pair.draft)
    )
    probs, vocab_size = p.exp(), p.shape[-1]
    hits = torch.nn.functional.one_hot(drawn, vocab_size).double()
    flat = probs.reshape(-1, vocab_size)
    toward = (q - p).clamp(-2.0, 2.0)  # rare tokens would else make up the variance
    mean = (probs * toward).sum(dim=-1)
    variance = (probs * toward.square()).sum(dim=-1) - mean.square()
    surplus = toward.gather(2, drawn[..., None])[..., 0] - mean
    return Sampled(
        counts=hits.sum(dim=1).cpu().numpy(),
        surplus=(hits - probs).sum(dim=(0, 1)).cpu(),
        covariance=(torch.diag(flat.sum(dim=0)) - flat.T @ flat).cpu(),
        score=float(surplus.sum() / variance.sum().sqrt()),
        acceptance=acceptance,
    )


def by_tokens(sampled: Sampled) -> float:
    """p-value of the surplus. Its covariance has no inverse, as the surplus sums to 0: one token is left out."""
    surplus, covariance = sampled.surplus[1:], sampled.covariance[1:, 1:]
    statistic = float(surplus @ torch.linalg.solve(covariance, surplus))
    return float(chi2.sf(statistic, len(surplus)))


def two_sample(left: np.ndarray, right: np.ndarray) -> float:
    """p-value of a difference between two sets of answers, by dealing the answers to two sides at random.

    Args:
        left, right: [answers, vocab_size], token counts; tokens of one answer depend on each other, answers do not.
    """
    both = np.concatenate([left, right])
    usual = both.sum(axis=0) + 1e-9
    generator = np.random.default_rng(0)

    def apart(order: np.ndarray) -> float:
        a, b = both[order[: len(left)]].sum(axis=0), both[order[len(left) :]].sum(axis=0)
        return float(((a / len(left) - b / len(right)) ** 2 / usual).sum())

    seen = apart(np.arange(len(both)))
    beyond = sum(apart(generator.permutation(len(both))) >= seen for _ in range(PERMUTATIONS))
    return (1 + beyond) / (1 + PERMUTATIONS)
