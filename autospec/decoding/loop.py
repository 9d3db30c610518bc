"""The loop: choose, draft, verify, commit, roll back.

Source: Leviathan et al. 2023 and Chen et al. 2023 for the scheme; docs/exactness.md for what is promised.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from autospec.decoding.answer import Answer
from autospec.decoding.offers import Offers
from autospec.decoding.tally import Stopwatch, Tally
from autospec.decoding.target import TargetSession
from autospec.decoding.verification import Committed, Verification
from autospec.drafts.base import DraftRequest, DraftSession, DraftSource, Proposal, checked, hidden_layers_of
from autospec.errors import ConfigurationError, DraftError, ExactnessError
from autospec.notices import warn
from autospec.randomness import spared
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome, Offer, RequestContext, Stop

MAX_OFFER = 16
"""Tokens that retrieval sources are asked for before a choice; a longer block asks again."""


CONTROL = Action(reason="control")
_NOTHING = Proposal()
NO_ROOM = "off: one token is left"


class Chooser(Protocol):
    """Picks an action before each block and learns what came of it."""

    @property
    def is_off(self) -> bool:
        """Will every block be a plain step, whatever happens, and is there nothing to be learned from them?"""

    def asks(self, segment: str, sources: Collection[str]) -> Collection[str]:
        """Of these retrieval sources, those that are to be asked before each choice."""

    def is_control(self, request: RequestContext) -> bool:
        """Is this request to be decoded plainly throughout, to measure what speed-up means?"""

    def choose(self, context: BlockContext) -> Action:
        """The action for the next block."""

    def verify_width(self, num_tokens: int, context_tokens: int) -> int:
        """Tokens that a forward over `num_tokens` is padded to; `num_tokens` itself where padding does not pay."""

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
        is_control: decode plainly throughout, to measure what speed-up means.
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
        is_control: bool,
    ) -> None:
        self._target = target
        self._answer = answer
        self._verification = verification
        self._chooser = chooser
        self._sources = dict(sources)
        self._learning: dict[str, Any] = {name: s for name, s in sources.items() if callable(getattr(s, "learn", None))}
        self._sessions: dict[str, DraftSession] = {}
        self._seeing = {name: layers for name, s in sources.items() if (layers := hidden_layers_of(s))}
        self._stoppable = frozenset(name for name, s in sources.items() if getattr(s, "takes_stop", False))
        self._retrieval = [name for name, s in sources.items() if getattr(s, "is_retrieval", False)]
        self._offers = Offers()
        self._drafted_at: dict[str, int] = {}  # source -> tokens of the text when it drafted last
        self._drafted_last: str | None = None  # the source of the last block
        self._offered: dict[str, tuple[Proposal, float]] = {}  # before this block: what, and seconds of asking
        target.hidden_layers = self._wanted_layers()
        self._request = request
        self._draft_request = draft_request
        self._text = text
        self._stretches_beyond = stretches_beyond
        self._last_position = window if window is not None else sys.maxsize
        ends = [end for end in (window, stretches_beyond) if end is not None]
        self._last_padded = min(ends) if window is not None else None
        self.tally = Tally(is_control=is_control)
        self._watch = Stopwatch()

    def run(self) -> None:
        """Decode until a stopping criterion holds."""
        for name, source in list(self._sources.items()):
            if failure := getattr(source, "failure", None):
                self._switch_off(name, DraftError(failure))
        input_ids = self._answer.tokens.on_device
        is_off = self._chooser.is_off
        if self.tally.is_control or is_off:
            self._see_nothing()
        logits = self._target.prefill(input_ids)
        self.tally.prefill_seconds = self._watch.lap()
        if self._sources and not is_off and (why := self._target.why_no_speculation or self._why_no_room()):
            self._note(f"decoded plainly: {why}")
            self._sources.clear()
            self._see_nothing()
        self._decode_block(logits, _NOTHING, input_ids)
        del logits  # a row of those of the whole prompt, with models that give no fewer
        self._watch.lap()
        with self._target.decoding():
            step = self._plain_step if is_off and self.tally.outcomes is None else self._block  # all are recorded alike
            while not self._answer.is_finished:
                step()

    def learn(self, num_tokens: int) -> None:
        """Show the answer, the last tokens of the text, to the sources that learn from answers."""
        for name, source in self._learning.items():
            try:
                source.learn(self._draft_request, self._text[len(self._text) - num_tokens :])
            except Exception as error:  # noqa: BLE001  # the answer is there, whatever happens to what is learnt from it
                self._note(f"{name} did not learn from the answer: {type(error).__name__}: {error}")

    def _block(self) -> None:
        """One block: draft up to k tokens, verify them in one target forward, commit."""
        context_tokens = len(self._text)
        action = CONTROL if self.tally.is_control else self._chosen()
        catch_up_tokens = self._backlog(action.source) if action.block_length else 0
        _, asking_seconds = self._offered.get(action.source, (None, 0.0))  # of what is used
        self.tally.decision_seconds += self._watch.lap() - asking_seconds
        proposal = self._propose(action)
        draft_seconds = self._watch.lap() + asking_seconds
        num_draft = len(proposal.tokens)
        padding = self._padding(proposal)
        padded_ids = self._answer.tokens.followed_by([*proposal.tokens, *padding])
        logits = self._target.forward(padded_ids, num_draft, len(padding))
        verify_seconds = self._watch.lap()
        input_ids = padded_ids[:, : padded_ids.shape[1] - len(padding)] if padding else padded_ids
        is_broken = num_draft > 0 and self._target.is_broken(logits)
        committed = self._one_by_one(proposal) if is_broken else self._decode_block(logits, proposal, input_ids)
        outcome = BlockOutcome(
            segment=self._request.segment,
            action=action,
            context_tokens=context_tokens,
            num_draft_tokens=num_draft,
            num_judged_tokens=committed.num_judged,
            num_accepted_tokens=committed.num_accepted,
            num_committed_tokens=committed.num_tokens,
            draft_seconds=draft_seconds - proposal.catch_up_seconds,
            verify_seconds=verify_seconds,
            correction_seconds=self._watch.lap() - committed.emission_seconds,
            emission_seconds=committed.emission_seconds,
            catch_up_seconds=proposal.catch_up_seconds,
            catch_up_tokens=catch_up_tokens,
            request=self._request,
            offers=self._offers.settle(self._text, is_finished=self._answer.is_finished),
            confidences=tuple(proposal.confidences),
            num_padding_tokens=len(padding),
            is_prepared=self._target.is_prepared,
        )
        self.tally.add(outcome)
        self._drafted_last = action.source if action.block_length else None
        if self._drafted_last is not None:
            self._drafted_at[action.source] = context_tokens
        with self._own_noise():
            self._chooser.observe(outcome)

    def _plain_step(self) -> None:
        """A block that nobody decides and nobody learns from."""
        input_ids = self._answer.tokens.on_device
        logits = self._target.forward(input_ids, 0)
        verify_seconds = self._watch.lap()
        emission_seconds = self._decode_block(logits, _NOTHING, input_ids).emission_seconds
        action = CONTROL if self.tally.is_control else OFF
        self.tally.add_plain_step(action, verify_seconds, self._watch.lap() - emission_seconds, emission_seconds)

    def _chosen(self) -> Action:
        """What is done in the next block."""
        self._offered = {}
        wanted = self._chooser.asks(self._request.segment, self._retrieval)
        names = [name for name in self._retrieval if name in wanted]  # what others would draft now is nobody's to know
        offers = {name: offer for name in names if (offer := self._ask(name))}
        context = BlockContext(
            request=self._request,
            context_tokens=len(self._text),
            output_tokens=self._answer.num_tokens,
            sources=tuple(self._sources),
            offers=offers,
            backlogs={name: self._backlog(name) for name in self._sources if name not in self._retrieval},
            stoppable=self._stoppable,
        )
        with self._own_noise():
            return self._possible(self._chooser.choose(context), context)

    def _ask(self, name: str) -> Offer | None:
        """What a retrieval source would propose; None where there is no room, or it is switched off."""
        length = min(MAX_OFFER, self._room())
        if length < 1 or name not in self._sources:
            return None
        started = time.perf_counter()
        proposal = self._drafted(name, length)
        if name not in self._sources:  # it failed
            return None
        self._offered[name] = (proposal, time.perf_counter() - started)
        return self._offers.add(name, proposal, len(self._text), self._answer.num_tokens)

    def _backlog(self, name: str) -> int:
        """Committed tokens that a source has not seen and did not draft itself."""
        is_up_to_date = name == self._drafted_last or name in self._retrieval
        return 0 if is_up_to_date else len(self._text) - self._drafted_at.get(name, 0)

    def _room(self) -> int:
        """Draft tokens that a block may have: the last of those left needs none, as the target's own token follows."""
        num_tokens = self._answer.num_tokens
        return min(
            self._request.max_new_tokens - num_tokens - 1,
            self._last_position - self._target.prefill_length - num_tokens,
        )

    def _padding(self, proposal: Proposal) -> list[int]:
        """Tokens verified after the drafts where a wider forward is cheaper; what becomes of them is never looked at.

        They may stand beyond the end of the answer, but only where the model is known to have positions for them and
        treats earlier ones as before.
        """
        num_draft = len(proposal.tokens)
        if not num_draft:
            return []  # a plain step costs what it costs in `generate`
        width = self._chooser.verify_width(num_draft + 1, len(self._text))
        num_tokens, end = self._answer.num_tokens, self._last_padded
        room = self._room() if end is None else end - self._target.prefill_length - num_tokens
        return [proposal.tokens[-1]] * (width - num_draft - 1) if width - 1 <= room else []

    def _possible(self, chosen: Action, context: BlockContext) -> Action:
        """The chosen action as far as it can be done now; what is asked, drafted and recorded then agree."""
        block_length = min(chosen.block_length, self._room())
        if chosen.source not in (NONE, *self._request.sources):
            usable = ", ".join([NONE, *context.sources])
            raise ConfigurationError(f"the policy chose draft source {chosen.source!r}: usable here are {usable}")
        if chosen.block_length == 0:
            return chosen
        if block_length < 1 or chosen.source not in self._sources:
            return replace(OFF, reason=NO_ROOM if block_length < 1 else "off: its source is switched off")
        return chosen if block_length == chosen.block_length else replace(chosen, block_length=block_length)

    def _propose(self, action: Action) -> Proposal:
        if action.block_length == 0:
            return Proposal()
        offered, _ = self._offered.get(action.source, (None, 0.0))
        if offered is None or len(offered.tokens) == MAX_OFFER < action.block_length:
            return self._drafted(action.source, action.block_length, action.stop)
        length = action.block_length
        return replace(offered, tokens=offered.tokens[:length], scores=offered.scores[:length])

    def _drafted(self, source: str, block_length: int, stop: Stop | None = None) -> Proposal:
        """What a source proposes; nothing where it fails, and it is then switched off."""
        try:
            with self._own_noise():
                options = {} if stop is None or source not in self._stoppable else {"stop": stop}
                proposal = self._session(source).propose(self._text, block_length, **options)
            proposal = self._checked(proposal, block_length)
            if proposal.draft_probs is not None and source in self._retrieval:  # always, whatever was drawn
                raise DraftError("its drafts are drawn, and a retrieval source's may not be")
            for note in proposal.notes:
                self._note(f"{source}: {note}")
            return proposal
        except Exception as error:  # a draft never decides what is said, so few may end a request
            may_have_drawn = self._request.do_sample and not self._draft_request.is_paired
            if may_have_drawn and source not in self._retrieval and not isinstance(error, DraftError):
                raise  # it may follow from a token drawn just now, and dropping that one would depend on its own draw
            self._switch_off(source, error)
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

    def _see_nothing(self) -> None:
        self._seeing.clear()
        self._target.hidden_layers = ()

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
        if self._seeing:
            self._show_states()
        return committed

    def _one_by_one(self, proposal: Proposal) -> Committed:
        """A block in whose forward a draft token broke the rows before its own: a plain step for each position."""
        self._target.take_back()
        total = Committed()
        for position in range(len(proposal.tokens) + 1):
            tokens, probs = proposal.tokens[position:], proposal.draft_probs
            rest = Proposal(tokens, probs[position:] if probs is not None and tokens else None)
            input_ids = self._answer.tokens.on_device
            committed = self._decode_block(self._target.forward(input_ids, 0), rest, input_ids)
            total.num_tokens += committed.num_tokens
            total.num_accepted += committed.num_accepted
            total.num_judged += committed.num_judged
            total.emission_seconds += committed.emission_seconds
            if self._answer.is_finished or not committed.num_accepted:
                break
        return total

    def _note(self, text: str) -> None:
        self.tally.notes.append(text)
        warn(text)
