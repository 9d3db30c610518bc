"""A stand-in for vLLM's scheduler and model runner: calls a proposer as they do, and keeps what is true for itself.

What it does is read off vLLM 0.32: arrays that are larger than the batch and hold stale rows, rows that are filled from
the end when a request leaves, prompts read in chunks (no token sampled), preempted requests that come back with their
whole text, drafts cut short, tokens sampled beyond the one that ends the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB_SIZE = 1000
END = 7
MAX_MODEL_LEN = 512


@dataclass
class Asked:
    """One request, and what really became of it."""

    name: str
    prompt: list[int]
    next_token: Callable[[list[int]], int]
    max_tokens: int = 24
    ignores_end: bool = False
    most_drafts: int = 10_000  # of a step, that its grammar lets through
    temperature: float = 0.0
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # to be verified in the next step
    num_read: int = 0  # tokens of the text that the engine has read
    is_reading: bool = True  # its prompt, or its whole text after a preemption
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_steps: int = 0  # after the one that read the prompt
    is_done: bool = False

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


class Engine:
    """Args: propose: of the proposer; chunk: tokens of a prompt read in one step; seconds: pass between two calls."""

    def __init__(
        self,
        propose: Callable[..., list[list[int]]],
        *,
        max_num_seqs: int = 8,
        chunk: int = 10_000,
        tick: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.propose = propose
        self.chunk = chunk
        self.tick = tick
        self.rows: list[Asked] = []
        self.waiting: list[Asked] = []
        self.lengths = np.zeros(max_num_seqs, dtype=np.int32)
        self.token_ids = np.zeros((max_num_seqs, MAX_MODEL_LEN), dtype=np.int32)
        self.input_batch = SimpleNamespace(
            temperature_cpu=np.zeros(max_num_seqs, dtype=np.float32),
            top_p_cpu=np.ones(max_num_seqs, dtype=np.float32),
            top_k_cpu=np.full(max_num_seqs, VOCAB_SIZE, dtype=np.int32),
            vocab_size=VOCAB_SIZE,
        )
        self.max_num_seqs = max_num_seqs
        self.most_drafts = 10_000  # of a request, that a step has room for
        self.calls = 0
        self.num_speculative_tokens = 8
        self.asks_below = MAX_MODEL_LEN

    def add(self, *requests: Asked) -> None:
        self.waiting.extend(requests)

    def preempt(self, request: Asked) -> None:
        """It leaves its row, and waits with all of its text."""
        self._remove(request)
        request.drafts, request.num_read, request.is_reading = [], 0, True
        self.waiting.insert(0, request)

    def swap(self, first: int, second: int) -> None:
        self.rows[first], self.rows[second] = self.rows[second], self.rows[first]

    def run(self, most_steps: int = 1000) -> None:
        while (self.rows or self.waiting) and most_steps:
            self.step()
            most_steps -= 1

    def step(self) -> None:
        for request in [each for each in self.rows if each.is_done]:
            self._remove(request)
        while self.waiting and len(self.rows) < self.max_num_seqs:
            self.rows.append(self.waiting.pop(0))
        if not self.rows:
            return  # vLLM asks for nothing then
        sampled = [self._advance(each) for each in self.rows]
        for row, each in enumerate(self.rows):
            text = [*each.text]
            self.token_ids[row, : len(text)] = text
            self.lengths[row] = len(text)
            self.input_batch.temperature_cpu[row] = each.temperature
        self.tick(self._num_tokens)
        if max((len(each.text) for each in self.rows), default=0) + self.num_speculative_tokens > self.asks_below:
            for each in self.rows:  # vLLM then lets a block of zeros be verified
                self._end(each)
                each.drafts = []
            return
        mapping = {"layer.0": np.zeros(self._num_tokens)}
        self.calls += 1
        drafts = self.propose(sampled, self.lengths, self.token_ids, slot_mappings=mapping)
        assert isinstance(drafts, list)
        assert len(drafts) == len(self.rows)
        for each, tokens in zip(self.rows, drafts, strict=True):
            self._end(each)
            each.drafts = list(tokens)
            each.num_drafted += len(tokens)

    _num_tokens = 0

    def _advance(self, each: Asked) -> list[int]:
        """What the step commits for a request."""
        if each is self.rows[0]:
            self._num_tokens = 0
        missing = len(each.text) - each.num_read
        if each.is_reading:
            num = min(self.chunk, missing)
            self._num_tokens += num
            each.num_read += num
            if each.num_read < len(each.text):
                return []
            each.is_reading = False
            drafts: list[int] = []
        else:
            drafts = each.drafts[: min(self.most_drafts, each.most_drafts)]
            self._num_tokens += 1 + len(drafts)
            each.num_steps += 1
        committed: list[int] = []
        for token in drafts:
            each.num_verified += 1
            truth = each.next_token([*each.text, *committed])
            committed.append(truth)
            if truth != token:
                break
            each.num_accepted += 1
        else:
            committed.append(each.next_token([*each.text, *committed]))
        each.output.extend(committed)
        each.num_read = len(each.text) - 1
        return committed

    def _end(self, each: Asked) -> None:
        """The scheduler's part: the answer ends where it ends, whatever was sampled behind that."""
        if not each.ignores_end and END in each.output:
            del each.output[each.output.index(END) + 1 :]
            each.is_done = True
        elif len(each.output) >= each.max_tokens:
            del each.output[each.max_tokens :]
            each.is_done = True

    def _remove(self, request: Asked) -> None:
        row = next(row for row, each in enumerate(self.rows) if each is request)
        last = self.rows.pop()
        if last is not request:
            self.rows[row] = last


def cycle(*tokens: int) -> Callable[[list[int]], int]:
    """A text that repeats itself, so that retrieval finds it again."""

    def next_token(text: Sequence[int]) -> int:
        return tokens[(tokens.index(text[-1]) + 1) % len(tokens)] if text[-1] in tokens else tokens[0]

    return next_token


def scramble(seed: int) -> Callable[[list[int]], int]:
    """A text that retrieval seldom gets right, and never ends."""

    def next_token(text: Sequence[int]) -> int:
        return 10 + (31 * text[-1] + 17 * len(text) + seed) % 40

    return next_token


def config(**changes: Any) -> Any:
    """What of vLLM's `VllmConfig` is looked at."""
    model = SimpleNamespace(
        max_model_len=MAX_MODEL_LEN,
        get_vocab_size=lambda: VOCAB_SIZE,
        hf_text_config=SimpleNamespace(eos_token_id=END),
        try_get_generation_config=lambda: {"eos_token_id": [END]},
        model="/models/tiny",
        tokenizer="/models/tiny",
        dtype="torch.float32",
    )
    found = SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        additional_config={},
    )
    for path, value in changes.items():
        part: Any = found
        *parents, name = path.split("__")
        for parent in parents:
            part = getattr(part, parent)
        setattr(part, name, value)
    return found
