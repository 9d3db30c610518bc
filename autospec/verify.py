"""Greedy answers to real prompts on a real model, for each source and block length, against its own `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autospec.caches import CACHE_KEYWORD, append, decoding_cache, stop_recording
from autospec.data import DemoPrompt
from autospec.decoding.ties import Difference, examine
from autospec.demo import encode
from autospec.drafts.base import DraftSource
from autospec.drafts.registry import make_sources
from autospec.speculator import wrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_LENGTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer, compared with plain decoding's."""

    prompt_id: str
    segment: str
    source: str
    block_length: int
    output_tokens: int
    num_judged_tokens: int
    num_accepted_tokens: int
    difference: Difference | None  # None: the same tokens
    fallback_reason: str | None

    @property
    def kind(self) -> str:
        """`identical`, `tie` or `different`."""
        if self.difference is None:
            return "identical"
        return "tie" if self.difference.is_tie else "different"


def verify_greedy(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[DemoPrompt],
    *,
    drafts: Sequence[str | DraftSource] = ("ngram",),
    block_lengths: Sequence[int] = BLOCK_LENGTHS,
    max_new_tokens: int | None = None,
) -> Iterator[Verdict]:
    """Decode every prompt plainly, then with each source and block length.

    The prompt is run once; each answer starts from a copy of that cache.

    Args:
        model, tokenizer: the target.
        prompts: what is asked.
        drafts: as in `autospec.wrap`.
        block_lengths: draft tokens asked for in each block.
        max_new_tokens: of each answer; the prompt's own number if None.
    """
    for prompt in prompts:
        inputs = encode(tokenizer, prompt, model)
        prefilled = _prefilled(model, inputs["input_ids"][:, :-1])

        def answer(inputs: Any = inputs, prefilled: Any = prefilled, prompt: DemoPrompt = prompt) -> list[int]:
            cache = {CACHE_KEYWORD: copy.deepcopy(prefilled)} if prefilled is not None else {}
            length = max_new_tokens or prompt.max_new_tokens
            output = model.generate(**inputs, **cache, max_new_tokens=length, do_sample=False)
            tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
            return tokens

        expected = answer()
        examined: dict[tuple[int, ...], Difference | None] = {}
        for name, source in make_sources(drafts).items():
            for block_length in block_lengths:
                policy = f"fixed:{name}:{block_length}"
                with wrap(model, tokenizer=tokenizer, drafts=[source], policy=policy) as speculator:
                    found = tuple(answer())
                    record = speculator.last_request
                if found not in examined:
                    examined[found] = examine(model, inputs["input_ids"], expected, found)
                assert record is not None  # generate has just set it
                yield Verdict(
                    prompt_id=prompt.prompt_id,
                    segment=prompt.segment,
                    source=name,
                    block_length=block_length,
                    output_tokens=len(found),
                    num_judged_tokens=record.num_judged_tokens,
                    num_accepted_tokens=record.num_accepted_tokens,
                    difference=examined[found],
                    fallback_reason=record.fallback_reason,
                )


@torch.no_grad()
def _prefilled(model: PreTrainedModel, ids: torch.Tensor) -> Any | None:
    """A cache that holds `ids`, [1, n], as `generate` would have left it; None for no tokens."""
    if ids.shape[1] == 0:
        return None
    cache = decoding_cache(model)
    stop_recording(cache)
    return append(model, ids, cache)[1]
