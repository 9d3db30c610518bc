"""Which recorded answers share a forward, and what model drafts made of them in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from autospec.decoding.processors import BlockProcessors
from autospec.drafts.assistant import ReadText
from autospec.scores.acceptance import draft_scores, judged
from autospec.scores.prepared import Prepared
from autospec.scores.rows import Rows
from autospec.scores.scored import DraftScores

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Bounds(NamedTuple):
    """Of one batch. A text longer than `tokens` goes alone."""

    rows: int
    tokens: int  # padding with them


ON_HOST = Bounds(rows=8, tokens=1024)
"""A processor is busy with few rows already; more of them only take memory from its caches."""
ELSEWHERE = Bounds(rows=32, tokens=4096)
"""On accelerators, where a forward over few rows takes about as long as over one; not measured."""
MOST_BYTES = 128 * 2**20
"""Of one model's logits held at once, as float32."""
MOST_COLUMNS = 64
"""Tokens of each answer in one forward."""
AT_ONCE_ON_HOST = 8
"""Positions judged together on the CPU, whose caches hold no more of a whole vocabulary; an accelerator takes all."""


@dataclass(slots=True)
class Answer:
    """One recorded answer that may share forwards with others."""

    prepared: Prepared
    prompt: Sequence[int]
    answer: Sequence[int]
    reads: Mapping[str, ReadText]  # by draft: one of its ids for each token of the text
    is_drawn: Mapping[str, bool]  # by draft: are its tokens drawn?
    found: dict[str, list[list[float]]] = field(default_factory=dict)  # by draft, what `judged` gives
    error: Exception | None = None  # of this one alone
    is_done: bool = False  # `found` is whole, or there is an error

    @property
    def num_tokens(self) -> int:
        """That are run: nothing follows from the last one."""
        return len(self.prompt) + len(self.answer) - 1

    @property
    def needs_target(self) -> bool:
        return any(self.is_drawn.values())

    @property
    def device(self) -> torch.device:
        return self.prepared.request.device


