"""Seconds of whole answers, all ways to decode in turn, with medians, intervals and a verdict on every answer."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from playing import AUTO, PLAINLY, Answer, Arm, Stage, troubles, wait
from shapes import Pair, streamed_bytes
from torch import Tensor

from autospec.decoding.ties import Difference, examine, first_difference
from autospec.verify import kind_of

LABELS = ("off", "assistant:2", "assistant:4", "assistant:8", "early_exit:4", AUTO)
REPETITIVE_LABELS = ("off", "ngram:4", "ngram:8", AUTO)
AUTO_WARM_UPS = 3
"""Answers from which `auto` learns before it is timed."""
LEAST_ROUNDS = 2
MOST_EXAMINED = 4
"""Differing answers that are examined in a cell; those that differ alike count once."""
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
SYNCHRONISES = "called a synchronizing"
"""What PyTorch warns of in its debug mode for synchronisations."""


@dataclass
class _Played:
    """One arm's answers in a cell."""

    seconds: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)


class Cell:
    """One target, one kind of prompt, one context: rounds in which every arm answers the same prompt once.

    Args:
        stage: the target, wrapped.
        context: tokens of the prompt.
        is_repetitive: prompts that repeat themselves, for retrieval.
        new_tokens: of each answer.
    """

    def __init__(self, stage: Stage, context: int, new_tokens: int, *, is_repetitive: bool = False) -> None:
        labels = REPETITIVE_LABELS if is_repetitive else LABELS
        self._stage = stage
        self._context = context
        self._is_repetitive = is_repetitive
        self._new_tokens = new_tokens
        self._arms = [PLAINLY, *(Arm(label, backend) for backend in stage.backends for label in labels)]
        self._played = {arm: _Played() for arm in self._arms}
        self._prompts: list[Tensor] = []
        self._prefill_seconds: list[float] = []
        self._examined: dict[tuple[int, int, int, int], Difference | None] = {}

    def run(self, seconds: float, most_seconds: float, most_rounds: int) -> dict[str, Any] | str:
        """Warm up, then play rounds.

        Args:
            seconds: no further round begins after these.
            most_seconds: by then the least number of rounds has to be over.
            most_rounds: rounds at most.

        Returns:
            the cell in numbers; or why it was left out.
        """
        started = time.perf_counter()
        end, last = started + seconds, started + most_seconds
        first = self._prompt(0)
        started = time.perf_counter()
        for arm in self._arms:
            self._stage.answer(arm, first, self._new_tokens)
            if time.perf_counter() > last:
                return f"a round takes longer than the {most_seconds:.0f} s left"
        round_seconds = time.perf_counter() - started
        for arm in self._arms:
            for number in range(1, AUTO_WARM_UPS if arm.label == AUTO else 1):
                self._stage.answer(arm, self._prompt(number), self._new_tokens)
        order = random.Random(0)
        while len(self._prompts) < most_rounds:
            is_least = len(self._prompts) < LEAST_ROUNDS
            if time.perf_counter() + round_seconds > (last if is_least else end):
                break
            started = time.perf_counter()
            self._round(AUTO_WARM_UPS + len(self._prompts), order)
            round_seconds = time.perf_counter() - started
        if len(self._prompts) < LEAST_ROUNDS:
            return f"{len(self._prompts)} rounds of {round_seconds:.0f} s fit in the {most_seconds:.0f} s left"
        self._judge(last)
        return self._row()

    def _prompt(self, number: int) -> Tensor:
        make = self._stage.pair.repetitive_prompt if self._is_repetitive else self._stage.pair.prompt
        return make(self._context, number)

    def _round(self, number: int, order: random.Random) -> None:
        prompt = self._prompt(number)
        found = {}
        for arm in order.sample([*self._arms, None], len(self._arms) + 1):
            if arm is None:  # the prompt alone
                self._prefill_seconds.append(self._stage.answer(PLAINLY, prompt, 1).seconds)
            else:
                found[arm] = self._stage.answer(arm, prompt, self._new_tokens)
        for arm, answer in found.items():  # only whole rounds count
            self._played[arm].seconds.append(answer.seconds)
            self._played[arm].answers.append(answer)
        self._prompts.append(prompt)

    def _judge(self, last: float) -> None:
        """Compare every answer with the plain one. The target's own forwards decide what a tie is: they take time."""
        for number, prompt in enumerate(self._prompts):
            expected = self._played[PLAINLY].answers[number].tokens
            for arm in self._arms[1:]:
                found = self._played[arm].answers[number].tokens
                at = first_difference(expected, found)
                if at is None:
                    kind = "identical"
                elif at >= min(len(expected), len(found)):
                    kind = "different"
                else:
                    place = (number, at, expected[at], found[at])
                    is_time = len(self._examined) < MOST_EXAMINED and time.perf_counter() < last
                    if place not in self._examined and is_time:
                        self._examined[place] = examine(self._stage.pair.target, prompt, expected, found)
                    kind = kind_of(self._examined[place]) if place in self._examined else "not examined"
                self._played[arm].verdicts[kind] += 1

    def _row(self) -> dict[str, Any]:
        pair, plain = self._stage.pair, self._played[PLAINLY].seconds
        prefill = statistics.median(self._prefill_seconds)
        return {
            "shape": pair.shape.name,
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "wanted_agreement": None,
            "agreement": round(pair.agreement, 3),
            "prompt": "repetitive" if self._is_repetitive else "random",
            "context": self._prompts[0].shape[1],
            "new_tokens": self._new_tokens,
            "rounds": len(self._prompts),
            "prefill_seconds": prefill,
            "step_seconds": (statistics.median(plain) - prefill) / (self._new_tokens - 1),
            "distinct_tokens": _distinct(self._played[PLAINLY].answers),
            "arms": [self._arm_row(arm, played, plain, prefill) for arm, played in self._played.items()],
        }

    def _arm_row(self, arm: Arm, played: _Played, plain: Sequence[float], prefill: float) -> dict[str, Any]:
        median, low, high = ratio(plain, played.seconds)
        row: dict[str, Any] = {
            "arm": arm.name,
            "seconds": [round(each, 5) for each in played.seconds],
            "ms_per_token": 1000 * (statistics.median(played.seconds) - prefill) / (self._new_tokens - 1),
            "speed_up": median,
            "interval": [low, high],
        }
        records = [answer.record for answer in played.answers if answer.record is not None]
        if not records:
            return row
        judged, accepted, blocks = (
            sum(getattr(record, name) for record in records)
            for name in ("num_judged_tokens", "num_accepted_tokens", "blocks")
        )
        actions: Counter[str] = Counter()
        for record in records:
            actions.update(record.actions)
        predicted = [r.predicted_control_seconds for r in records if r.predicted_control_seconds is not None]
        return row | {
            "acceptance": accepted / judged if judged else None,
            "acceptance_length": sum(record.block_tokens for record in records) / blocks if blocks else None,
            "verdicts": dict(played.verdicts),
            "actions": dict(actions.most_common(4)),
            "predicted_over_plain": statistics.median(predicted) / statistics.median(plain) if predicted else None,
            "troubles": troubles(records),
        }


