"""A draft over some of the target's tokens: its configuration says which, and what it reads the others as."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from autospec.drafts.translation import OtherIds
from autospec.drafts.vocabulary import check_same_vocabulary, fingerprint
from autospec.errors import ConfigurationError, DraftError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SubsetVocabulary:
    """What a model's configuration says of its ids.

    `target_token_ids`: the target's id that each of the model's own ids stands for, from 0 on. `unknown_id`: the own id
    that every other id of the target is read as; it may be one further id, for which there is no target's id, or one
    of those. `tokenizer_fingerprint` (may be left out): `autospec.drafts.vocabulary.fingerprint` of the target's
    tokenizer.

    Args:
        target_token_ids: distinct ids of the target.
        unknown_id: an id of the model.
        tokenizer_fingerprint: of the tokenizer that the ids belong to; None when it is unknown.
        num_logits: ids that the model has logits for.
        num_known: ids that the model can read.

    Raises:
        ConfigurationError: these do not make a vocabulary.
    """

    def __init__(
        self, target_token_ids: Any, unknown_id: Any, tokenizer_fingerprint: Any, num_logits: int, num_known: int
    ) -> None:
        ids: list[Any] = list(target_token_ids) if isinstance(target_token_ids, (list, tuple)) else []
        if not ids or any(type(token) is not int or token < 0 for token in ids):
            raise _malformed("target_token_ids: a list of whole numbers from 0 on is needed")
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise _malformed(f"target_token_ids has {twice} more than once: each of the target's ids has one place")
        if type(unknown_id) is not int or not 0 <= unknown_id < num_known:
            raise _malformed(f"unknown_id={unknown_id!r}: one of the ids that the model can read, 0 to {num_known - 1}")
        if len(ids) != num_logits and not (len(ids) == num_logits - 1 == unknown_id):
            raise _malformed(
                f"target_token_ids has {len(ids)} ids, the model has logits for {num_logits}: as many are needed, "
                "or one fewer where the last is unknown_id"
            )
        if len(ids) > num_known:
            raise _malformed(f"target_token_ids has {len(ids)} ids, the model can read {num_known}")
        if tokenizer_fingerprint is not None and not isinstance(tokenizer_fingerprint, str):
            raise _malformed(f"tokenizer_fingerprint={tokenizer_fingerprint!r}: a text is needed")
        self.fingerprint: str | None = tokenizer_fingerprint
        self._largest = int(max(ids))
        own = {token: (index,) for index, token in enumerate(ids)}
        unknown = (unknown_id,)
        self.translation = OtherIds(
            reads=lambda token: own.get(token, unknown),
            writes=torch.tensor([*ids, *[-1] * (num_logits - len(ids))]),
        )

    def check(self, target_size: int, tokenizer: Any | None, own_tokenizer: Any | None) -> None:
        """Do the ids mean the same to this target?

        Args:
            target_size: how many ids the target has.
            tokenizer: the target's, or None: then the size alone is looked at.
            own_tokenizer: the one that the ids belong to, if the user gave it.

        Raises:
            DraftError: they do not.
        """
        if self._largest >= target_size:
            raise DraftError(
                f"the assistant drafts token id {self._largest}, the target has ids 0 to {target_size - 1}: "
                "it was made for another target"
            )
        if tokenizer is None:
            return
        if own_tokenizer is not None:
            check_same_vocabulary(tokenizer, own_tokenizer)
        if self.fingerprint is not None and self.fingerprint != (found := fingerprint(tokenizer)):
            raise DraftError(
                f"the assistant was made for a tokenizer of fingerprint {self.fingerprint}, the target's has {found}: "
                "its tokens would mean other text. Use an assistant made for this target"
            )

    @property
    def is_named(self) -> bool:
        """Does it say which tokenizer it belongs to?"""
        return self.fingerprint is not None


def subset_vocabulary(model: PreTrainedModel) -> SubsetVocabulary | None:
    """The one in the model's configuration; None when it has the target's own ids.

    Raises:
        ConfigurationError: it is malformed.
    """
    ids = getattr(model.config, "target_token_ids", None)
    if ids is None:
        return None
    return SubsetVocabulary(
        ids,
        getattr(model.config, "unknown_id", None),
        getattr(model.config, "tokenizer_fingerprint", None),
        num_logits=int(model.get_output_embeddings().weight.shape[0]),
        num_known=int(model.get_input_embeddings().weight.shape[0]),
    )


def _malformed(what: str) -> ConfigurationError:
    return ConfigurationError(f"the assistant's configuration: {what}")
