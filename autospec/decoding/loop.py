"""The loop: choose, draft, verify, commit, roll back.

Source: Leviathan et al. 2023 and Chen et al. 2023 for the scheme; docs/exactness.md for what is promised.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from autospec.decoding.answer import Answer
from autospec.decoding.tally import Stopwatch, Tally
from autospec.decoding.target import TargetSession
from autospec.decoding.verification import Committed, Verification
from autospec.drafts.base import DraftRequest, DraftSession, DraftSource, Proposal, checked, hidden_layers_of
from autospec.errors import ConfigurationError, DraftError, ExactnessError
from autospec.notices import warn
from autospec.randomness import spared
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome, RequestContext


class Chooser(Protocol):
    """Picks an action before each block and learns what came of it."""

    def choose(self, context: BlockContext) -> Action:
        """The action for the next block."""

    def observe(self, outcome: BlockOutcome) -> None:
        """What the last block did."""


class Loop:
    """Decodes one request; holds everything that belongs to it and nothing that outlives it.

    Args:
        target: runs the forwards.
        answer: what is said.
        verification: from logits to committed tokens; lets `text` grow.
        chooser: picks an action before each block.
        sources: draft sources by name.
        request, draft_request: what policies and sources may know of the request.
        text: prompt and answer without padding, as draft sources see them.
        window: positions the target has, if it says so.
        stretches_beyond: the length beyond which rotary frequencies depend on the length itself, if there is one.
    """

    def __init__(
        self,
        *,
        target: TargetSession,
        answer: Answer,
        verification: Verification,
        chooser: Chooser,
        sources: Mapping[str, DraftSource],
        request: RequestContext,
        draft_request: DraftRequest,
        text: list[int],
        window: int | None,
        stretches_beyond: int | None,
    ) -> None:
        self._target = target
        self._answer = answer
        self._verification = verification
        self._chooser = chooser
        self._sources = dict(sources)
        self._learning: dict[str, Any] = {name: s for name, s in sources.items() if callable(getattr(s, "learn", None))}
        self._sessions: dict[str, DraftSession] = {}
        self._seeing = {name: layers for name, s in sources.items() if (layers := hidden_layers_of(s))}
        target.hidden_layers = self._wanted_layers()
        self._request = request
        self._draft_request = draft_request
        self._text = text
        self._stretches_beyond = stretches_beyond
        self._last_position = window if window is not None else sys.maxsize
        self.tally = Tally()
        self._watch = Stopwatch()

    def run(self) -> None:
        """Decode until a stopping criterion holds."""
        for name, source in list(self._sources.items()):
            if failure := getattr(source, "failure", None):
                self._switch_off(name, DraftError(failure))
        input_ids = self._answer.tokens.on_device
        logits = self._target.prefill(input_ids)
        self.tally.prefill_seconds = self._watch.lap()
        if self._sources and (why := self._target.why_no_speculation or self._why_no_room()):
            self._note(f"decoded plainly: {why}")
            self._sources.clear()
            self._seeing.clear()
            self._target.hidden_layers = ()
        self._decode_block(logits, Proposal(), input_ids)
        self._watch.lap()
        with self._target.decoding():
            while not self._answer.is_finished:
                self._block()

    def learn(self, num_tokens: int) -> None:
        """Show the answer, the last tokens of the text, to the sources that learn from answers."""
        for name, source in self._learning.items():
            try:
                source.learn(self._draft_request, self._text[len(self._text) - num_tokens :])
            except Exception as error:  # noqa: BLE001  # the answer is there, whatever happens to what is learnt from it
                self._note(f"{name} did not learn from the answer: {type(error).__name__}: {error}")

    def _block(self) -> None:
        """One block: draft up to k tokens, verify them in one target forward, commit."""
        context = BlockContext(
            request=self._request,
            context_tokens=len(self._text),
            output_tokens=self._answer.num_tokens,
            sources=tuple(self._sources),
        )
        with self._own_noise():
            action = self._possible(self._chooser.choose(context), context)
        self._watch.lap()
        proposal = self._propose(action)
        draft_seconds = self._watch.lap()
        num_draft = len(proposal.tokens)
        input_ids = self._answer.tokens.followed_by(proposal.tokens)
        logits = self._target.forward(input_ids, num_draft)
        verify_seconds = self._watch.lap()
        committed = self._decode_block(logits, proposal, input_ids)
        outcome = BlockOutcome(
            segment=context.segment,
            action=action,
            context_tokens=context.context_tokens,
            num_draft_tokens=num_draft,
            num_judged_tokens=committed.num_judged,
            num_accepted_tokens=committed.num_accepted,
            num_committed_tokens=committed.num_tokens,
            draft_seconds=draft_seconds - proposal.catch_up_seconds,
            verify_seconds=verify_seconds,
            correction_seconds=self._watch.lap() - committed.emission_seconds,
            emission_seconds=committed.emission_seconds,
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
            with self._own_noise():
                proposal = self._session(action.source).propose(self._text, block_length)
            proposal = self._checked(proposal, block_length)
            for note in proposal.notes:
                self._note(f"{action.source}: {note}")
            return proposal
        except Exception as error:  # a draft never decides what is said, so few may end a request
            if self._request.do_sample and not self._draft_request.is_paired and not isinstance(error, DraftError):
                raise  # it may follow from a token drawn just now, and dropping that one would depend on its own draw
            self._switch_off(action.source, error)
            return Proposal()

    def _session(self, name: str) -> Any:
        if name not in self._sessions:
            self._sessions[name] = self._sources[name].start(self._draft_request)
        return self._sessions[name]

    def _show_states(self) -> None:
        """Let sessions see what the target made of the tokens that were committed."""
        for name, layers in list(self._seeing.items()):
            try:
                with self._own_noise():
                    self._session(name).see(self._target.committed_states(layers))
            except Exception as error:  # noqa: BLE001  # of committed tokens alone: no draw is dropped with it
                self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        text = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
        self._note(f"{name} switched off: {text}")
        del self._sources[name]
        self._sessions.pop(name, None)
        if self._seeing.pop(name, None):
            self._target.hidden_layers = self._wanted_layers()

    def _wanted_layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(layer for layers in self._seeing.values() for layer in layers))

    def _checked(self, proposal: Proposal, block_length: int) -> Proposal:
        try:
            return checked(proposal, block_length, self._draft_request.vocab_size)
        except DraftError as error:
            if getattr(proposal, "draft_probs", None) is None:
                raise
            raise ExactnessError(f"drawn tokens that cannot be verified: {error}") from error

    def _own_noise(self) -> AbstractContextManager[None]:
        """In paired sampling what policies and drafts draw from the global generator does not move the target's noise.

        Otherwise it is used up: a decision that has seen noise must not be followed by a token from that noise.
        """
        is_paired = self._request.do_sample and self._draft_request.is_paired
        return spared(self._draft_request.device) if is_paired else nullcontext()

    def _why_no_room(self) -> str | None:
        """Why the target's own positions forbid blocks; None when they do not."""
        end = self._target.prefill_length + self._request.max_new_tokens
        if self._stretches_beyond is not None and end > self._stretches_beyond:
            return f"rotary positions stretch beyond {self._stretches_beyond} tokens"
        return None

    def _decode_block(self, logits: Tensor, proposal: Proposal, input_ids: Tensor) -> Committed:
        """Commit what the target makes of a proposal, and cut its cache back to that."""
        before = self._answer.num_settled
        try:
            committed = self._verification.run(logits, proposal, input_ids)
        except BaseException:
            self._target.abort(self._answer.num_settled - before)
            raise
        self._target.commit(committed.num_tokens)
        self._show_states()
        return committed

    def _note(self, text: str) -> None:
        self.tally.notes.append(text)
        warn(text)
