"""The records that the parts of autospec hand to each other. Counts and seconds only; a ratio is a property."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

NONE = "none"
"""The draft source that proposes nothing: a plain target step."""


class Stop(Protocol):
    """When a model draft ends its block. Asked about one position after the other; of one block only."""

    def wants_more(self) -> bool:
        """Is the draft to look at the next position?"""

    def ends(self, margin: float, entropy: float) -> bool:
        """Does the block end before this position? Asked before a token is drawn from q there.

        Args:
            margin: of the draft's two largest probabilities, the difference.
            entropy: of the draft's distribution, nats.
        """


class Reason:
    """Why an action was chosen. The words are made when somebody reads them: of most blocks only the kind is counted.

    Args:
        kind: the first word, as in `Action.reason_kind`.
        words: gives all of them, the kind first. Called once at most.
    """

    __slots__ = ("_words", "kind")

    def __init__(self, kind: str, words: Callable[[], str]) -> None:
        self.kind = kind
        self._words: str | Callable[[], str] = words

    def __str__(self) -> str:
        if not isinstance(self._words, str):
            self._words = self._words()
        return self._words

    def __repr__(self) -> str:
        return repr(str(self))

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, (str, Reason)) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True, slots=True)
class Action:
    """What is done in one block: a draft source and the number of draft tokens asked of it."""

    source: str = NONE
    block_length: int = 0
    reason: str | Reason = ""  # the kind first, as in `off: ngram:4 0.90x; left out: suffix (nothing found)`
    gain: float | None = None  # predicted tokens per second over those of plain steps, where the policy predicts
    stop: Stop | None = field(default=None, compare=False, repr=False)  # for sources in `BlockContext.stoppable`

    @property
    def label(self) -> str:
        """`none`, or source and block length as in `ngram:4`."""
        return NONE if self.block_length == 0 else f"{self.source}:{self.block_length}"

    @property
    def reason_kind(self) -> str:
        """The first word of the reason, `unsaid` when there is none: few enough to count by."""
        if isinstance(self.reason, Reason):
            return self.reason.kind
        return self.reason.partition(":")[0].partition(" ")[0] or "unsaid"


OFF = Action()


def split_label(label: str) -> tuple[str, int]:
    """Draft source and block length of `Action.label`."""
    source, _, length = label.rpartition(":")
    return (source, int(length)) if source and length.isdecimal() else (NONE, 0)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a policy may know about a request before its first block."""

    segment: str
    prompt_tokens: int
    max_new_tokens: int
    do_sample: bool
    sources: tuple[str, ...]  # usable in this request, `none` not listed
    temperature: float = 0.0  # 0 when greedy


