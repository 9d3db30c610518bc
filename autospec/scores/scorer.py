"""Scores recorded answers: one teacher-forced pass of each model, and a look at what retrieval would have offered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch

from autospec.caches import append, new_cache
from autospec.decoding.loop import MAX_OFFER
from autospec.decoding.processors import BlockProcessors
from autospec.drafts.assistant import AssistantSession
from autospec.drafts.base import DraftSource, hidden_layers_of
from autospec.errors import ConfigurationError, DraftError
from autospec.scores.acceptance import draft_scores, judged
from autospec.scores.batches import Answer, packed, score_together, scores_of
from autospec.scores.prepared import Prepared, prepare
from autospec.scores.rows import why_one_by_one
from autospec.scores.scored import DraftScores, OfferScores, ScoredRequest
from autospec.traffic.request import TrafficRequest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_P = ParamSpec("_P")
_T = TypeVar("_T")

CHUNK = 64
"""Tokens of an answer whose distributions are held at once."""


class Scorer:
    """Scores requests in the order in which they arrived, so that pools only know the past.

    Args:
        target: the model that answered, not wrapped.
        sources: draft sources by name, attached to it. Retrieval sources, and those with `along` in their sessions.
        sampling: how drawn drafts would be verified: `paired` or `maximal`.

    Raises:
        ConfigurationError: a source cannot be scored from an answer.
    """

    def __init__(
        self, target: PreTrainedModel, sources: Mapping[str, DraftSource], *, sampling: str = "paired"
    ) -> None:
        self._target = target
        self._sources = dict(sources)
        self._is_paired = sampling == "paired"
        for name, source in self._sources.items():
            if not getattr(source, "is_retrieval", False) and not getattr(source, "takes_stop", False):
                raise ConfigurationError(f"{name} cannot be scored: what it drafts does not follow from the text alone")
            if hidden_layers_of(source):
                raise ConfigurationError(f"{name} cannot be scored: it looks at the target's hidden states")
        self._retrieval = {n: s for n, s in self._sources.items() if getattr(s, "is_retrieval", False)}
        self._models = {n: s for n, s in self._sources.items() if n not in self._retrieval}

    @torch.no_grad()
    def score(self, traffic: TrafficRequest) -> ScoredRequest:
        """What each source would have done along the request's answer; nothing of a draft that cannot read it.

        Raises:
            ConfigurationError: there is no answer, or the target does not know its tokens.
        """
        prepared = self._checked(traffic)
        return self._finished(traffic, prepared, self._drafts(prepared, traffic))

    @torch.no_grad()
    def score_batch(self, batch: Sequence[TrafficRequest]) -> list[ScoredRequest | Exception]:
        """The same of several requests, whose answers share forwards where the models allow it.

        Pools see them one after the other all the same. Numbers are those of `score`, up to rounding. Answers go one by
        one where a model is not purely causal or carries a state along (`autospec.scores.rows`), where a draft reads
        the text as other tokens, and where a forward over several failed.

        Args:
            batch: in the order in which they arrived; any number, since forwards have bounds of their own.

        Returns:
            For each request what `score` returns, or what it would have raised: that costs the request alone.
        """
        prepared = [_or_error(self._checked, traffic) for traffic in batch]
        drafts = self._drafts_of_all(batch, prepared)
        done: list[ScoredRequest | Exception] = []
        for traffic, how, found in zip(batch, prepared, drafts, strict=True):
            if isinstance(how, Exception):
                done.append(how)
            elif isinstance(found, Exception):
                done.append(found)
            else:
                done.append(_or_error(self._finished, traffic, how, found))
        return done

    def learn(self, traffic: TrafficRequest) -> None:
        """Let pools see an answer that was scored before."""
        if any(callable(getattr(source, "learn", None)) for source in self._sources.values()):
            self._learn(self._prepared(traffic), traffic)

    def _checked(self, traffic: TrafficRequest) -> Prepared:
        if not traffic.output:
            raise ConfigurationError(f"request {traffic.request_id} has no answer yet: autospec traffic complete")
        for ids, known in (
            (traffic.prompt, self._target.get_input_embeddings()),
            (traffic.output, self._target.get_output_embeddings()),
        ):
            if max(ids, default=0) >= known.weight.shape[0]:
                raise ConfigurationError("token ids that the target does not know")
        return self._prepared(traffic)

    def _prepared(self, traffic: TrafficRequest) -> Prepared:
        return prepare(
            self._target, traffic.prompt, traffic.options, segment=traffic.segment, is_paired=self._is_paired
        )

    def _finished(
        self, traffic: TrafficRequest, prepared: Prepared, drafts: Mapping[str, DraftScores]
    ) -> ScoredRequest:
        """With what retrieval offers now; pools know the answer afterwards."""
        prefill = None if traffic.seconds is None or traffic.fallback_reason else traffic.seconds.prefill
        scored = ScoredRequest(
            request_id=traffic.request_id,
            started_at=traffic.started_at,
            segment=traffic.segment,
            prompt_tokens=len(traffic.prompt),
            output_tokens=len(traffic.output),
            max_new_tokens=max(prepared.max_new_tokens, len(traffic.output)),
            do_sample=prepared.request.do_sample,
            temperature=prepared.temperature,
            offers={name: offers_along(source, prepared, traffic) for name, source in self._retrieval.items()},
            drafts=drafts,
            conversation=traffic.conversation,
            turn=traffic.turn,
            prefill_seconds=prefill or None,  # 0 where phases were not measured
        )
        self._learn(prepared, traffic)
        return scored

    def _learn(self, prepared: Prepared, traffic: TrafficRequest) -> None:
        for source in self._sources.values():
            if callable(learn := getattr(source, "learn", None)):
                learn(prepared.request, traffic.output)

    def _is_drawn(self, prepared: Prepared) -> dict[str, bool]:
        return {n: prepared.request.do_sample and not getattr(s, "greedy", False) for n, s in self._models.items()}

    def _drafts_of_all(
        self, batch: Sequence[TrafficRequest], prepared: Sequence[Prepared | Exception]
    ) -> list[dict[str, DraftScores] | Exception]:
        """Of each request what its model drafts did, or why that is not known; what could not be prepared has none."""
        done: dict[int, dict[str, DraftScores] | Exception] = {}
        answers: dict[int, Answer] = {}
        for index, (traffic, how) in enumerate(zip(batch, prepared, strict=True)):
            if isinstance(how, Exception) or not self._models:
                done[index] = {}
            elif len(batch) > 1:
                answer = _or_error(self._answer, traffic, how)
                if isinstance(answer, Exception) and not isinstance(answer, DraftError):
                    done[index] = answer
                elif isinstance(answer, Answer):
                    answers[index] = answer
        for group in packed(list(answers.values())):
            if len(group) > 1:
                # one of them failed, or all at once: each is then tried by itself, and says why
                with suppress(Exception):
                    score_together(self._target, group, is_paired=self._is_paired)
        done |= {index: _or_error(scores_of, answer) for index, answer in answers.items() if answer.is_done}
        for index, traffic in enumerate(batch):
            if index not in done:
                done[index] = _or_error(self._alone, traffic)
        return [done[index] for index in range(len(batch))]

    def _alone(self, traffic: TrafficRequest) -> dict[str, DraftScores]:
        return self._drafts(self._prepared(traffic), traffic)  # anew: processors may keep a state

    def _answer(self, traffic: TrafficRequest, prepared: Prepared) -> Answer | None:
        """None where it must be scored by itself. Raises: DraftError: a draft cannot read the text."""
        num_tokens = len(traffic.prompt) + len(traffic.output) - 1
        is_drawn = self._is_drawn(prepared)
        if any(is_drawn.values()) and why_one_by_one(self._target, num_tokens):
            return None
        reads = {}
        for name, source in self._models.items():
            session = source.start(prepared.request)
            if not isinstance(session, AssistantSession):
                return None
            text = session.read(traffic.prompt, traffic.output)
            is_token_by_token = text.ends == list(range(len(traffic.prompt), num_tokens + 1))
            if not is_token_by_token or why_one_by_one(text.model, num_tokens):
                return None
            reads[name] = text
        return Answer(prepared, traffic.prompt, traffic.output, reads, is_drawn)

    def _drafts(self, prepared: Prepared, traffic: TrafficRequest) -> dict[str, DraftScores]:
        is_drawn = self._is_drawn(prepared)
        needed = any(is_drawn.values())
        target = target_probs(self._target, prepared, traffic.prompt, traffic.output) if needed else None
        alongs = {}
        for name, source in self._models.items():
            session: Any = source.start(prepared.request)
            alongs[name] = _Along(session.along(traffic.prompt, traffic.output), is_drawn[name])
        for token in torch.tensor([traffic.output], device=prepared.request.device).T:
            probs = None if target is None else next(target)[None]
            for name in list(alongs):
                try:
                    alongs[name].add(token, probs, is_paired=self._is_paired)
                except DraftError:
                    del alongs[name]  # a text that it cannot read: live, it is off for this request
        return {name: along.scores() for name, along in alongs.items()}


def _or_error(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | Exception:
    """What a call returns, or what it raised: of one request alone, whose options may hold anything."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # handed on
        return error


