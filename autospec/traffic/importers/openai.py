"""Logs of OpenAI-style completions: `messages` (or `prompt`) and, where answered, `choices`.

Request and response may stand side by side in one object, or below `request` and `response` (each perhaps with a
`body`, as batch files have it). Files for fine-tuning, whose last message is the assistant's, are read, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autospec.traffic.importers.base import (
    BrokenEntryError,
    ImportedRequest,
    content_of,
    ids_of,
    label_of,
    messages_of,
    options_of,
    shown,
    text_of,
    time_of,
)

ENDED = ("stop",)


class OpenAI:
    """`{"messages": [...], "choices": [{"message": {"content": ...}, "finish_reason": ...}], "created": ...}`."""

    name = "openai"
    keys = "messages, choices"

    def matches(self, entry: Mapping[str, Any]) -> bool:
        flat = flattened(entry)
        return "messages" in flat or ("prompt" in flat and "choices" in flat)

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]:
        flat = flattened(entry)
        asked = prompt_of(flat)
        choices = flat.get("choices")
        if choices is None:
            return [_from_messages(asked)]
        if not isinstance(choices, list) or not choices:
            raise BrokenEntryError(f"choices is {shown(choices)}, a list with an answer is needed")
        return [answered(asked, choice, f"choices[{index}]") for index, choice in enumerate(choices)]


def flattened(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One object of what stands below `request` and `response`, and their `body`."""
    flat = dict(entry)
    for name in ("request", "response"):
        part = entry.get(name)
        for each in (part, part.get("body") if isinstance(part, dict) else None):
            if isinstance(each, dict):
                flat |= {key: value for key, value in each.items() if key != "metadata" or "metadata" not in flat}
    return flat


def prompt_of(flat: Mapping[str, Any]) -> ImportedRequest:
    """What was asked, and how; no answer yet.

    Raises:
        BrokenEntryError: there is neither a list of messages nor a prompt.
    """
    request = ImportedRequest(
        segment=label_of(flat, "segment"),
        options=options_of(flat),
        started_at=next(
            (found for key in ("created", "timestamp", "created_at") if (found := time_of(flat.get(key)))), None
        ),
        conversation=label_of(flat, "conversation_id", "session_id", "thread_id"),
    )
    if flat.get("prompt_token_ids") is not None:
        request = replace(request, prompt_ids=ids_of(flat["prompt_token_ids"], "prompt_token_ids"))
    if "messages" in flat:
        return replace(request, messages=messages_of(flat["messages"]))
    if "prompt" in flat:
        return replace(request, prompt=text_of(flat["prompt"], "prompt"))
    if request.prompt_ids:
        return request
    raise BrokenEntryError("there is no prompt: neither messages nor prompt")


def answered(asked: ImportedRequest, choice: Any, name: str) -> ImportedRequest:
    """What was asked with one of its answers.

    Raises:
        BrokenEntryError: the answer is no text.
    """
    if not isinstance(choice, dict):
        raise BrokenEntryError(f"{name} is {shown(choice)}, an object is needed")
    ids = ids_of(choice["token_ids"], f"{name}.token_ids") if choice.get("token_ids") is not None else None
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    if content is None and isinstance(message, dict) and message.get("tool_calls"):
        raise BrokenEntryError(f"{name} is a tool call, only text can be imported")
    if content is None and ids is None:
        raise BrokenEntryError(f"{name} has no text: neither message.content nor text")
    text = None if content is None else content_of(content, f"{name}.message.content")
    return replace(asked, completion=text, output_ids=ids, is_ended=choice.get("finish_reason") in ENDED)


def _from_messages(asked: ImportedRequest) -> ImportedRequest:
    """Where the last message is the assistant's, it is the answer."""
    if not asked.messages or asked.messages[-1]["role"] != "assistant":
        return asked
    if len(asked.messages) == 1:
        raise BrokenEntryError("messages has an answer alone, nothing that was asked")
    return replace(asked, messages=asked.messages[:-1], completion=asked.messages[-1]["content"])
