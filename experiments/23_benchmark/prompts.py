"""Which prompts: of each segment, spread over the wanted range of lengths."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A first turn under the target's chat template."""

    prompt_id: str
    segment: str
    tokens: tuple[int, ...]


def read(path: Path, tokenizer: Any) -> dict[str, list[Prompt]]:
    """All prompts of a Spec-Bench file by segment."""
    found: dict[str, list[Prompt]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["turns"][0]}], add_generation_prompt=True, return_dict=True
        )
        found[row["segment"]].append(Prompt(str(row["question_id"]), row["segment"], tuple(encoded["input_ids"])))
    return dict(found)


def spread(candidates: Sequence[Prompt], count: int, least: int, most: int) -> list[Prompt]:
    """So many, as evenly as there are over the logarithm of the length. Those outside the range come last."""

    def outside(prompt: Prompt) -> int:
        return max(0, least - len(prompt.tokens), len(prompt.tokens) - most)

    inside = [p for p in candidates if outside(p) == 0]
    if count == 0 or len(inside) < count:
        return sorted(candidates, key=outside)[:count]
    lengths = sorted(len(p.tokens) for p in inside)
    low, high = math.log(lengths[0]), math.log(lengths[-1])
    chosen: list[Prompt] = []
    for i in range(count):
        wanted = low + (high - low) * ((i + 0.5) / count if count == 1 else i / (count - 1))
        rest = [p for p in inside if p not in chosen]
        chosen.append(min(rest, key=lambda p: abs(math.log(len(p.tokens)) - wanted)))
    return chosen


def choose(
    segments: Mapping[str, Sequence[Prompt]], limit: int, rehearsed: int, swept: int, least: int, most: int
) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """Of each segment, `limit` prompts to measure, `rehearsed` others to learn on, and `swept` others to try settings
    on, as far as possible of those to learn on; segments in turn."""
    measured = {s: spread(prompts, limit, least, most) for s, prompts in segments.items()}
    rest = {s: [p for p in prompts if p not in measured[s]] for s, prompts in segments.items()}
    others = {s: spread(prompts, max(rehearsed, swept), least, most) for s, prompts in rest.items()}
    tried = {s: spread(prompts, swept, least, most) for s, prompts in others.items()}
    learned = {s: spread(prompts, rehearsed, least, most) for s, prompts in others.items()}
    return _in_turn(measured.values()), _in_turn(learned.values()), _in_turn(tried.values())


def available(segments: Mapping[str, Sequence[Prompt]], chosen: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """Lengths in tokens that a segment has, and those that were chosen of it."""
    made = {}
    for segment, prompts in segments.items():
        lengths = sorted(len(p.tokens) for p in prompts)
        made[segment] = {
            "prompts": len(lengths),
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
            "chosen": sorted(len(p.tokens) for p in chosen if p.segment == segment),
        }
    return made


def _in_turn(groups: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    return [prompt for turn in zip_longest(*groups) for prompt in turn if prompt is not None]