@dataclass(frozen=True, slots=True)
class Offer:
    """What a retrieval source would propose now. It follows from the committed tokens, so a policy may know it."""

    num_tokens: int  # 0: a miss
    match_length: int = 0  # last committed tokens that were found again; 0 where the source does not say
    scores: tuple[float, ...] = ()  # [num_tokens] how likely each token and all before it are, as the source sees it
    recent_acceptance: float | None = None  # share of first tokens right lately, in this request; None before any


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What a policy may know before a block; nothing here depends on a token not yet committed."""

    request: RequestContext
    context_tokens: int  # committed tokens, prompt included
    output_tokens: int  # committed tokens of the answer
    sources: tuple[str, ...]  # still usable now (a source that failed is gone)
    offers: Mapping[str, Offer] = field(default_factory=dict)  # of retrieval sources, where the policy wants them
    backlogs: Mapping[str, int] = field(default_factory=dict)  # of the others: tokens that each would first catch up on
    stoppable: frozenset[str] = frozenset()  # sources that heed `Action.stop`

    @property
    def segment(self) -> str:
        return self.request.segment

    @property
    def tokens_left(self) -> int:
        return self.request.max_new_tokens - self.output_tokens


@dataclass(frozen=True, slots=True)
class OfferOutcome:
    """What would have become of an offer, whether it was used or not: known once enough tokens are committed."""

    source: str
    offer: Offer
    output_tokens: int  # committed tokens of the answer when it was made
    num_judged_tokens: int  # of its tokens, those whose fate is known: the answer may end before the others
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """What one block did. Prefill, catch-up and compilation are never in it."""

    segment: str
    action: Action
    context_tokens: int  # committed tokens before the block
    num_draft_tokens: int  # really proposed, <= action.block_length
    num_judged_tokens: int  # draft tokens whose fate was decided: those cut off by EOS or length are not
    num_accepted_tokens: int
    num_committed_tokens: int  # acceptance length, recovered or bonus token included
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    correction_seconds: float = 0.0  # choosing tokens: processors, acceptance, residual
    emission_seconds: float = 0.0  # stopping criteria and streamers
    catch_up_seconds: float = 0.0  # bringing a draft's cache up to date; never charged to an action
    catch_up_tokens: int = 0  # that the source had not seen when it was asked
    request: RequestContext | None = None  # None where blocks were read back from a record
    offers: tuple[OfferOutcome, ...] = ()  # those of this block and earlier ones whose fate became known with it
    confidences: tuple[tuple[float, float], ...] = ()  # margin and entropy of q at each position that a stop looked at
    num_padding_tokens: int = 0  # verified besides, since a wider forward is cheaper on this device
    is_prepared: bool = False  # verified by a prepared forward

    @property
    def output_tokens(self) -> int:
        """Committed tokens of the answer before the block; 0 where the request is not known."""
        return 0 if self.request is None else max(0, self.context_tokens - self.request.prompt_tokens)

    @property
    def num_draft_steps(self) -> int:
        """Positions that drafting took time for: fewer than were asked for where a stop ended the block."""
        return len(self.confidences) or self.action.block_length

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.correction_seconds + self.emission_seconds

    def untimed(self) -> BlockOutcome:
        """The same block, where what it took is not to be learned from."""
        return replace(
            self,
            draft_seconds=0.0,
            verify_seconds=0.0,
            correction_seconds=0.0,
            emission_seconds=0.0,
            catch_up_seconds=0.0,
            catch_up_tokens=0,
        )


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of one request by phase; they sum to the request's total."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    correction: float = 0.0
    emission: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify + self.correction + self.emission + self.other


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where requests ran: one row for many requests."""

    host: str
    device: str  # as in `cpu: AMD EPYC, 2 threads` or `cuda: NVIDIA H200`
    target: str
    dtype: str
    drafts: tuple[str, ...]
    versions: Mapping[str, str]  # autospec, python, torch, transformers; the backend, where forwards were prepared
    model_bytes: int | None = None  # weights of target and drafts, those shared counted once


