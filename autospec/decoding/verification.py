"""From a block's logits to committed tokens: process, choose, append. No forward is run here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from autospec.decoding.answer import Answer
from autospec.decoding.processors import BlockProcessors
from autospec.decoding.selection import Selection, SelectionRule
from autospec.decoding.tally import Stopwatch
from autospec.drafts.base import Proposal


@dataclass(slots=True)
class Committed:
    """What one block came to."""

    num_tokens: int = 0
    num_accepted: int = 0
    num_judged: int = 0
    emission_seconds: float = 0.0  # that stopping criteria and streamer took


class Verification:
    """Verifies the blocks of one request.

    Args:
        answer: what tokens are committed to.
        processors: as `generate` prepared them.
        rule: how tokens are chosen.
        text: prompt and answer as draft sources see them; grows with the answer.
        scores_dtype: of the processed scores.
    """

    def __init__(
        self,
        answer: Answer,
        processors: LogitsProcessorList,
        rule: SelectionRule,
        text: list[int],
        scores_dtype: torch.dtype,
    ) -> None:
        self._answer = answer
        self._processors = BlockProcessors(processors, answer.tokens.device)
        self._rule = rule
        self._text = text
        self._scores_dtype = scores_dtype

    def run(self, logits: Tensor, proposal: Proposal, input_ids: Tensor) -> Committed:
        """Choose and commit tokens until a rejection, the bonus token, or the end.

        All positions at once where nothing but tokens and scores is looked at; otherwise one at a time, so that nobody
        is asked about a position before the one in front of it is committed; where looking is only costly, a few.

        Args:
            logits: [k + 1, vocab_size], the target's, one row for each prefix that ends after a draft token; or
                [1, vocab_size], for the first position alone.
            proposal: k draft tokens.
            input_ids: [1, n + k], the committed tokens and the drafts; [1, n] for the first position alone.
        """
        num_drafts, draft_probs = len(proposal.tokens), proposal.draft_probs
        processors, committed = self._processors, Committed()
        raw = logits.to(copy=processors.may_write, dtype=self._scores_dtype, device=input_ids.device)
        if len(raw) == 1:  # as in plain decoding
            scores = processors.plainly(input_ids, raw)
            first = None if draft_probs is None else draft_probs[:1]
            self._append(self._rule.select(scores, proposal.tokens[:1], first), raw, scores, committed)
            committed.num_judged = min(committed.num_tokens, num_drafts)
            return committed
        num_committed = input_ids.shape[1] - num_drafts
        step = (processors.num_together or num_drafts + 1) if self._answer.is_predictable else 1
        try:
            scores = processors.first_stage(input_ids, raw)
        except Exception:  # noqa: BLE001  # plain decoding may never come to the position at fault; if so, it raises below
            processors, scores, step = processors.one_by_one(), raw, 1
        start = 0
        while start <= num_drafts:
            part = slice(start, min(start + step, num_drafts + 1))
            try:
                rows = processors.second_stage(input_ids[:, : num_committed + part.stop - 1], scores[part])
            except Exception:  # as above
                if step == 1:
                    raise
                step = 1
                continue
            part_probs = None if draft_probs is None else draft_probs[part]
            selection = self._rule.select(rows, proposal.tokens[part], part_probs)
            self._append(selection, raw[part], rows, committed)
            if self._answer.is_finished or selection.num_accepted < len(rows):
                break
            start = part.stop
        committed.num_judged = min(committed.num_tokens, num_drafts)
        return committed

    def _append(self, selection: Selection, raw: Tensor, scores: Tensor, committed: Committed) -> None:
        """Commit chosen tokens one by one, until one of them ends the answer. Args: raw, scores: [n, vocab_size]."""
        emission = Stopwatch()
        answer, text = self._answer, self._text
        before = answer.num_tokens
        try:
            for position, token in enumerate(selection.tokens):
                if answer.keeps_scores:
                    row = slice(position, position + 1)
                    answer.keep_scores(raw[row], scores[row])
                answer.append(token)
                text.append(token)
                if answer.is_finished:
                    break
        finally:
            num_tokens = answer.num_tokens - before
            if num_tokens < len(selection.tokens):
                self._rule.keep(num_tokens)
        committed.num_tokens += num_tokens
        committed.num_accepted += min(num_tokens, selection.num_accepted)
        committed.emission_seconds += emission.total()
