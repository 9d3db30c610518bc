"""Do two tokenizers mean the same by the same id? Compared by text, never by size."""

from __future__ import annotations

import hashlib
from typing import Any

from autospec.errors import DraftError

_SHOWN = 5


def check_same_vocabulary(target_tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Raise unless every id that both tokenizers know stands for the same token text.

    One tokenizer may know more ids than the other (padded or extended vocabularies): those are never drafted.

    Raises:
        DraftError: names the first ids that differ, with both texts, and how many differ in all.
    """
    target = {index: text for text, index in target_tokenizer.get_vocab().items()}
    assistant = {index: text for text, index in assistant_tokenizer.get_vocab().items()}
    differing = sorted(i for i in target.keys() & assistant.keys() if target[i] != assistant[i])
    if not differing:
        return
    shown = ", ".join(f"{i} ({target[i]!r} / {assistant[i]!r})" for i in differing[:_SHOWN])
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise DraftError(
        f"the assistant's vocabulary differs from the target's at ids {shown}{more} (target / assistant): "
        "its tokens would mean other text. Use an assistant trained with the target's tokenizer."
    )


def fingerprint(tokenizer: Any) -> str:
    """A short name of which id stands for which text."""
    digest = hashlib.blake2b(digest_size=16)
    for text, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index} {text!r}\n".encode())
    return digest.hexdigest()


def shared_ids(target_tokenizer: Any | None, assistant_tokenizer: Any | None, target_size: int, draft_size: int) -> int:
    """How many ids, from 0 on, may be drafted: those both models have logits for and, where known, a token for."""
    known = [len(tokenizer) for tokenizer in (target_tokenizer, assistant_tokenizer) if tokenizer is not None]
    return min(target_size, draft_size, *known)