def ratio(plain: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios, and its 95 % interval by drawing rounds anew."""
    ratios = np.asarray(plain) / np.asarray(ours)
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes a second, read and written, of a copy within the device's memory; the median of the repeats."""
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 3):
        wait(device)
        started = time.perf_counter()
        sink.copy_(source)
        wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * source.numel() / statistics.median(seconds[3:])


def bandwidth_share(pair: Pair, step_seconds: float, bytes_per_second: float) -> dict[str, float]:
    """How near a plain step comes to reading the weights once at the speed of a copy."""
    weights = streamed_bytes(pair.target)
    return {
        "weight_bytes": weights,
        "floor_ms": 1000 * weights / bytes_per_second,
        "step_ms": 1000 * step_seconds,
        "share": weights / bytes_per_second / step_seconds,
    }


def synchronisations(stage: Stage, context: int, new_tokens: int) -> list[dict[str, Any]]:
    """How often the host waits for the device, in each block and for each token; on CUDA alone.

    From the difference of a long and a short answer, so that what a call does once is not in it. A plain step is a
    block of one token.
    """
    found, prompt = [], stage.pair.prompt(context, 0)
    labels = ("off", "assistant:4", "early_exit:4", "ngram:4", AUTO)
    for arm in [PLAINLY, *(Arm(label, backend) for backend in stage.backends for label in labels)]:
        counts = []
        for length in (new_tokens // 4, new_tokens):
            answers: list[Answer] = []
            number = _counted(lambda arm=arm, n=length, to=answers: to.append(stage.answer(arm, prompt, n)))
            record = answers[0].record
            counts.append((number, length - 1 if record is None else record.blocks, length))
        (few, few_blocks, short), (many, many_blocks, long) = counts
        per_block = (many - few) / max(1, many_blocks - few_blocks)
        found.append({"arm": arm.name, "per_block": per_block, "per_token": (many - few) / (long - short)})
    return found


def _counted(call: Callable[[], None]) -> int:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISES in str(each.message) for each in found)


def _distinct(answers: Sequence[Answer]) -> float:
    """Share of different tokens in an answer: text that runs in circles has few."""
    return statistics.mean(len(set(answer.tokens)) / len(answer.tokens) for answer in answers)
