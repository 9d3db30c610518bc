"""A smaller causal model with another vocabulary drafts: by its text, or token by token over the tokens both have."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList

from autospec.drafts.assistant import (
    AssistantSession,
    check_can_draft,
    check_mode,
    check_settings,
    num_logits,
)
from autospec.drafts.base import DraftRequest, DraftSession
from autospec.drafts.drawing import StopRule
from autospec.drafts.shared_tokens import match_specials, shared_tokens
from autospec.drafts.spelling import Spelling
from autospec.drafts.text_session import OwnIds, TextReading, TextSession
from autospec.drafts.translation import OtherIds, SameIds
from autospec.drafts.vocabulary import fingerprint
from autospec.errors import ConfigurationError, DraftError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = ("text", "shared")
_FEWEST_SHARED = 0.05


class CrossTokenizer:
    """Drafts with a smaller model that has another tokenizer.

    Args:
        model: a causal language model on the target's device.
        tokenizer: the model's own.
        method: `text`: the model continues the text in its own tokens, always with the likeliest, and what it says is
            drafted in the target's tokens, a one-hot q. `shared`: it draws one token after the other from its q over
            the tokens that stand for the same bytes in both vocabularies.
        greedy: with `shared`, draft the likeliest token also when the target samples.
        min_margin, max_entropy: as for `Assistant`; with `text` they look at the model's own tokens.

    Raises:
        ConfigurationError: `model` or `tokenizer` is none of transformers, or a setting is out of range.

    Source: Timor et al. 2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
        Heterogeneous Vocabularies, for the two methods.
    """

    name = "cross_tokenizer"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        method: str = "text",
        greedy: bool = False,
        min_margin: float | None = None,
        max_entropy: float | None = None,
    ) -> None:
        check_settings("CrossTokenizer", model, greedy, min_margin, max_entropy)
        if method not in METHODS:
            raise ConfigurationError(f"CrossTokenizer(method={method!r}): known are {', '.join(METHODS)}")
        self.model = model
        self.method = method
        self.greedy = greedy or method == "text"
        self.stop_rule = StopRule(min_margin, max_entropy)
        self._tokenizer = tokenizer
        self._spelling = Spelling(tokenizer)
        self._target: Spelling | None = None
        self._shared: OtherIds | None = None

    @property
    def static_draft(self) -> PreTrainedModel:
        return self.model

    @property
    def takes_stop(self) -> bool:
        """Where positions are the target's own: text is drafted in pieces of another size."""
        return self.method == "shared"

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        check_can_draft(self.model, target)
        if tokenizer is None:
            raise DraftError(
                "cross_tokenizer reads the target's tokens as text, and the target's tokenizer is unknown: "
                "pass wrap(model, tokenizer=...)"
            )
        spelling = Spelling(tokenizer)
        for whose, model, known in (("assistant", self.model, self._spelling), ("target", target, spelling)):
            rows = int(model.get_input_embeddings().weight.shape[0])
            if known.num_ids > rows:
                raise DraftError(
                    f"the {whose}'s tokenizer has token ids up to {known.num_ids - 1}, its model knows {rows}: "
                    "they do not belong together"
                )
        if self.method == "shared":
            self._shared = self._translation(target, spelling)
        if fingerprint(tokenizer) == fingerprint(self._tokenizer):
            warnings.warn(
                "the assistant has the target's own vocabulary: Assistant(model, tokenizer=...) does the same for less",
                stacklevel=2,
            )
        self._target = spelling

    def start(self, request: DraftRequest) -> DraftSession:
        check_mode(self.model)
        if self._target is None:
            raise DraftError("cross_tokenizer has no target yet: it is attached by autospec.wrap")
        if self._shared is not None:
            translation = self._shared.on(request.device, request.vocab_size)
            is_greedy = self.greedy or not request.do_sample
            return AssistantSession(self.model, request, translation, self.stop_rule, is_greedy=is_greedy)
        specials = match_specials(self._target, self._spelling)
        reading = TextReading(self._target, self._spelling, specials)
        size = num_logits(self.model)
        own_ids = OwnIds(SameIds(min(size, self._spelling.num_ids)), reading)
        # no processor of the target's knows these ids
        own_request = replace(request, vocab_size=size, do_sample=False, processors=LogitsProcessorList())
        inner = AssistantSession(self.model, own_request, own_ids, self.stop_rule, is_greedy=True)
        return TextSession(inner, reading, self._target, self._spelling, specials, request.vocab_size)

    def _translation(self, target: PreTrainedModel, spelling: Spelling) -> OtherIds:
        shared = shared_tokens(spelling, self._spelling, num_logits(target), num_logits(self.model))
        num_shared = int((shared.writes >= 0).sum())
        num_tokens = min(len(known.pieces) + len(known.specials) for known in (spelling, self._spelling))
        if num_shared < max(2, _FEWEST_SHARED * num_tokens):
            raise DraftError(
                f"the vocabularies of assistant and target share {num_shared} tokens, the smaller has {num_tokens}: "
                'too few to draft with. Use CrossTokenizer(..., method="text")'
            )
        return shared
