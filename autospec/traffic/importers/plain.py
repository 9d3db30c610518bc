"""`{"prompt": ..., "completion": ...}`: a text that goes to the model as it is, and what came of it, if anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autospec.traffic.importers.base import BrokenEntryError, ImportedRequest, shown, text_of
from autospec.traffic.importers.openai import prompt_of


class Plain:
    name = "plain"
    keys = "prompt, completion"

    def matches(self, entry: Mapping[str, Any]) -> bool:
        return "prompt" in entry and "choices" not in entry

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]:
        text_of(entry.get("prompt"), "prompt")
        asked = prompt_of({key: value for key, value in entry.items() if key != "messages"})
        completion = entry.get("completion")
        if completion is not None and not isinstance(completion, str):
            raise BrokenEntryError(f"completion is {shown(completion)}, a text is needed")
        return [replace(asked, completion=completion)]