def packed(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Batches of texts about as long as each other, within the bounds; those that need the target by themselves."""
    batch: list[Answer] = []
    for each in sorted(answers, key=lambda each: (each.needs_target, each.num_tokens)):
        bounds = ON_HOST if each.device.type == "cpu" else ELSEWHERE
        is_full = (len(batch) + 1) * each.num_tokens > bounds.tokens or len(batch) == bounds.rows
        if batch and (is_full or batch[0].needs_target != each.needs_target):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def score_together(target: PreTrainedModel, batch: Sequence[Answer], *, is_paired: bool) -> None:
    """Fill in what was found, or an error where an answer's own processors raised one.

    Args:
        target: the model that answered.
        batch: read by the same drafts, all of them needing the target or none.
        is_paired: draft and target draw with the same noise.

    Raises:
        Exception: of a model's forward. Nothing is known of the batch then.
    """
    drafts = {name: Rows(text.model, [each.reads[name].ids for each in batch]) for name, text in batch[0].reads.items()}
    said = Rows(target, [[*each.prompt, *each.answer[:-1]] for each in batch]) if batch[0].needs_target else None
    takers = [_Taker(each, is_paired=is_paired) for each in batch]
    for start, end, kept in _spans(batch, [target, *(text.model for text in batch[0].reads.values())]):
        target_logits = None if said is None else said.run(start, end, kept)
        logits = {name: rows.run(start, end, kept) for name, rows in drafts.items()}
        for row, taker in enumerate(takers):
            taker.take(
                end - kept,
                None if target_logits is None else target_logits[row],
                {name: each[row] for name, each in logits.items()},
            )
    for each in batch:
        each.is_done = True


def _spans(batch: Sequence[Answer], models: Sequence[PreTrainedModel]) -> Iterator[tuple[int, int, int]]:
    """Start and end of columns that are run in one forward, and for how many of the last ones logits are wanted."""
    vocab_size = max(int(model.get_output_embeddings().weight.shape[0]) for model in models)
    at_once = MOST_BYTES // (4 * vocab_size * len(batch))
    width = min(MOST_COLUMNS, max(1, at_once))
    start = min(len(each.prompt) for each in batch)  # before it no answer begins
    yield 0, start, 1
    longest = max(each.num_tokens for each in batch)
    while start < longest:
        end = min(start + width, longest)
        yield start, end, end - start
        start = end


class _Taker:
    """Takes what concerns one answer out of the columns of all."""

    def __init__(self, answer: Answer, *, is_paired: bool) -> None:
        self._answer = answer
        self._is_paired = is_paired
        self._whole = torch.tensor([[*answer.prompt, *answer.answer]], device=answer.device)
        self._target = BlockProcessors(answer.prepared.processors, answer.device)
        self._draft = BlockProcessors(answer.prepared.request.processors, answer.device)
        answer.found.update({name: [] for name in answer.reads})

    def take(self, column: int, target_logits: Tensor | None, logits: Mapping[str, Tensor]) -> None:
        """Of columns from `column` on, all logits for the token after each.

        Args:
            target_logits: [columns, vocab_size]; None where no draft's tokens are drawn.
            logits: by draft, [columns, draft_vocab_size].
        """
        answer = self._answer
        num_columns = len(next(iter(logits.values())))
        before = len(answer.prompt) - 1  # the column that gives the answer's first token
        first, end = max(0, column - before), min(len(answer.answer), column + num_columns - before)
        if answer.error is not None or first >= end:
            return
        step = AT_ONCE_ON_HOST if answer.device.type == "cpu" else end - first
        try:
            for start in range(first, end, step):
                stop = min(start + step, end)
                part = slice(start + before - column, stop + before - column)
                said = None if target_logits is None else target_logits[part]
                self._take(start, stop, said, {name: each[part] for name, each in logits.items()})
        except Exception as error:  # noqa: BLE001  # its options may hold anything; the others go on
            answer.error = error

    def _take(self, first: int, end: int, target_logits: Tensor | None, logits: Mapping[str, Tensor]) -> None:
        """Of the answer's tokens from `first` to before `end`, as many rows of logits."""
        answer, request = self._answer, self._answer.prepared.request
        text = self._whole[:, : len(answer.prompt) + end - 1]
        tokens = self._whole[0, len(answer.prompt) + first : len(answer.prompt) + end]
        target_probs = None
        if target_logits is not None:
            scores = target_logits.to(request.scores_dtype, copy=self._target.may_write)
            target_probs = processed(self._target, text, scores).softmax(dim=-1)
        for name, read in answer.reads.items():
            own = logits[name]
            scores = torch.cat([read.write(row[None].to(request.scores_dtype), request.vocab_size) for row in own])
            scores = processed(self._draft, text, scores)
            probs = target_probs if answer.is_drawn[name] else None
            answer.found[name] += judged(own, scores, tokens, probs, is_paired=self._is_paired)


def processed(processors: BlockProcessors, text: Tensor, scores: Tensor) -> Tensor:
    """Scores as plain decoding would have made them, each position in its turn.

    Args:
        processors: called once for each position.
        text: [1, m + n - 1], all that stands before the last position.
        scores: [n, vocab_size], one row after each prefix of at least m tokens.

    Returns:
        [n, vocab_size].
    """
    scores = processors.first_stage(text, scores)
    if processors.num_together is None:
        return scores
    before = text.shape[1] - len(scores) + 1
    return torch.cat(
        [processors.second_stage(text[:, : before + row], scores[row : row + 1]) for row in range(len(scores))]
    )


def scores_of(answer: Answer) -> dict[str, DraftScores]:
    """What was found, by draft. Raises: whatever this answer's processors raised."""
    if answer.error is not None:
        raise answer.error
    return {name: draft_scores(found) for name, found in answer.found.items()}
