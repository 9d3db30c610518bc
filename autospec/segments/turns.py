"""Who says what in a prompt, whatever chat template made it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# <|im_start|>, <|start_header_id|>; DeepSeek's full-width bars; Gemma; Llama 2 and Mistral; sentence marks
_MARKER = re.compile(
    r"(<\|[^<>|\n]{1,40}\|>|<\uff5c[^<>\uff5c\n]{1,40}\uff5c>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|</?s>"
    r"|<(?:bos|eos|pad|unk)>)"
)
_ROLE = re.compile(r"(system|developer|user|human|assistant|model|tool|ipython)(?=[ \t]*(?:\n|:|$))[ \t]*:?", re.I)
_IN_MARKER = re.compile(r"(?:^|\W)(system|user|human|assistant)\W", re.I)
_NAMES = {"human": "user", "model": "assistant", "developer": "system", "ipython": "tool"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. `role` is `user` where nothing tells."""

    role: str
    text: str


def turns_of(text: str) -> list[Turn]:
    """The turns of a prompt in their order, empty ones left out; a text without markers is one turn of the user."""
    if not _MARKER.search(text):
        return [Turn("user", text.strip())] if text.strip() else []
    turns: list[Turn] = []
    role = "user"
    for index, piece in enumerate(_MARKER.split(text)):
        if index % 2:
            role = _role_after(piece, role)
            continue
        said = piece.strip()
        if index and (named := _ROLE.match(said)):
            role = _NAMES.get(named[1].lower(), named[1].lower())
            said = said[named.end() :].strip()
        if said:
            turns.append(Turn(role, said))
    return turns


def _role_after(marker: str, before: str) -> str:
    if "INST" in marker:
        return "assistant" if "/" in marker else "user"
    if "SYS" in marker:
        return "user" if "/" in marker else "system"
    if named := _IN_MARKER.search(marker):
        return _NAMES.get(named[1].lower(), named[1].lower())
    return before
