"""One request that the engine is answering: its text, its draft sessions, what waits for a verdict, its sums."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from autospec.decoding.offers import Offers
from autospec.decoding.tally import Tally
from autospec.drafts.base import DraftRequest, DraftSource, Proposal, checked
from autospec.integrations.vllm.rows import History, Tokens
from autospec.notices import warn
from autospec.types import OFF, Action, BlockOutcome, Offer, RequestContext

MAX_OFFER = 16
"""Tokens that retrieval sources are asked for before a policy chooses."""


@dataclass(frozen=True, slots=True)
class Block:
    """What was given to the engine, until its next call says what became of it."""

    action: Action
    tokens: list[int]
    draft_seconds: float = 0.0
    catch_up_seconds: float = 0.0  # of sources that had not seen the prompt, in no draft's seconds
    is_judged: bool = True  # False: the policy was not asked, and learns nothing


@dataclass(frozen=True, slots=True)
class Step:
    """In which blocks were verified."""

    seconds: float = 0.0
    ratio: float = 1.0  # to what a step so wide usually takes
    num_cut: int = 0  # draft tokens that the engine was given and did not verify, of all requests
    is_cut_known: bool = True  # of which request they are


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A step in which the answer may have ended: the next call tells whether the request goes on."""

    block: Block | None  # None: the step read the prompt, or is not judged
    tokens: list[int]
    num_kept: int  # of these, up to the end
    step: Step


class Served:
    """State of a request from its first token on.

    Args:
        history: its prompt.
        request: what policies may know.
        draft_request: what sources may know.
        sources: draft sources by name.
        decoding: how tokens are chosen, as in a record.
        is_control: decoded plainly throughout.
        keeps_blocks: its blocks are kept one by one.
    """

    def __init__(
        self,
        history: History,
        request: RequestContext,
        draft_request: DraftRequest,
        sources: Mapping[str, DraftSource],
        *,
        decoding: str,
        is_control: bool,
        keeps_blocks: bool,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.decoding = decoding
        self.history = history
        self.request = request
        self.draft_request = draft_request
        self.is_control = is_control
        self.tally = Tally(is_control=is_control, outcomes=[] if keeps_blocks else None)
        self.block: Block | None = None
        self.unsettled: Unsettled | None = None
        self.num_unsure = 0  # last tokens that were committed, and may lie behind an end that was not seen
        self.ignores_end = False  # it went on after a token that ends answers
        self.started_at: datetime | None = None  # when its first token was seen
        self.first_seen = self.last_seen = 0.0
        self._sources = dict(sources)
        self._sessions: dict[str, Any] = {}
        self._offers = Offers()

    @property
    def output_tokens(self) -> int:
        """Committed so far."""
        return len(self.history) - self.request.prompt_tokens

    @property
    def num_outside(self) -> int:
        """Tokens committed after the first one that belong to no block."""
        return max(0, self.output_tokens - 1 - self.tally.num_committed_tokens)

    @property
    def num_sure_tokens(self) -> int:
        """Of the output tokens, those that are part of the answer for certain."""
        return self.output_tokens - self.num_unsure

    @property
    def answer(self) -> list[int]:
        return self.history.text[self.request.prompt_tokens :]

    @property
    def sources(self) -> tuple[str, ...]:
        """Those not switched off."""
        return tuple(self._sources)

    def commit(self, tokens: Sequence[int], now: float) -> None:
        """Take in what a step committed: in the last one of a request, if no end is seen, only the first is sure."""
        if self.started_at is None:
            self.started_at, self.first_seen = datetime.now(UTC), now
        self.last_seen = now
        self.history.append(tokens)
        self.num_unsure = len(tokens) - 1

    def rest(self, action: Action, tokens: Sequence[int], seconds: float, now: float) -> None:
        """Take in plain steps that nobody looked at. Args: tokens: one of each; seconds: of all; now: of the last."""
        self.tally.add_plain_step(action, seconds, times=len(tokens))
        if self.tally.outcomes is not None:
            start, each = len(self.history), seconds / len(tokens)
            self.tally.outcomes += [
                BlockOutcome(self.request.segment, action, start + i, 0, 0, 0, 1, verify_seconds=each)
                for i in range(len(tokens))
            ]
        self.history.append(tokens)
        self.last_seen, self.num_unsure = now, 0

    def catch_up(self, tokens: Tokens, now: float) -> None:
        """Take in tokens that were committed without a call; what they came from is not known."""
        self.block = self.unsettled = None
        self.commit(tokens.tolist(), now)

    def end(self) -> Unsettled | None:
        """No step follows. Returns: the last step, if the end is in it; nothing behind that is part of the answer."""
        last, self.unsettled = self.unsettled, None
        if last is not None:
            self.history.cut(len(last.tokens) - last.num_kept)
            self.num_unsure = 0
        return last

    def ask(self, name: str, most: int) -> tuple[Proposal, Offer]:
        """What a source would propose, as a proposal and as policies see it."""
        proposal = self.draft(name, most)
        return proposal, self._offers.add(name, proposal, len(self.history), self.output_tokens)

    def draft(self, name: str, block_length: int) -> Proposal:
        """What a source proposes; nothing where it fails, and it is then switched off for this request."""
        try:
            if name not in self._sessions:
                self._sessions[name] = self._sources[name].start(self.draft_request)
            proposal = self._sessions[name].propose(self.history.text, block_length)
            return checked(proposal, block_length, self.draft_request.vocab_size)
        except Exception as error:  # noqa: BLE001  # a draft never decides what is said
            self._sources.pop(name, None)
            self._sessions.pop(name, None)
            self.tally.notes.append(f"{name} switched off: {type(error).__name__}: {error}")
            warn(self.tally.notes[-1])
            return Proposal()

    def settle(
        self, block: Block, tokens: Sequence[int], step: Step, *, is_finished: bool = False
    ) -> BlockOutcome | None:
        """What became of a block, its tokens now being part of the history; None where that cannot be told.

        Args:
            tokens: that the engine committed.
            step: that it was verified in.
            is_finished: no token follows.
        """
        drafted, accepted = block.tokens, len(tokens) - 1
        if is_finished and accepted < len(drafted) and list(tokens) == drafted[: accepted + 1]:
            accepted += 1  # the end itself was drafted
        if accepted > len(drafted) or list(tokens[:accepted]) != drafted[:accepted]:
            return None
        is_cut = accepted < len(drafted) and len(tokens) > accepted and tokens[accepted] == drafted[accepted]
        is_refused = accepted < len(drafted) - step.num_cut and len(tokens) > accepted and not is_cut
        return BlockOutcome(
            segment=self.request.segment,
            action=block.action,
            context_tokens=len(self.history) - len(tokens),
            num_draft_tokens=len(drafted),
            num_judged_tokens=accepted + is_refused,
            num_accepted_tokens=accepted,
            num_committed_tokens=len(tokens),
            draft_seconds=block.draft_seconds,
            verify_seconds=step.seconds,
            catch_up_seconds=block.catch_up_seconds,
            request=self.request,
            offers=self._offers.settle(self.history.text, is_finished=is_finished),
        )


def plain(action: Action) -> Action:
    """A block without drafts, for the reason that the action gives."""
    return replace(OFF, reason=action.reason)
