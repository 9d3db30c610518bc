"""The loop: choose, draft, verify, commit, roll back.

Source: Leviathan et al. 2023 and Chen et al. 2023 for the scheme; docs/exactness.md for what is promised.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from autospec.decoding.answer import Answer
from autospec.decoding.selection import Selection, SelectionRule
from autospec.decoding.tally import Stopwatch, Tally
from autospec.decoding.target import TargetSession
from autospec.drafts.base import DraftRequest, DraftSession, DraftSource, Proposal, checked
from autospec.errors import ConfigurationError, DraftError
from autospec.notices import warn
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome, RequestContext


class Chooser(Protocol):
    """Picks an action before each block and learns what came of it."""

    def choose(self, context: BlockContext) -> Action:
        """The action for the next block."""

    def observe(self, outcome: BlockOutcome) -> None:
        """What the last block did."""


class Loop:
    """Decodes one request; holds everything that belongs to it and nothing that outlives it."""

    def __init__(
        self,
        *,
        target: TargetSession,
        answer: Answer,
        processors: LogitsProcessorList,
        rule: SelectionRule,
        chooser: Chooser,
        sources: Mapping[str, DraftSource],
        request: RequestContext,
        draft_request: DraftRequest,
        prompt_tokens: list[int],
        window: int | None,
        stretches_beyond: int | None,
        scores_dtype: torch.dtype,
    ) -> None:
        self._target = target
        self._answer = answer
        self._processors = processors
        self._rule = rule
        self._chooser = chooser
        self._sources = dict(sources)
        self._sessions: dict[str, DraftSession] = {}
        self._request = request
        self._draft_request = draft_request
        self._committed = prompt_tokens  # prompt and answer without padding, for the draft sources
        self._scores_dtype = scores_dtype
        self._stretches_beyond = stretches_beyond
        self._last_position = window if window is not None else sys.maxsize
        self.tally = Tally()
        self._watch = Stopwatch()

    def run(self) -> None:
        """Decode until a stopping criterion holds."""
        logits = self._target.prefill(self._answer.input_ids)
        self.tally.prefill_seconds = self._watch.lap()
        if self._sources and (why := self._target.why_no_speculation or self._why_no_room()):
            self._note(f"decoded plainly: {why}")
            self._sources.clear()
        self._decode_block(logits, Proposal())
        self._watch.lap()
        with self._target.decoding():
            while not self._answer.is_finished:
                self._block()

    def _block(self) -> None:
        """One block: draft up to k tokens, verify them in one target forward, commit."""
        context = BlockContext(
            request=self._request,
            context_tokens=len(self._committed),
            output_tokens=self._answer.num_tokens,
            sources=tuple(self._sources),
        )
        with self._own_noise():
            action = self._possible(self._chooser.choose(context), context)
        self._watch.lap()
        proposal = self._propose(action)
        draft_seconds = self._watch.lap()
        num_draft = len(proposal.tokens)
        input_ids = self._answer.input_ids
        if num_draft:
            drafted = input_ids.new_tensor([proposal.tokens])
            input_ids = torch.cat([input_ids, drafted], dim=-1)
        logits = self._target.forward(input_ids, num_draft)
        verify_seconds = self._watch.lap()
        num_committed, num_accepted, num_judged, emission_seconds = self._decode_block(logits, proposal)
        outcome = BlockOutcome(
            segment=context.segment,
            action=action,
            context_tokens=context.context_tokens,
            num_draft_tokens=num_draft,
            num_judged_tokens=num_judged,
            num_accepted_tokens=num_accepted,
            num_committed_tokens=num_committed,
            draft_seconds=draft_seconds - proposal.catch_up_seconds,
            verify_seconds=verify_seconds,
            correction_seconds=self._watch.lap() - emission_seconds,
            emission_seconds=emission_seconds,
            catch_up_seconds=proposal.catch_up_seconds,
        )
        self.tally.add(outcome)
        with self._own_noise():
            self._chooser.observe(outcome)

    def _possible(self, chosen: Action, context: BlockContext) -> Action:
        """The chosen action as far as it can be done now; what is asked, drafted and recorded then agree."""
        # the last of the tokens left needs no draft: the target's own token follows every accepted one
        room = self._last_position - self._target.prefill_length - context.output_tokens
        block_length = min(chosen.block_length, context.tokens_left - 1, room)
        if chosen.source not in (NONE, *self._request.sources):
            usable = ", ".join([NONE, *context.sources])
            raise ConfigurationError(f"the policy chose draft source {chosen.source!r}: usable here are {usable}")
        if block_length < 1 or chosen.source not in self._sources:
            return OFF
        return chosen if block_length == chosen.block_length else replace(chosen, block_length=block_length)

    def _propose(self, action: Action) -> Proposal:
        if action.block_length == 0:
            return Proposal()
        block_length = action.block_length
        try:
            with self._own_noise() if self._draft_request.is_paired else nullcontext():
                if action.source not in self._sessions:
                    self._sessions[action.source] = self._sources[action.source].start(self._draft_request)
                proposal = self._sessions[action.source].propose(self._committed, block_length)
            return checked(proposal, block_length, self._draft_request.vocab_size)
        except Exception as error:  # a draft never decides what is said, so few may end a request
            if self._request.do_sample and not self._draft_request.is_paired and not isinstance(error, DraftError):
                raise  # it may follow from a token drawn just now, and dropping that one would depend on its own draw
            text = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
            self._note(f"{action.source} switched off: {text}")
            del self._sources[action.source]
            self._sessions.pop(action.source, None)
            return Proposal()

    def _own_noise(self) -> AbstractContextManager[None]:
        """Policies and coupled drafts may draw from torch's global generator without moving the target's noise."""
        if not self._request.do_sample:
            return nullcontext()
        device = self._draft_request.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    def _why_no_room(self) -> str | None:
        """Why the target's own positions forbid blocks; None when they do not."""
        end = self._target.prefill_length + self._request.max_new_tokens
        if self._stretches_beyond is not None and end > self._stretches_beyond:
            return f"rotary positions stretch beyond {self._stretches_beyond} tokens"
        return None

    def _decode_block(self, logits: Tensor, proposal: Proposal) -> tuple[int, int, int, float]:
        """Commit what the target makes of a proposal, and cut its cache back to that."""
        before = self._answer.num_tokens
        try:
            result = self._commit_run(logits, proposal)
        except BaseException:
            self._target.abort(self._answer.num_tokens - before)
            raise
        self._target.commit(result[0])
        return result

    def _commit_run(self, logits: Tensor, proposal: Proposal) -> tuple[int, int, int, float]:
        """Choose and commit tokens position by position until a rejection, the bonus token, or the end.

        Args:
            logits: [k + 1, vocab_size], the target's, one row for each prefix that ends after a draft token.

        Returns:
            committed, accepted and judged tokens, and the seconds that stopping criteria and streamer took.
        """
        num_draft = len(proposal.tokens)
        num_committed = num_accepted = num_judged = 0
        emission_seconds = 0.0
        for position in range(num_draft + 1):
            raw = logits[position : position + 1].to(
                copy=True, dtype=self._scores_dtype, device=self._answer.input_ids.device
            )
            scores = self._processors(self._answer.input_ids, raw)
            draft_token = proposal.tokens[position] if position < num_draft else None
            draft_probs = proposal.draft_probs
            selection: Selection = self._rule.select(
                scores,
                draft_token,
                draft_probs[position] if draft_probs is not None and draft_token is not None else None,
            )
            emission = Stopwatch()
            self._answer.append(selection.token, raw, scores)
            emission_seconds += emission.total()
            self._committed.append(selection.token)
            num_committed += 1
            if draft_token is not None:
                num_judged += 1
                num_accepted += selection.is_accepted
            if self._answer.is_finished or not selection.is_accepted:
                break
        return num_committed, num_accepted, num_judged, emission_seconds

    def _note(self, text: str) -> None:
        self.tally.notes.append(text)
        warn(text)
