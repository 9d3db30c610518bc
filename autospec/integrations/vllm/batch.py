"""One engine's batch: what became of the last drafts, and the next ones, at each of the engine's calls."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autospec.controller import Controller
from autospec.costs.batches import BatchCosts
from autospec.costs.steps import STALL
from autospec.drafts.base import DraftRequest, DraftSource, Proposal
from autospec.errors import ConfigurationError
from autospec.integrations.vllm.quiet import Quiet
from autospec.integrations.vllm.rows import History, Tokens, match
from autospec.integrations.vllm.sampling import UNKNOWN, Sampling
from autospec.integrations.vllm.served import MAX_OFFER, Block, Served, Step, Unsettled, plain
from autospec.integrations.vllm.switch import Kind, Switch
from autospec.types import NONE, Action, BlockContext, Offer, RequestContext

AWAY_SECONDS = 10.0
"""A request in no row for so long has ended; until then it may have been preempted."""
MOST_AWAY = 4096
REST_SECONDS = 60.0
"""Without a call for so long the engine has nothing to answer, and what was in its rows has ended: no step takes it."""
STALLED = 4.0
"""Times what a step of its width takes, as which a longer one counts where drafting is compared with none."""
LEAST_SEEN = 16
"""Steps before it is known what one takes."""
_SHARE_KEPT = 0.95
_CONTROL = Action(reason="control")
_LOSING = Action(reason="off: it loses at this batch size, or plain steps are measured")
_ENDED = Action(reason="off: it has ended")
_NO_ROOM = Action(reason="off: no room")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the engine."""

    num_speculative_tokens: int
    max_model_len: int
    end_tokens: frozenset[int]  # that end an answer, unless a request says otherwise


