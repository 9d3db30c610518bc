"""A smaller causal model with the target's vocabulary drafts token by token."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autospec.caches import append, context_window, new_cache, why_not_draft_cache
from autospec.drafts.base import DraftRequest, Proposal
from autospec.drafts.draft_cache import DraftCache
from autospec.drafts.drawing import Drawing, Prefix, StopRule, draws_ahead, shaped
from autospec.drafts.subset import subset_vocabulary
from autospec.drafts.translation import SameIds, Translation
from autospec.drafts.vocabulary import check_same_vocabulary, shared_ids
from autospec.errors import ConfigurationError, DraftError
from autospec.types import Stop

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel


_CHUNK = 128  # tokens of an answer in one forward, when it is gone through at once


class Assistant:
    """Drafts with a smaller model.

    A model whose configuration has `target_token_ids` drafts only these of the target's tokens, under ids of its own
    (`autospec.drafts.subset.SubsetVocabulary`), and needs no tokenizer.

    Args:
        model: a causal language model on the target's device. Its dtype may differ: drafts never change the output.
        tokenizer: the model's tokenizer, to compare vocabularies by text; read from the model's own folder if None.
        greedy: draft the likeliest token also when the target samples (a one-hot q).
        min_margin: end a block before a position at which the draft's two likeliest tokens are closer in probability
            than this, between 0 and 1; None: no such rule.
        max_entropy: end a block before a position at which the draft's distribution has more entropy than this (nats).

    Both rules look at q before a token is drawn from it, never at the token, so that they keep the distribution.

    Raises:
        ConfigurationError: `model` is not a causal language model of transformers, its `target_token_ids` are
            malformed, or a setting is out of range.

    Source: Zhang et al. 2024 (SVIP) and Agrawal et al. 2024 (AdaEDL) for stopping by entropy.
    """

    name = "assistant"
    takes_stop = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any | None = None,
        greedy: bool = False,
        min_margin: float | None = None,
        max_entropy: float | None = None,
    ) -> None:
        check_settings("Assistant", model, greedy, min_margin, max_entropy)
        self.model = model
        self.greedy = greedy
        self.stop_rule = StopRule(min_margin, max_entropy)
        self._subset = subset_vocabulary(model)
        self._tokenizer = tokenizer if tokenizer is not None or self._subset else _tokenizer_of(model)
        self._num_ids: int | None = None

    @property
    def static_draft(self) -> PreTrainedModel:
        return self.model

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        check_can_draft(self.model, target)
        target_size, draft_size = num_logits(target), num_logits(self.model)
        is_known = self._tokenizer is not None
        if self._subset is not None:
            self._subset.check(target_size, tokenizer, self._tokenizer)
            is_known = is_known or self._subset.is_named
        elif tokenizer is not None and self._tokenizer is not None:
            check_same_vocabulary(tokenizer, self._tokenizer)
        elif target_size != draft_size:
            raise DraftError(
                f"the assistant has {draft_size} token ids, the target {target_size} (ids from "
                f"{min(target_size, draft_size)} on are unknown to one of them): pass both tokenizers, "
                "wrap(..., tokenizer=...) and Assistant(..., tokenizer=...), to compare them by text"
            )
        if tokenizer is not None and not is_known:
            warnings.warn(
                "the assistant's tokenizer is unknown, so its vocabulary is compared by size alone: "
                "pass Assistant(model, tokenizer=...)",
                stacklevel=2,
            )
        self._num_ids = shared_ids(tokenizer, self._tokenizer, target_size, draft_size)

    def start(self, request: DraftRequest) -> AssistantSession:
        check_mode(self.model)
        translation: Translation
        if self._subset is not None:
            translation = self._subset.translation.on(request.device, request.vocab_size)
        else:
            translation = SameIds(min(request.vocab_size, num_logits(self.model), self._num_ids or sys.maxsize))
        is_greedy = self.greedy or not request.do_sample
        return AssistantSession(self.model, request, translation, self.stop_rule, is_greedy=is_greedy)


def check_settings(kind: str, model: Any, greedy: Any, min_margin: Any, max_entropy: Any) -> None:
    """Of a draft model and when it stops. Args: kind: the class that takes them.

    Raises:
        ConfigurationError: `model` is not a causal language model of transformers, or a setting is out of range.
    """
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise ConfigurationError(f"{kind}({type(model).__name__}): a transformers causal language model is needed")
    if not isinstance(greedy, bool):
        raise ConfigurationError(f"{kind}(greedy={greedy!r}): True or False is needed")
    for option, value, most in (("min_margin", min_margin, 1.0), ("max_entropy", max_entropy, sys.float_info.max)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0.0 <= value <= most):
            raise ConfigurationError(f"{kind}({option}={value!r}): a number from 0 to {most:g}, or None, is needed")


def check_can_draft(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises: DraftError: the model cannot draft token by token beside the target."""
    if model.config.is_encoder_decoder:
        raise DraftError(f"{type(model).__name__} is an encoder-decoder model and cannot draft")
    if model.device != target.device:
        raise DraftError(
            f"the assistant is on {model.device}, the target on {target.device}: "
            f"move it first, assistant.to({str(target.device)!r})"
        )
    if why := why_not_draft_cache(new_cache(model)):
        raise DraftError(f"{type(model).__name__} cannot draft: {why}")
    check_mode(model)


