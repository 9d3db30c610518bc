"""Retrieval where it promises more accepted tokens than the model draft does, the model draft elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autospec.drafts.base import DraftRequest, DraftSession, DraftSource, Proposal, hidden_layers_of
from autospec.errors import ConfigurationError, DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_UNSCORED = 0.8  # assumed of each next token of a proposal that comes without scores
_PRIOR = 4.0  # tokens' worth of belief in what a source says, and in a model draft's acceptance rate of one half


class Blend:
    """Drafts each block with one of several sources.

    Retrieval is asked first, which costs next to nothing. Its promise is the sum of the scores of its tokens, corrected
    by how its promises in this request came true so far; the model draft's is what its acceptance rate so far comes to
    at this block length. The larger one drafts. The choice looks at committed tokens and at retrieval's tokens, which
    follow from them; nothing is drawn before it is made, so that it keeps the distribution.

    Args:
        model_draft: as `Assistant(model)`.
        retrieval: sources whose drafts follow from the committed tokens alone, as `Suffix()`; a name or an object, or
            several.
        name: as it goes by in policies.

    Raises:
        ConfigurationError: one of them is no source.
    """

    def __init__(
        self,
        model_draft: DraftSource,
        retrieval: str | DraftSource | Iterable[str | DraftSource] = ("suffix",),
        *,
        name: str = "blend",
    ) -> None:
        from autospec.drafts.registry import make_sources  # it knows this class, too

        self.name = name
        several: Any = [retrieval] if isinstance(retrieval, str) or hasattr(retrieval, "attach") else retrieval
        self.retrieval = list(make_sources(several).values())
        if not self.retrieval:
            raise ConfigurationError("Blend(retrieval=...): at least one source is needed, as in Suffix()")
        made = list(make_sources([model_draft]).values())
        if len(made) != 1:
            raise ConfigurationError("Blend(model_draft=...): a source is needed, as in Assistant(model)")
        (self.model_draft,) = made

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        for source in (*self.retrieval, self.model_draft):
            source.attach(target, tokenizer)
            if source is not self.model_draft and hidden_layers_of(source):
                raise DraftError(f"{source.name} looks at hidden states, which only the model draft of a blend can")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Those that the model draft wants to see."""
        return hidden_layers_of(self.model_draft)

    @property
    def model(self) -> Any:
        """The model draft's, if it has one."""
        return getattr(self.model_draft, "model", None)

    @property
    def static_draft(self) -> Any:
        """The model draft's, if it has one."""
        return getattr(self.model_draft, "static_draft", None)

    def start(self, request: DraftRequest) -> BlendSession:
        return BlendSession(request, self.retrieval, self.model_draft)

    def learn(self, request: DraftRequest, answer: Sequence[int]) -> None:
        """Pass the answer of a request that has ended on to those that learn."""
        for source in (*self.retrieval, self.model_draft):
            if callable(learn := getattr(source, "learn", None)):
                learn(request, answer)


class BlendSession:
    """The sessions of one request, and how their drafts fared in it.

    A source that fails is left out from then on, with the reason in the record; the last one ends the blend.
    """

    def __init__(self, request: DraftRequest, retrieval: Sequence[DraftSource], model_draft: DraftSource) -> None:
        self._notes: list[str] = []  # not reported yet
        self._retrieval: list[_Record] = []
        for source in retrieval:
            with self._leaving_out(source.name):
                self._retrieval.append(_Record(source.name, source.start(request)))
        self._model_name = model_draft.name
        self._model_draft: Any = None
        with self._leaving_out(self._model_name):
            self._model_draft = model_draft.start(request)
        self._judged, self._accepted = _PRIOR, _PRIOR / 2  # of the model draft
        self._drafted: list[int] = []  # its last block, while its fate is not known
        self._start = 0  # where that began

    def see(self, hidden_states: Sequence[Tensor]) -> None:
        """Pass on what the target made of committed tokens. Args: hidden_states: as the model draft wants them."""
        if self._model_draft is not None:
            with self._leaving_out_model():
                self._model_draft.see(hidden_states)

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        self._settle(committed)
        for record in list(self._retrieval):
            with self._leaving_out(record.name, record):
                record.ask(committed, block_length)
        best = max(self._retrieval, key=lambda record: record.promise, default=None)
        if best is not None and best.tokens and best.promise >= self._model_promise(block_length):
            return self._noted(Proposal(best.tokens))
        if self._model_draft is not None:
            with self._leaving_out_model():
                proposal: Proposal = self._model_draft.propose(committed, block_length)
                self._drafted, self._start = proposal.tokens, len(committed)
                return self._noted(proposal)
        if best is None:
            raise DraftError("; ".join(self._notes) or "none of the blend's sources can draft")
        return self._noted(Proposal(best.tokens))

    def _model_promise(self, block_length: int) -> float:
        if self._model_draft is None:
            return 0.0
        rate = self._accepted / self._judged
        return sum(rate**position for position in range(1, block_length + 1))

    def _settle(self, committed: Sequence[int]) -> None:
        """See in what was committed how the model draft's last block fared."""
        for draft, token in zip(self._drafted, committed[self._start :], strict=False):
            self._judged += 1
            if draft != token:
                break
            self._accepted += 1
        self._drafted = []

    def _noted(self, proposal: Proposal) -> Proposal:
        notes, self._notes = self._notes, []
        return replace(proposal, notes=(*proposal.notes, *notes)) if notes else proposal

    @contextmanager
    def _leaving_out(self, name: str, record: _Record | None = None) -> Iterator[None]:
        """A `DraftError` of a source is noted. Only that: it says that nothing was drawn."""
        try:
            yield
        except DraftError as error:
            self._notes.append(f"{name} left out: {error}")
            if record is not None:
                self._retrieval.remove(record)

    @contextmanager
    def _leaving_out_model(self) -> Iterator[None]:
        count = len(self._notes)
        with self._leaving_out(self._model_name):
            yield
        if len(self._notes) > count:
            self._model_draft = None


class _Record:
    """A retrieval session, what it says now, and how what it said came true: also where it was not followed."""

    def __init__(self, name: str, session: DraftSession) -> None:
        self.name = name
        self._session = session
        self._promised = self._came_true = _PRIOR
        self._scores: Sequence[float] = ()
        self._start = 0
        self.tokens: list[int] = []
        self.promise = 0.0

    def ask(self, committed: Sequence[int], block_length: int) -> None:
        self._settle(committed[self._start :])
        proposal = self._session.propose(committed, block_length)
        if proposal.draft_probs is not None:
            raise DraftError("its drafts are drawn, and a blend retrieves only what follows from the committed tokens")
        self.tokens, self._start = proposal.tokens, len(committed)
        self._scores = proposal.scores or [_UNSCORED ** (position + 1) for position in range(len(self.tokens))]
        self.promise = sum(self._scores) * self._came_true / self._promised

    def _settle(self, following: Sequence[int]) -> None:
        is_right = True
        for draft, token, score in zip(self.tokens, following, self._scores, strict=False):
            self._promised += score
            is_right = is_right and draft == token
            self._came_true += is_right
        self.tokens = []