class Batch:
    """Follows the requests of one engine from call to call. Calls come from one thread at a time.

    Args:
        limits: of the engine.
        sources: retrieval sources by name.
        controller: chooses, and learns.
        costs: of steps; learned here.
        segment_of: the segment of a prompt and how it is decoded.
        draft_request_of: what sources may know of a request in a segment.
        finish: takes a request that has ended.
        trace: share of the requests whose blocks are kept one by one.
        clock: seconds.
    """

    def __init__(
        self,
        limits: Limits,
        sources: Mapping[str, DraftSource],
        controller: Controller,
        costs: BatchCosts,
        *,
        segment_of: Callable[[Sequence[int], Sampling], str],
        draft_request_of: Callable[[str], DraftRequest],
        finish: Callable[[Served], None],
        trace: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limits = limits
        self._sources = dict(sources)
        self._controller = controller
        self._costs = costs
        self._segment_of = segment_of
        self._draft_request_of = draft_request_of
        self._finish = finish
        self._trace = trace
        self._clock = clock
        self._random = random.Random()
        self._switch = Switch(costs.step_seconds)
        self._rows: list[Served] = []
        self._away: dict[str, tuple[Served, float]] = {}
        self._returned: float | None = None  # when the last call did
        self._spent = 0.0  # seconds of that call
        self._is_near_the_end = False  # vLLM then asks for no drafts, of any request
        self._kind: Kind | None = None  # of the batch, for the switch; None: nobody in it may draft
        self._was_on = True
        self._quiet: Quiet | None = None
        self._drafting_share = 1.0

    def step(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: NDArray[np.int32],
        token_ids: Tokens,
        num_step_tokens: int | None = None,
        most: int | None = None,
        sampling: Callable[[int], Sampling] = lambda row: UNKNOWN,
    ) -> list[list[int]]:
        """Drafts for each row, none where none pay.

        Args:
            sampled: [rows], tokens that the step committed for each; none while a prompt is read.
            lengths: [at least rows], tokens of each row, those included.
            token_ids: [at least rows, longest].
            num_step_tokens: that the step ran over, as far as that is known.
            most: draft tokens of a request, where the engine wants fewer than usual.
            sampling: of the request in a row.
        """
        now = self._clock()
        step_seconds = 0.0 if self._returned is None else now - self._returned
        if self._quiet is not None:
            if self._quiet.takes(sampled, lengths, token_ids, step_seconds, self._limits.end_tokens, now):
                self._learn_step(len(sampled), len(sampled), len(sampled), step_seconds)
                self._was_on = self._kind is not None and self._switch.is_on(self._kind)
                if not self._was_on:
                    return self._return([[] for _ in sampled], now)
                self._count_quiet()
                return self._return(self._propose([1] * len(sampled), most), now)
            self._count_quiet()
        counts = [len(tokens) for tokens in sampled]
        before = [length - count for length, count in zip(lengths[: len(counts)].tolist(), counts, strict=True)]
        matched = match(
            self._rows,
            [served for served, _ in self._away.values()],
            before,
            token_ids,
            may_have_missed=self._is_near_the_end,
            ends=self._limits.end_tokens,
        )
        served = [
            each or self._new(token_ids[row, : before[row]], sampling(row)) for row, each in enumerate(matched.found)
        ]
        self._leave(matched.gone, served, now)
        self._rows = served
        for row, num_missed in enumerate(matched.num_missed):
            if num_missed:
                served[row].catch_up(token_ids[row, before[row] - num_missed : before[row]], now)
        self._judge(sampled, matched.is_sure, step_seconds, num_step_tokens, now)
        self._was_on = self._is_next_on()
        drafts = self._propose(counts, most)
        is_plain = all(counts) and not any(each.unsettled for each in served)
        self._quiet = Quiet(lengths[: len(counts)], token_ids) if is_plain and not self._was_on and served else None
        return self._return(drafts, now)

    def sweep(self) -> None:
        """End requests that have been away for long, and all of them once the engine rests."""
        now = self._clock()
        if self._returned is not None and now - self._returned > REST_SECONDS:
            self._end_rows()
        for served, since in list(self._away.values()):
            if now - since > AWAY_SECONDS or len(self._away) > MOST_AWAY:
                self._end(served)

    def close(self) -> None:
        """End all requests."""
        self._end_rows()
        for served, _ in list(self._away.values()):
            self._end(served)

    def forget(self) -> None:
        """A step has failed: nothing that is pending can be judged. Requests go on, and are caught up with."""
        for served in self._rows:
            served.block = None
        self._returned = None
        self._count_quiet()
        self._is_near_the_end = True  # as far as is known

    def _end_rows(self) -> None:
        self._count_quiet()
        rows, self._rows, self._returned = self._rows, [], None
        for served in rows:
            self._end(served)

    def _return(self, drafts: list[list[int]], now: float) -> list[list[int]]:
        self._returned = self._clock()
        self._spent = self._returned - now
        return drafts

    def _is_next_on(self) -> bool:
        """May the next step have drafts?"""
        self._kind = None
        going_on = [each for each in self._rows if each.unsettled is None]
        if not going_on:
            return False
        is_sampled = any(each.request.do_sample for each in going_on)
        self._costs.serve(len(going_on), self._drafting_share, is_sampled=is_sampled)
        if all(each.is_control for each in going_on):
            return False  # whatever the switch thinks: that tells nothing of drafting
        self._kind = Kind.of(len(going_on), is_sampled=is_sampled, segment=going_on[0].request.segment)
        return self._switch.is_on(self._kind)

    def _learn_step(self, num_requests: int, num_verified: int, num_committed: int, step_seconds: float) -> None:
        """Args: num_requests: of which each has got tokens; the others are of all of these together."""
        is_usual_known = self._costs.num_steps >= LEAST_SEEN
        most = STALLED * self._costs.step_seconds(num_verified) if is_usual_known else math.inf
        self._costs.observe(num_verified, step_seconds)
        if self._kind is not None:
            seconds = min(step_seconds, most) + self._spent
            self._switch.observe(self._kind, num_committed, seconds, num_requests=num_requests, was_on=self._was_on)

    def _count_quiet(self) -> None:
        """Count the steps that were only followed."""
        quiet, self._quiet = self._quiet, None
        if quiet is None:
            return
        self._is_near_the_end = quiet.most_tokens + self._limits.num_speculative_tokens > self._limits.max_model_len
        if quiet.num_steps:
            for served, tokens in zip(self._rows, quiet.by_row(), strict=True):
                served.rest(_CONTROL if served.is_control else _LOSING, tokens, quiet.seconds, quiet.last_seen)

    def _new(self, prompt: Tokens, sampling: Sampling) -> Served:
        tokens = History(prompt)
        segment = self._segment_of(tokens.text, sampling)
        request = RequestContext(
            segment=segment,
            prompt_tokens=len(tokens),
            max_new_tokens=max(1, self._limits.max_model_len - len(tokens)),
            do_sample=sampling.do_sample,
            sources=tuple(self._sources),
            temperature=sampling.temperature,
        )
        return Served(
            tokens,
            request,
            self._draft_request_of(segment),
            self._sources,
            decoding=sampling.decoding,
            is_control=self._controller.is_control(request),
            keeps_blocks=self._random.random() < self._trace,
        )

    def _leave(self, gone: Collection[Served], here: Sequence[Served], now: float) -> None:
        for served in here:
            self._away.pop(served.id, None)
        for served in gone:
            served.block = None  # whatever it drafted was not verified, or not seen to be
            if served.unsettled is not None or not served.output_tokens:
                self._end(served)
            else:
                self._away.setdefault(served.id, (served, now))

    def _end(self, served: Served) -> None:
        self._away.pop(served.id, None)
        last = served.end()
        if last is not None and last.block is not None:
            self._settle(served, last.block, last.tokens[: last.num_kept], last.step, is_finished=True)
        if served.output_tokens:
            self._finish(served)

    def _judge(
        self,
        sampled: Sequence[Sequence[int]],
        is_sure: Sequence[bool],
        step_seconds: float,
        num_step_tokens: int | None,
        now: float,
    ) -> None:
        """Read off what the step committed, and learn from it."""
        blocks = [each.block for each in self._rows]
        num_drafts = [len(block.tokens) for block in blocks if block]
        num_verified = sum(num_drafts) + len(num_drafts)
        is_pure = bool(blocks) and all(blocks) and all(sampled)  # no prompt is read in it
        num_committed = sum(map(len, sampled))
        num_cut = 0
        if (
            is_pure and num_step_tokens is not None and num_step_tokens >= num_committed
        ):  # else it counts something else
            num_cut = max(0, num_verified - num_step_tokens)
            num_verified -= num_cut
        ratio = 1.0
        if is_pure and step_seconds > 0.0:
            ratio = min(max(step_seconds / self._costs.step_seconds(num_verified), 1.0 / STALL), STALL)
        is_cut_known = not num_cut or sum(map(bool, num_drafts)) == 1
        step = Step(step_seconds, ratio, num_cut, is_cut_known)
        for each, tokens, sure in zip(self._rows, sampled, is_sure, strict=True):
            block, each.block = each.block, None
            if block is not None and not is_cut_known and 0 < len(block.tokens) <= num_cut:
                block = None  # none of it may have been verified: what was refused would not be told from what was cut
            if tokens:
                self._commit(each, block if sure else None, tokens, step, now)
        if is_pure and step_seconds > 0.0:
            behind = sum(len(each.unsettled.tokens) - each.unsettled.num_kept for each in self._rows if each.unsettled)
            self._learn_step(len(sampled), num_verified, num_committed - behind, step_seconds)

    def _commit(self, served: Served, block: Block | None, tokens: Sequence[int], step: Step, now: float) -> None:
        if served.unsettled is not None:  # it went on after what would have been its end
            late, served.unsettled, served.ignores_end = served.unsettled, None, True
            if late.block is not None:
                self._settle(served, late.block, late.tokens, late.step)
        served.commit(tokens, now)
        ends = self._limits.end_tokens
        if not served.ignores_end and not ends.isdisjoint(tokens):
            num_kept = next(i for i, token in enumerate(tokens, 1) if token in ends)
            served.unsettled = Unsettled(block, list(tokens), num_kept, step)
        elif block is not None:
            self._settle(served, block, tokens, step)

    def _settle(
        self, served: Served, block: Block, tokens: Sequence[int], step: Step, *, is_finished: bool = False
    ) -> None:
        """Count a block, and let the policy learn from it.

        The seconds that a policy learns are those that the block would have taken had all requests done alike: whatever
        others drafted is not this block's doing. Where it is not known whose drafts were cut, it learns nothing: what
        was refused would be missing, and what was accepted not.
        """
        outcome = served.settle(block, tokens, step, is_finished=is_finished)
        if outcome is None:
            return
        served.tally.add(outcome)
        if block.is_judged and step.is_cut_known:
            own = step.ratio * self._costs.verify_seconds(outcome.num_draft_tokens + 1, outcome.context_tokens)
            self._controller.observe(replace(outcome, verify_seconds=own))

    def _propose(self, counts: Sequence[int], most: int | None) -> list[list[int]]:
        """The next drafts, after which each request that goes on has a block."""
        drafts: list[list[int]] = []
        num_asked = num_drafted = longest = 0
        for each, count in zip(self._rows, counts, strict=True):
            tokens: list[int] = []
            if not count:
                pass  # its prompt is being read
            elif each.unsettled is not None:
                each.block = Block(_ENDED, tokens, is_judged=False)
            elif each.is_control:
                each.block = Block(_CONTROL, tokens)
            elif not self._was_on:
                each.block = Block(_LOSING, tokens, is_judged=False)
            else:
                each.block = self._choose(each, most)
                tokens = each.block.tokens
                self._costs.observe_draft(each.block.draft_seconds)
                num_asked += 1
                num_drafted += bool(tokens)
            drafts.append(tokens)
            longest = max(longest, len(each.history) + len(tokens))
        self._is_near_the_end = longest + self._limits.num_speculative_tokens > self._limits.max_model_len
        if num_asked:
            share = num_drafted / num_asked
            self._drafting_share = _SHARE_KEPT * self._drafting_share + (1.0 - _SHARE_KEPT) * share
        return drafts

    def _choose(self, served: Served, most: int | None) -> Block:
        """What the next block of a request is."""
        started = self._clock()
        wanted = self._limits.num_speculative_tokens if most is None else most
        room = min(wanted, self._limits.max_model_len - len(served.history) - 1)
        if room < 1:
            return Block(_NO_ROOM, [])
        proposals: dict[str, Proposal] = {}
        offers: dict[str, Offer] = {}
        for name in self._controller.asks(served.request.segment, served.sources):
            proposal, offer = served.ask(name, min(MAX_OFFER, room))
            if name in served.sources:  # it has not failed
                proposals[name], offers[name] = proposal, offer
        action = self._controller.choose(
            BlockContext(
                request=served.request,
                context_tokens=len(served.history),
                output_tokens=served.output_tokens,
                sources=served.sources,
                offers=offers,
            )
        )
        if action.source not in (NONE, *self._sources):
            usable = ", ".join([NONE, *self._sources])
            raise ConfigurationError(f"the policy chose draft source {action.source!r}: usable here are {usable}")
        if action.source not in served.sources:
            action = plain(action)
        if action.block_length:
            action = replace(action, block_length=min(action.block_length, room))
            known = proposals.get(action.source)
            if known is None or len(known.tokens) == MAX_OFFER < action.block_length:
                proposals[action.source] = served.draft(action.source, action.block_length)
        tokens = proposals[action.source].tokens[: action.block_length] if action.block_length else []
        catch_up = sum(proposal.catch_up_seconds for proposal in proposals.values())
        return Block(action, tokens, max(0.0, self._clock() - started - catch_up), catch_up)
