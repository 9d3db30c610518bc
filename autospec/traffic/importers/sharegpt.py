"""ShareGPT: `{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}`.

Each answer becomes a request, its prompt all that was said before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autospec.traffic.importers.base import BrokenEntryError, ImportedRequest, Message, label_of, shown, text_of

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class ShareGPT:
    name = "sharegpt"
    keys = "conversations"

    def matches(self, entry: Mapping[str, Any]) -> bool:
        return "conversations" in entry

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]:
        turns = entry.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise BrokenEntryError(f"conversations is {shown(turns)}, a list of turns is needed")
        messages = [_message(turn, f"conversations[{index}]") for index, turn in enumerate(turns)]
        segment, conversation = label_of(entry, "segment"), label_of(entry, "id")
        found = []
        for index, message in enumerate(messages):
            asked = tuple(messages[:index])
            if message["role"] == "assistant" and any(each["role"] == "user" for each in asked):
                found.append(
                    ImportedRequest(
                        messages=asked, completion=message["content"], segment=segment, conversation=conversation
                    )
                )
        if messages[-1]["role"] == "user":
            found.append(ImportedRequest(messages=tuple(messages), segment=segment, conversation=conversation))
        if not found:
            raise BrokenEntryError("conversations has no turn of a user")
        return found


def _message(turn: Any, name: str) -> Message:
    if not isinstance(turn, dict):
        raise BrokenEntryError(f"{name} is {shown(turn)}, an object with from and value is needed")
    role = ROLES.get(str(turn.get("from", turn.get("role"))).lower())
    if role is None:
        raise BrokenEntryError(f"{name} is from {shown(turn.get('from'))}: known are {', '.join(ROLES)}")
    return {"role": role, "content": text_of(turn.get("value", turn.get("content")), f"{name}.value")}
