"""What every importer does: one entry of a file in, requests as text out. Unknown fields are ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from autospec.types import PhaseSeconds

Message = Mapping[str, str]
"""`role` and `content`."""


class BrokenEntryError(ValueError):
    """An entry cannot be imported; the text says why."""


@dataclass(frozen=True, slots=True)
class ImportedRequest:
    """A request as a log has it: messages, or a prompt as text or token ids; with an answer or without."""

    messages: tuple[Message, ...] = ()
    prompt: str | None = None  # where there are no messages
    prompt_ids: tuple[int, ...] | None = None  # where the log has them: they go before text
    completion: str | None = None
    output_ids: tuple[int, ...] | None = None
    is_ended: bool = False  # the log says that the model ended the answer itself: EOS belongs to it
    segment: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)  # of `generate`
    started_at: datetime | None = None  # UTC
    conversation: str | None = None
    later_turns: tuple[str, ...] = ()  # what the user says next, each once the one before is answered
    total_seconds: float | None = None
    seconds: PhaseSeconds | None = None
    acceptance_lengths: Mapping[int, int] = field(default_factory=dict)  # (+1 included) -> blocks
    num_draft_tokens: int = 0


class Importer(Protocol):
    """A format.

    `matches` says whether an entry looks like it; `read` gives its requests or raises `BrokenEntryError`.
    """

    name: str
    keys: str  # that tell the format, for messages

    def matches(self, entry: Mapping[str, Any]) -> bool: ...

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]: ...


def text_of(value: Any, name: str) -> str:
    """A string that is not empty.

    Raises:
        BrokenEntryError: it is not.
    """
    if not isinstance(value, str) or not value.strip():
        raise BrokenEntryError(f"{name} is {shown(value)}, a text that is not empty is needed")
    return value


def content_of(value: Any, name: str) -> str:
    """The text of a message: a string, or parts of which each is text.

    Raises:
        BrokenEntryError: it is neither.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts = []
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise BrokenEntryError(f"{name} has a part of type {shown(kind)}, only text can be imported")
            texts.append(part["text"])
        return "".join(texts)
    raise BrokenEntryError(f"{name} is {shown(value)}, a text is needed")


def messages_of(value: Any, name: str = "messages") -> tuple[Message, ...]:
    """Chat messages, of each its role and text.

    Raises:
        BrokenEntryError: it is no such list.
    """
    if not isinstance(value, list) or not value:
        raise BrokenEntryError(f"{name} is {shown(value)}, a list of messages is needed")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise BrokenEntryError(f"{name}[{index}] is {shown(message)}, an object with role and content is needed")
        role = text_of(message.get("role"), f"{name}[{index}].role")
        messages.append({"role": role, "content": content_of(message.get("content"), f"{name}[{index}].content")})
    return tuple(messages)


def ids_of(value: Any, name: str) -> tuple[int, ...]:
    """Token ids.

    Raises:
        BrokenEntryError: they are none.
    """
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise BrokenEntryError(f"{name} is {shown(value)}, a list of token ids is needed")
    return tuple(value)


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def time_of(value: Any) -> datetime | None:
    """A time as logs write it: seconds (or milliseconds) since 1970, or ISO 8601. None where it is not understood."""
    if (number := number_of(value)) is not None:
        try:
            return datetime.fromtimestamp(number / 1000 if number > 1e11 else number, UTC)
        except (ValueError, OverflowError, OSError):
            return None
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            return None
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return None


def options_of(entry: Mapping[str, Any]) -> dict[str, object]:
    """How the log says that tokens were chosen, in the words of `generate`."""
    options: dict[str, object] = {}
    temperature = number_of(entry.get("temperature"))
    if temperature is not None and temperature >= 0:
        options["do_sample"] = temperature > 0
        if temperature > 0:
            options["temperature"] = temperature
    for name in ("top_p", "min_p", "repetition_penalty"):
        value = number_of(entry.get(name))
        if value is not None and 0 < value <= (1 if name != "repetition_penalty" else math.inf):
            options[name] = value
    if type(entry.get("top_k")) is int and entry["top_k"] > 0:
        options["top_k"] = entry["top_k"]
    for name in ("max_new_tokens", "max_completion_tokens", "max_tokens"):
        if type(entry.get(name)) is int and entry[name] > 0:
            options["max_new_tokens"] = entry[name]
            break
    return options


def label_of(entry: Mapping[str, Any], *names: str) -> str | None:
    """The first of these fields that holds a label, also within `metadata`."""
    metadata = entry.get("metadata")
    for place in (entry, metadata if isinstance(metadata, dict) else {}):
        for name in names:
            value = place.get(name)
            if isinstance(value, str) and value.strip():
                return value
            if type(value) is int:
                return str(value)
    return None


def shown(value: Any) -> str:
    """A value, short enough for a line."""
    return f"{value!r:.40}"
