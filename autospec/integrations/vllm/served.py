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
class Unsettled:
    """A step in which the answer may have ended: the next call tells whether the request goes on."""

    block: Block | None  # None: the step read the prompt, or is not judged
    tokens: list[int]
    seconds: float


class Served:
    """State of a request from its first token on.

    Args:
        history: its prompt.
        request: what policies may know.
        draft_request: what sources may know.
        sources: draft sources by name.
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
        is_control: bool,
        keeps_blocks: bool,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.history = history
        self.request = request
        self.draft_request = draft_request
        self.is_control = is_control
        self.tally = Tally(is_control=is_control, outcomes=[] if keeps_blocks else None)
        self.block: Block | None = None
        self.unsettled: Unsettled | None = None
        self.num_outside = 0  # tokens committed after the first one that belong to no block
        self.ignores_end = False  # it went on after a token that ends answers
        self.started_at: datetime | None = None  # when its first token was seen
        self.first_seen = self.last_seen = 0.0
        self._sources = dict(sources)
        self._sessions: dict[str, Any] = {}
        self._offers = Offers()

    @property
    def output_tokens(self) -> int:
        return len(self.history) - self.request.prompt_tokens

    @property
    def answer(self) -> list[int]:
        return self.history.text[self.request.prompt_tokens :]

    @property
    def sources(self) -> tuple[str, ...]:
        """Those not switched off."""
        return tuple(self._sources)

    def begin(self, now: float) -> None:
        """Its first token is there."""
        self.started_at, self.first_seen, self.last_seen = datetime.now(UTC), now, now

    def rest(self, action: Action, tokens: Sequence[int], seconds: float) -> None:
        """Take in plain steps that nobody looked at. Args: tokens: one of each step; seconds: of all of them."""
        self.tally.add_plain_step(action, seconds, times=len(tokens))
        if self.tally.outcomes is not None:
            start, each = len(self.history), seconds / len(tokens)
            self.tally.outcomes += [
                BlockOutcome(self.request.segment, action, start + i, 0, 0, 0, 1, verify_seconds=each)
                for i in range(len(tokens))
            ]
        self.history.append(tokens)

    def catch_up(self, tokens: Tokens) -> None:
        """Take in tokens that were committed without a call; what they came from is not known."""
        if self.unsettled is not None and self.unsettled.block is not None:
            self.num_outside += len(self.unsettled.tokens)
        self.block = self.unsettled = None
        self.history.append(tokens.tolist())
        self.num_outside += len(tokens)

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
        self, block: Block, tokens: Sequence[int], seconds: float, *, is_trimmed: bool, is_finished: bool = False
    ) -> BlockOutcome | None:
        """What became of a block, its tokens now being part of the history; None where that cannot be told.

        Args:
            tokens: that the engine committed.
            seconds: of the step.
            is_trimmed: the engine verified fewer tokens than it was given; of whom is not known.
            is_finished: no token follows.
        """
        drafted, accepted = block.tokens, len(tokens) - 1
        if is_finished and accepted < len(drafted) and list(tokens) == drafted[: accepted + 1]:
            accepted += 1  # the end itself was drafted
        if accepted > len(drafted) or list(tokens[:accepted]) != drafted[:accepted]:
            return None
        is_cut = accepted < len(drafted) and len(tokens) > accepted and tokens[accepted] == drafted[accepted]
        judged = accepted + (accepted < len(drafted) and not (is_cut or is_trimmed or len(tokens) == accepted))
        return BlockOutcome(
            segment=self.request.segment,
            action=block.action,
            context_tokens=len(self.history) - len(tokens),
            num_draft_tokens=len(drafted),
            num_judged_tokens=judged,
            num_accepted_tokens=accepted,
            num_committed_tokens=len(tokens),
            draft_seconds=block.draft_seconds,
            verify_seconds=seconds,
            catch_up_seconds=block.catch_up_seconds,
            request=self.request,
            offers=self._offers.settle(self.history.text, is_finished=is_finished),
        )

    def count(self, outcome: BlockOutcome, seconds: float) -> None:
        """Add a block to the sums. Args: seconds: that the step took, whoever's doing that was."""
        self.tally.add(replace(outcome, verify_seconds=seconds))


def plain(action: Action) -> Action:
    """A block without drafts, for the reason that the action gives."""
    return replace(OFF, reason=action.reason)
