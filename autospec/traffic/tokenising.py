"""From a log's text to the token ids that the target sees and gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autospec.errors import ConfigurationError
from autospec.traffic.importers.base import BrokenEntryError, ImportedRequest, Message


def chat_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """The prompt that asks for the next answer, by the tokenizer's chat template.

    Raises:
        ConfigurationError: the tokenizer has none.
        BrokenEntryError: the template does not take these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError("this tokenizer has no chat template, which messages need: import prompts as text")
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # a template may refuse in any way, and tokenizers raise many kinds
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenEntryError(f"the chat template does not take it ({text:.80})") from error
    return tuple(encoded["input_ids"])


def text_ids(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    """A text as it is.

    Args:
        special: with what the tokenizer puts around a prompt, as BOS.

    Raises:
        BrokenEntryError: the tokenizer does not take it.
    """
    try:
        return tuple(tokenizer(text, add_special_tokens=special)["input_ids"])
    except Exception as error:  # half an emoji, for example
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise BrokenEntryError(f"the tokenizer does not take it ({text:.80})") from error


def prompt_ids(tokenizer: Any, request: ImportedRequest) -> tuple[int, ...]:
    """What was asked, at least one token.

    Raises:
        BrokenEntryError: there is nothing, or it cannot be tokenised.
        ConfigurationError: messages need a chat template that the tokenizer lacks.
    """
    if request.prompt_ids is not None:
        ids = _known(tokenizer, request.prompt_ids, "prompt_token_ids")
    elif request.messages:
        ids = chat_ids(tokenizer, request.messages)
    else:
        ids = text_ids(tokenizer, request.prompt or "", special=True)
    if not ids:
        raise BrokenEntryError("the prompt has no token")
    return ids


def output_ids(tokenizer: Any, request: ImportedRequest) -> tuple[int, ...]:
    """What was answered; empty where nothing was. EOS ends it where the log says that the model ended it.

    Raises:
        BrokenEntryError: it cannot be tokenised, or its token ids do not spell its text.
    """
    if request.output_ids is not None:
        ids = _known(tokenizer, request.output_ids, "token_ids")
        if request.completion and tokenizer.decode(ids, skip_special_tokens=True).strip() != request.completion.strip():
            raise BrokenEntryError("its token_ids do not spell its text: they are of another tokenizer")
        return ids
    ids = text_ids(tokenizer, request.completion, special=False) if request.completion else ()
    eos = tokenizer.eos_token_id
    return (*ids, eos) if request.is_ended and eos is not None and ids and ids[-1] != eos else ids


def _known(tokenizer: Any, ids: tuple[int, ...], name: str) -> tuple[int, ...]:
    if unknown := [token for token in ids if token >= len(tokenizer)]:
        raise BrokenEntryError(f"{name} has {unknown[0]}, the tokenizer has ids 0 to {len(tokenizer) - 1}")
    return ids