@dataclass(frozen=True, slots=True)
class ActionTally:
    """What the blocks of one action came to within a request. Catch-up seconds belong to no action."""

    blocks: int = 0
    num_draft_tokens: int = 0
    num_judged_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0  # +1 of each block included
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    correction_seconds: float = 0.0
    emission_seconds: float = 0.0
    at_risk: tuple[int, ...] = ()  # [j] blocks in which draft position j + 1 was judged
    accepted: tuple[int, ...] = ()  # [j] blocks in which it was accepted


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """Prompt and answer of a request, where they are kept."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    options: Mapping[str, object]  # how it was decoded, plain JSON values


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One `generate` call. Counts and seconds are stored, ratios never."""

    request_id: str  # 32 hexadecimal digits
    started_at: datetime  # UTC
    segment: str
    policy: str
    is_control: bool  # decoded plainly throughout, to measure what speed-up means
    do_sample: bool
    decoding: str  # as in `greedy` or `sample temperature=0.8 top_p=0.95`
    prompt_tokens: int
    output_tokens: int
    seconds: PhaseSeconds
    blocks: int = 0  # prefill, which commits the first token, is no block
    num_draft_tokens: int = 0
    num_judged_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_lengths: Mapping[int, int] = field(default_factory=dict)  # acceptance length (+1 included) -> blocks
    at_risk: tuple[int, ...] = ()  # [j] blocks in which draft position j + 1 was judged
    accepted: tuple[int, ...] = ()  # [j] blocks in which draft position j + 1 was accepted
    actions: Mapping[str, int] = field(default_factory=dict)  # Action.label -> blocks
    fallback_reason: str | None = None  # why the call was left to the original `generate`
    notes: str | None = None  # what was switched off during the request, and why
    error: str | None = None
    run: str | None = None  # label of an experiment or demonstration
    deployment: Deployment | None = None
    by_action: Mapping[str, ActionTally] = field(default_factory=dict)  # Action.label -> what its blocks did
    decisions: Mapping[str, int] = field(default_factory=dict)  # Action.label, a space, kind of reason -> blocks
    policy_version: str | None = None  # of the policy's settings, as in `policy_versions`
    predicted_control_seconds: float | None = None  # what plain decoding would have taken, by the cost model
    peak_memory_bytes: int | None = None  # on an accelerator of the request, on the CPU of the process so far
    trace: bytes | None = None  # blocks one by one, see telemetry/traces.py
    tokens: RecordedTokens | None = None  # only where recording is switched on

    @property
    def total_seconds(self) -> float:
        return self.seconds.total

    @property
    def usual_action(self) -> str | None:
        """The action of most blocks; None when no block ran."""
        return max(self.actions, key=lambda label: (self.actions[label], label)) if self.actions else None

    @property
    def usual_source(self) -> str:
        """The draft source of most blocks."""
        return split_label(self.usual_action or NONE)[0]

    @property
    def block_tokens(self) -> int:
        """Tokens committed by blocks, +1 included."""
        return sum(length * blocks for length, blocks in self.acceptance_lengths.items())

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed per block, +1 included; None when no block ran."""
        return self.block_tokens / self.blocks if self.blocks else None


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """The settings that a policy had, and who or what made them."""

    name: str
    version: str  # digest of name and settings
    settings: Mapping[str, object]  # plain JSON values
    made_by: str  # as in `wrap` or `autospec tune`
    made_at: datetime  # UTC


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy had learned in one process."""

    deployment: Deployment
    policy: str
    version: str  # of its settings, as in `PolicyVersion.version`
    process: str  # 32 hexadecimal digits, of one wrapped model
    updated_at: datetime  # UTC
    state: Mapping[str, object]  # what `policy.state()` gave: plain JSON values, of segments the newest last
    inherited: Mapping[str, datetime] = field(
        default_factory=dict
    )  # process -> when the state that it began with was made


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """A measured point of the cost model."""

    deployment: Deployment
    measured_at: datetime  # UTC
    source: str  # `target`, or the draft source
    tokens: int  # verified (drafts + 1), or drafted
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompt decoded plainly (control) and under a policy, side by side."""

    control_request_id: str
    request_id: str
    is_identical: bool | None  # token by token; None where the two were sampled from different noise
    first_difference: int | None = None  # output position of the first differing token
    logit_gap: float | None = None  # target's own gap between the two tokens there, plain forward
    is_tie: bool | None = None  # the gap lies within the stated tolerance of the dtype


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has counted since it began, all its requests together. None: it does not say."""

    engine: str  # as in `host:8000`; of several in one process, `host:8000/1`
    target: str
    device: str
    source: str  # what drafts there
    scraped_at: datetime  # UTC
    began_at: datetime | None  # when it began to count
    requests: int | None = None  # that have ended, however
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # of requests that have not ended, too
    request_tokens: int | None = None  # output tokens of those that have ended
    request_seconds: float | None = None  # that these ran for, waiting not counted
    steps: int | None = None  # of the engine
    num_drafts: int | None = None  # a request's steps that had draft tokens; None: it does not speculate
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    accepted: tuple[int, ...] = ()  # [j] drafts of which at least j + 1 tokens were accepted
