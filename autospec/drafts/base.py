"""What every draft source is: a `DraftSource` that is shared, and one `DraftSession` per request that holds all state.

Contracts (every source runs the same contract tests):

- q contract: `Proposal.draft_probs` is exactly the distribution that each token was drawn from. A deterministic source
  has a one-hot q, written as None.
- non-anticipation: whether a token is submitted never depends on that token's own draw, nor on a later one.
- a session ends with its request; nothing of it reaches the next one.
- a session sees hidden states of committed tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from autospec.errors import DraftError
from autospec.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor, device, dtype
    from transformers import LogitsProcessorList, PreTrainedModel

    from autospec.backends.static_model import StaticModel


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a source may know about the request it drafts for."""

    device: device
    vocab_size: int  # of the target's logits
    do_sample: bool
    processors: LogitsProcessorList  # those of the target that are pure, for the draft's own logits
    randomness: Randomness
    scores_dtype: dtype  # in which draft probabilities are formed
    is_paired: bool  # draw with the noise that the target will use; otherwise with noise of one's own
    segment: str = "default"
    target_cache: Callable[[], Any] | None = None  # what the target has cached; to be read only
    static_draft: Callable[[Any], StaticModel | None] | None = None  # a draft model whose forwards were prepared


@dataclass(slots=True)  # not frozen, which would be a fifth of what retrieval takes for a draft
class Proposal:
    """Draft tokens of one block. `draft_probs` None: every token had probability 1 (one-hot q)."""

    tokens: list[int] = field(default_factory=list)  # [k]
    draft_probs: Tensor | None = None  # [k, vocab_size], float32
    catch_up_seconds: float = 0.0  # spent on tokens committed by other sources; not part of drafting
    notes: Sequence[str] = ()  # what went wrong and was worked around, for the request's record
    scores: Sequence[float] = ()  # [k], for each token how likely it and all before it are, as the source sees it
    match_length: int = 0  # last committed tokens that were found again, of sources that look for them
    confidences: Sequence[tuple[float, float]] = ()  # margin and entropy at each position that a stop was asked about


class DraftSession(Protocol):
    """Drafts for one request."""

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        """Up to `block_length` tokens that may follow `committed`.

        Args:
            committed: prompt and answer so far, without padding; it only ever grows during a session.
            block_length: at least 1.

        Raises:
            DraftError: the source cannot go on; it is switched off for the rest of the request. Raise it before drawing
                a token, or submit what was drawn and raise it at the next call.
        """


class SeeingSession(DraftSession, Protocol):
    """A session of a source that has `hidden_layers`."""

    def see(self, hidden_states: Sequence[Tensor]) -> None:
        """Take in what the target made of the tokens committed since the last call; called after each of its forwards.

        Together with the calls before, these are the states of all committed tokens but the last, whoever drafted them.
        Keep them and return: this is called in every block, and few of them are followed by `propose`.

        Args:
            hidden_states: for each of `hidden_layers`, in their order, [n, hidden_size], in the target's dtype. Nothing
                stands for the tokens of a prompt that the target did not run in one forward.

        Raises:
            DraftError: as in `propose`.
        """


class DraftSource(Protocol):
    """A kind of draft with its settings; holds no state of any request.

    It may also have a method `learn(request: DraftRequest, answer: Sequence[int])`, which is called with the tokens of
    every answer that has ended.

    It may have `is_retrieval` = True: its drafts follow from the committed tokens alone, cost next to nothing, and the
    beginning of a draft is one, too. Policies may then know what it would propose before they choose.

    It may have `takes_stop` = True: `propose(committed, block_length, stop=...)` then asks an `autospec.types.Stop`,
    where it is given one, before each position, and reports in `Proposal.confidences` what it was asked with.

    It may have `catches_up` = False: it goes on from what the target has cached, and reads nothing itself.

    It may have `static_draft`, a model that its sessions run by `DraftRequest.static_draft` where that gives something:
    forwards of fixed shapes, prepared when the target is wrapped.

    It may have `failure`, why it will not draft: it is then off in every request, with this in the record.

    It may have `hidden_layers`, once attached: indices of those of the target's hidden states (as transformers counts
    them, 0 is the embedding's output, -1 the last) that its sessions want to see. The target is then asked for these
    and no others, and the sessions are `SeeingSession`s, started with the request. Try in `attach` whether it has them.
    """

    name: str

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        """Check that drafting for `target` is possible.

        Raises:
            DraftError: it is not, with the reason and the remedy.
        """

    def start(self, request: DraftRequest) -> DraftSession:
        """A session for one request."""


def hidden_layers_of(source: DraftSource) -> tuple[int, ...]:
    """Which hidden states of the target the source's sessions want to see; most want none."""
    return tuple(getattr(source, "hidden_layers", ()))


def with_logits(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The first tokens, up to one that the target has no logits for: a prompt may hold such ids, no answer can."""
    if not tokens or max(tokens) < vocab_size:
        return list(tokens)
    stop = next((i for i, token in enumerate(tokens) if token >= vocab_size), len(tokens))
    return list(tokens[:stop])


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value <= 1.0


def _is_confidence(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(v, float) and math.isfinite(v) for v in value)


def checked(proposal: Proposal, block_length: int, vocab_size: int) -> Proposal:
    """The proposal, if it is one that can be verified.

    Raises:
        DraftError: it is no proposal, holds too many tokens or ids that do not exist, its q has another shape, or what
            it says of itself (scores, length of its match, seconds) cannot be.
    """
    if not isinstance(proposal, Proposal):
        raise DraftError(f"proposed {type(proposal).__name__} instead of a Proposal")
    tokens = proposal.tokens
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise DraftError("proposed tokens that are not a list of whole numbers")
    if len(tokens) > block_length:
        raise DraftError(f"proposed {len(tokens)} tokens when asked for {block_length}")
    if unknown := next((token for token in tokens if not 0 <= token < vocab_size), None):
        raise DraftError(f"proposed token id {unknown}, the target has ids 0 to {vocab_size - 1}")
    scores, length, seconds = proposal.scores, proposal.match_length, proposal.catch_up_seconds
    if not isinstance(scores, (list, tuple)) or not all(_is_share(score) for score in scores):
        raise DraftError("proposed scores that are not a list of numbers from 0 to 1")
    if type(length) is not int or length < 0:
        raise DraftError(f"proposed with match_length={length!r}: a whole number of at least 0 is needed")
    if not isinstance(seconds, (int, float)) or not 0.0 <= seconds < math.inf:
        raise DraftError(f"proposed with catch_up_seconds={seconds!r}: a number of seconds is needed")
    if not isinstance(proposal.confidences, (list, tuple)) or not all(map(_is_confidence, proposal.confidences)):
        raise DraftError("proposed with confidences that are not a list of pairs of finite numbers")
    if proposal.confidences and not 0 <= len(proposal.confidences) - len(tokens) <= 1:
        raise DraftError(f"proposed {len(tokens)} tokens with confidences at {len(proposal.confidences)} positions")
    shape = None if proposal.draft_probs is None else tuple(getattr(proposal.draft_probs, "shape", ()))
    if shape is not None and shape != (len(tokens), vocab_size):
        raise DraftError(f"proposed draft_probs of shape {shape} for {len(tokens)} tokens and {vocab_size} ids")
    return proposal