class _Along:
    """One model draft's numbers, position by position."""

    def __init__(self, rows: Iterator[tuple[Tensor, Tensor]], is_drawn: bool) -> None:
        self._rows = rows
        self._is_drawn = is_drawn
        self._found: list[list[float]] = []

    def add(self, token: Tensor, target_probs: Tensor | None, *, is_paired: bool) -> None:
        """One position. Args: token: [1], the answer's; target_probs: [1, vocab_size], where drafts are drawn."""
        logits, scores = next(self._rows)
        self._found += judged(logits, scores, token, target_probs if self._is_drawn else None, is_paired=is_paired)

    def scores(self) -> DraftScores:
        return draft_scores(self._found)


def target_probs(
    target: PreTrainedModel, prepared: Prepared, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[Tensor]:
    """The target's distribution before each token of its answer, [vocab_size] each, with its processors."""
    device = prepared.request.device
    whole = torch.tensor([[*prompt, *answer]], device=device)
    processors = BlockProcessors(prepared.processors, device)
    logits, cache = append(target, whole[:, : len(prompt)], new_cache(target))
    start = 0  # of the rows, in the answer
    while True:
        end = start + len(logits)
        ids = whole[:, : len(prompt) + end - 1]
        rows = processors.first_stage(ids, logits.to(prepared.request.scores_dtype, copy=processors.may_write))
        for index in range(len(rows)):
            row = rows[index : index + 1]
            if processors.num_together is not None:
                row = processors.second_stage(whole[:, : len(prompt) + start + index], row)
            yield row[0].softmax(dim=-1)
        if end >= len(answer):
            return
        new = whole[:, len(prompt) + end - 1 : len(prompt) + min(end - 1 + CHUNK, len(answer) - 1)]
        logits, cache = append(target, new, cache, logits_kept=new.shape[1])
        start = end


def offers_along(source: DraftSource, prepared: Prepared, traffic: TrafficRequest) -> OfferScores:
    """What a retrieval source would have proposed at each position of an answer, and how much of it came true."""
    session = source.start(prepared.request)
    text, answer = list(traffic.prompt), traffic.output
    num_tokens, num_right, match_length = [0], [0], [0]
    scores: list[tuple[float, ...]] = [()]
    for position in range(1, len(answer)):
        text.append(answer[position - 1])
        made = session.propose(text, MAX_OFFER)
        if made.draft_probs is not None:
            raise DraftError(f"{source.name} draws its drafts, and a retrieval source may not")
        following = answer[position:]
        right = next((i for i, (a, b) in enumerate(zip(made.tokens, following, strict=False)) if a != b), None)
        num_tokens.append(len(made.tokens))
        num_right.append(min(len(made.tokens), len(following)) if right is None else right)
        match_length.append(made.match_length)
        scores.append(tuple(map(float, made.scores)))
    return OfferScores(
        np.array(num_tokens, dtype=np.int16),
        np.array(num_right, dtype=np.int16),
        np.minimum(match_length, np.iinfo(np.int16).max).astype(np.int16),
        tuple(scores),
    )