def check_mode(model: PreTrainedModel) -> None:
    """Raises: DraftError: dropout is on."""
    if model.training:
        raise DraftError("the assistant is in training mode, where dropout draws random numbers: assistant.eval()")


@dataclass(frozen=True, slots=True)
class ReadText:
    """A prompt and its answer as a draft model reads them."""

    model: PreTrainedModel
    ids: list[int]  # [m], of the draft, without the answer's last token
    ends: list[int]  # [n], for each token of the answer: how many ids stand before it
    write: Callable[[Tensor, int], Tensor]  # from the draft's logits, [1, k], to those over the target's ids


class AssistantSession:
    """The assistant's cache for one request, always holding a prefix of the committed text plus its own drafts."""

    def __init__(
        self,
        model: PreTrainedModel,
        request: DraftRequest,
        translation: Translation,
        stop_rule: StopRule,
        *,
        is_greedy: bool,
    ) -> None:
        self._model = model
        self._stop_rule = stop_rule
        self._request = request
        self._translation = translation
        self._reading = translation.reading()
        self._num_known = int(model.get_input_embeddings().weight.shape[0])
        self._window = context_window(model)
        self._is_greedy = is_greedy
        is_own = translation.is_same and num_logits(model) <= self._num_known  # what it draws it can read
        self._draws_ahead = is_own and draws_ahead(request.device)
        static = request.static_draft(model) if request.static_draft is not None else None
        self._cache = DraftCache(model, static)
        self._prefix = Prefix(request.device)
        self._cached: list[int] = []  # ids of the draft in the cache
        self._failure: DraftError | None = None  # of the last block, after tokens were drawn
        self._num_agreed = 0  # of those in the cache, known to stay

    @torch.no_grad()
    def propose(self, committed: Sequence[int], block_length: int, stop: Stop | None = None) -> Proposal:
        text = self._reading.read(committed)
        room = block_length if self._window is None else min(block_length, self._window - len(text))
        if room < 1:
            raise self._no_room()
        if self._failure is not None:
            raise self._failure
        if not text:
            return Proposal()  # nothing that the draft can read
        drawing = Drawing(
            self._request,
            committed,
            is_greedy=self._is_greedy,
            stop_rule=self._stop_rule,
            write=self._translation.write,
            stop=stop,
            prefix=self._prefix,
            room=room,
        )
        catch_up_seconds = 0.0
        try:
            self._roll_back(text)
            catch_up_seconds = self._catch_up(text)
            backlog = list(text[len(self._cached) :])
            if backlog and self._draws_ahead and drawing.can_draw_ahead:
                self._draft_ahead(drawing, backlog, room)
            else:
                self._draft(drawing, backlog, room)
        except Exception as error:  # noqa: BLE001  # becomes a DraftError, now or at the next call
            self._failure = drawing.failed(error)
        return drawing.proposal(catch_up_seconds)

    def _draft(self, drawing: Drawing, backlog: list[int], room: int) -> None:
        """Draw token by token, looking at each."""
        # no backlog: a token that processors forced, and that the draft cannot read
        while backlog and len(drawing.tokens) < room and drawing.draw(self._forward(backlog)):
            if not drawing.wants_more():
                break
            backlog = self._translation.read(drawing.tokens[-1])

    def _draft_ahead(self, drawing: Drawing, backlog: list[int], room: int) -> None:
        """Draw all tokens, then wait for them once: each is read by the next forward without being looked at."""
        num_read = 0
        try:
            token = drawing.draw_ahead(self._forward(backlog))
            while num_read < room - 1:
                logits = self._cache.append(token[None])
                num_read += 1
                token = drawing.draw_ahead(logits)
        finally:
            try:
                drawing.look()
            finally:
                self._cached.extend(drawing.drawn[:num_read])

    @torch.no_grad()
    def along(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """What the draft thinks before each token of an answer, had all before it been committed. For a new session.

        Args:
            prompt: at least one token that the draft can read.
            answer: what the target said.

        Yields:
            for each token of the answer, the draft's own logits, [1, draft_vocab_size], and the scores whose softmax
            is q, [1, vocab_size].

        Raises:
            DraftError: the text does not fit the draft's context window, or holds what it does not know.
        """
        text = self.read(prompt, answer)
        whole = torch.tensor([[*prompt, *answer]], device=self._request.device)
        run, base = text.ends[0], text.ends[0] - 1
        logits, cache = append(self._model, self._tensor(text.ids[:run]), new_cache(self._model))
        for index, end in enumerate(text.ends):
            while end > run:
                new, base = text.ids[run : run + _CHUNK], run
                logits, cache = append(self._model, self._tensor(new), cache, logits_kept=len(new))
                run += len(new)
            row = logits[end - 1 - base][None]
            yield row, shaped(row, self._request, whole[:, : len(prompt) + index], text.write)

    def read(self, prompt: Sequence[int], answer: Sequence[int]) -> ReadText:
        """An answer as the draft reads it, for a pass over all of it. Arguments and errors as in `along`."""
        text = list(prompt)
        ends = [len(self._reading.read(text))]
        for token in answer[:-1]:
            text.append(token)
            ends.append(len(self._reading.read(text)))
        ids = list(self._reading.read(text))
        if not ends[0]:
            raise DraftError("the draft can read nothing of the prompt")
        if max(ids) >= self._num_known:
            raise DraftError(f"token id {max(ids)} of the text is unknown to the assistant")
        if self._window is not None and len(ids) > self._window:
            raise self._no_room()
        return ReadText(self._model, ids, ends, self._translation.write)

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self._request.device)

    def lend(self, cache: DynamicCache, tokens: list[int]) -> None:
        """Use a copy of another one's cache in the next proposal. Args: tokens: what it holds; kept, and changed."""
        self._cache.lend(cache)
        self._cached, self._num_agreed = tokens, len(tokens)

    def take_back(self) -> None:
        """Forget what was lent."""
        self._cache.take_back()
        self._cached, self._num_agreed = [], 0

    def _roll_back(self, text: Sequence[int]) -> None:
        agreed = self._num_agreed
        while agreed < min(len(self._cached), len(text)) and self._cached[agreed] == text[agreed]:
            agreed += 1
        agreed = min(agreed, len(text) - 1)  # the last id of the text is always run, for its logits
        if self._cached:
            self._cache.crop(len(self._cached) - agreed)
            del self._cached[agreed:]
        self._num_agreed = min(agreed, self._reading.num_settled)

    def _catch_up(self, text: Sequence[int]) -> float:
        """Run what other sources committed meanwhile, so that drafting costs what it always costs."""
        is_behind = len(text) - len(self._cached) > self._translation.usual_backlog
        if not is_behind and self._cache.is_ready:
            return 0.0
        started = time.perf_counter()
        if is_behind:
            self._forward(list(text[len(self._cached) : -1]))
            self._num_agreed = min(len(self._cached), self._reading.num_settled)
        self._cache.get_ready()
        return time.perf_counter() - started

    def _forward(self, tokens: list[int]) -> Tensor:
        """Append tokens to the cache. Returns: logits of the last one, [1, draft_vocab_size]."""
        if max(tokens) >= self._num_known:
            raise DraftError(f"token id {max(tokens)} of the text is unknown to the assistant")
        if self._window is not None and len(self._cached) + len(tokens) > self._window:
            raise self._no_room()
        logits = self._cache.append(self._tensor(tokens))
        self._cached.extend(tokens)
        return logits

    def _no_room(self) -> DraftError:
        return DraftError(f"the text no longer fits the assistant's context window of {self._window} tokens")


def num_logits(model: PreTrainedModel) -> int:
    """How many ids it has logits for."""
    return int(model.get_output_embeddings().weight.shape[0])


def _tokenizer_of(model: PreTrainedModel) -> Any | None:
    name = str(getattr(model, "name_or_path", "") or "")
    if not name or not (Path(name) / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer  # heavy: reads the tokenizer's files

    return AutoTokenizer.from_pretrained(name)
