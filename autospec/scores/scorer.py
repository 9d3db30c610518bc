"""Scores recorded answers: one teacher-forced pass of each model, and a look at what retrieval would have offered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autospec.caches import append, new_cache
from autospec.decoding.loop import MAX_OFFER
from autospec.decoding.processors import BlockProcessors
from autospec.drafts.base import DraftSource, hidden_layers_of
from autospec.drafts.drawing import confidence
from autospec.errors import ConfigurationError, DraftError
from autospec.scores.prepared import Prepared, prepare
from autospec.scores.scored import DraftScores, OfferScores, ScoredRequest
from autospec.traffic.request import TrafficRequest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

CHUNK = 64
"""Tokens of an answer whose distributions are held at once."""


class Scorer:
    """Scores requests one after the other, in the order in which they arrived, so that pools only know the past.

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

    @torch.no_grad()
    def score(self, traffic: TrafficRequest) -> ScoredRequest:
        """What each source would have done along the request's answer.

        Raises:
            DraftError: a model draft cannot read the text.
            ConfigurationError: there is no answer, or the target does not know its tokens.
        """
        if not traffic.output:
            raise ConfigurationError(f"request {traffic.request_id} has no answer yet: autospec traffic complete")
        for ids, known in (
            (traffic.prompt, self._target.get_input_embeddings()),
            (traffic.output, self._target.get_output_embeddings()),
        ):
            if max(ids, default=0) >= known.weight.shape[0]:
                raise ConfigurationError("token ids that the target does not know")
        prepared = self._prepared(traffic)
        retrieval = {n: s for n, s in self._sources.items() if getattr(s, "is_retrieval", False)}
        models = {n: s for n, s in self._sources.items() if n not in retrieval}
        scored = ScoredRequest(
            request_id=traffic.request_id,
            started_at=traffic.started_at,
            segment=traffic.segment,
            prompt_tokens=len(traffic.prompt),
            output_tokens=len(traffic.output),
            max_new_tokens=max(prepared.max_new_tokens, len(traffic.output)),
            do_sample=prepared.request.do_sample,
            temperature=prepared.temperature,
            offers={name: offers_along(source, prepared, traffic) for name, source in retrieval.items()},
            drafts=self._drafts(models, prepared, traffic),
            conversation=traffic.conversation,
            prefill_seconds=None if traffic.seconds is None or traffic.fallback_reason else traffic.seconds.prefill,
        )
        self._learn(prepared, traffic)
        return scored

    def learn(self, traffic: TrafficRequest) -> None:
        """Let pools see an answer that was scored before."""
        if any(callable(getattr(source, "learn", None)) for source in self._sources.values()):
            self._learn(self._prepared(traffic), traffic)

    def _prepared(self, traffic: TrafficRequest) -> Prepared:
        return prepare(
            self._target, traffic.prompt, traffic.options, segment=traffic.segment, is_paired=self._is_paired
        )

    def _learn(self, prepared: Prepared, traffic: TrafficRequest) -> None:
        for source in self._sources.values():
            if callable(learn := getattr(source, "learn", None)):
                learn(prepared.request, traffic.output)

    def _drafts(
        self, models: Mapping[str, DraftSource], prepared: Prepared, traffic: TrafficRequest
    ) -> dict[str, DraftScores]:
        is_drawn = {
            name: prepared.request.do_sample and not getattr(source, "greedy", False) for name, source in models.items()
        }
        needed = any(is_drawn.values())
        target = target_probs(self._target, prepared, traffic.prompt, traffic.output) if needed else None
        alongs = {}
        for name, source in models.items():
            session: Any = source.start(prepared.request)
            alongs[name] = _Along(session.along(traffic.prompt, traffic.output), is_drawn[name])
        for token in traffic.output:
            probs = None if target is None else next(target)
            for along in alongs.values():
                along.add(token, probs, is_paired=self._is_paired)
        return {name: along.scores() for name, along in alongs.items()}


class _Along:
    """One model draft's numbers, position by position."""

    def __init__(self, rows: Iterator[tuple[Tensor, Tensor]], is_drawn: bool) -> None:
        self._rows = rows
        self._is_drawn = is_drawn
        self._found: list[tuple[float, float, float, int]] = []

    def add(self, token: int, target_probs: Tensor | None, *, is_paired: bool) -> None:
        """One position. Args: token: the answer's; target_probs: [vocab_size], where the draft's token is drawn."""
        logits, scores = next(self._rows)
        margin, entropy = confidence(logits[0])
        rank = int((scores[0] > scores[0, token]).sum())
        if self._is_drawn:
            assert target_probs is not None
            acceptance = coupled if is_paired else rejection
            accept = acceptance(target_probs, scores[0].softmax(dim=-1), token)
        else:
            accept = float(int(scores[0].argmax()) == token)
        self._found.append((accept, margin, entropy, rank))

    def scores(self) -> DraftScores:
        accept, margin, entropy, rank = zip(*self._found, strict=True)
        return DraftScores(
            np.array(accept, dtype=np.float32),
            np.array(margin, dtype=np.float32),
            np.array(entropy, dtype=np.float32),
            np.minimum(rank, np.iinfo(np.int16).max).astype(np.int16),
        )


def rejection(target_probs: Tensor, draft_probs: Tensor, token: int) -> float:
    """Probability that a drawn draft was accepted, given that the target said `token`: min(1, q / p).

    Args:
        target_probs, draft_probs: [vocab_size].

    Source: Leviathan et al. 2023 for the rule; docs/tune.md for what follows of it, given the token.
    """
    p, q = float(target_probs[token]), float(draft_probs[token])
    return min(1.0, q / p) if p > 0.0 else 1.0


def coupled(target_probs: Tensor, draft_probs: Tensor, token: int) -> float:
    """The same where draft and target draw with the same exponential noise E: argmax q / E, given argmax p / E.

    Both are `token` with probability 1 / sum_i max(p_i / p, q_i / q), the target's is with probability p.

    Source: Daliri, Musco and Suresh 2024.
    """
    p, q = float(target_probs[token]), float(draft_probs[token])
    if q <= 0.0:
        return 0.0
    return min(1.0, 1.0 / float(torch.maximum(target_probs.double(), draft_probs.double() * (p / q)).sum()))


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
