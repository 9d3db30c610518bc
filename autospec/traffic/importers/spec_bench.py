"""Spec-Bench's `question.jsonl`: questions of one or more turns, none of them answered.

The first turn becomes a request; `autospec traffic complete` asks the later ones, each once the one before is answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autospec.traffic.importers.base import BrokenEntryError, ImportedRequest, label_of, shown, text_of


class SpecBench:
    name = "spec_bench"
    keys = "question_id, turns"

    def matches(self, entry: Mapping[str, Any]) -> bool:
        return "turns" in entry

    def read(self, entry: Mapping[str, Any]) -> Sequence[ImportedRequest]:
        turns = entry.get("turns")
        if not isinstance(turns, list) or not turns:
            raise BrokenEntryError(f"turns is {shown(turns)}, a list of questions is needed")
        texts = [text_of(turn, f"turns[{index}]") for index, turn in enumerate(turns)]
        return [
            ImportedRequest(
                messages=({"role": "user", "content": texts[0]},),
                segment=label_of(entry, "segment") or label_of(entry, "category"),
                conversation=label_of(entry, "question_id"),
                later_turns=tuple(texts[1:]),
            )
        ]
