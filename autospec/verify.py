"""Greedy answers to real prompts on a real model, for each source and block length, against its own `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autospec.caches import CACHE_KEYWORD, append, decoding_cache, stop_recording
from autospec.data import DemoPrompt, encode
from autospec.decoding.ties import Difference, examine
from autospec.drafts.base import DraftSource
from autospec.drafts.registry import make_sources
from autospec.policies.base import Policy
from autospec.speculator import wrap
from autospec.types import RequestRecord

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
        return kind_of(self.difference)


def kind_of(difference: Difference | None) -> str:
    """`identical`, `tie` or `different`."""
    if difference is None:
        return "identical"
    return "tie" if difference.is_tie else "different"


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

    Args:
        model, tokenizer: the target.
        prompts: what is asked.
        drafts: as in `autospec.wrap`.
        block_lengths: draft tokens asked for in each block.
        max_new_tokens: of each answer; the prompt's own number if None.
    """
    for prompt in prompts:
        plain = PlainAnswer(model, tokenizer, prompt, max_new_tokens=max_new_tokens)
        for name, source in make_sources(drafts).items():
            for block_length in block_lengths:
                record, difference = plain.compare([source], f"fixed:{name}:{block_length}")
                yield Verdict(
                    prompt_id=prompt.prompt_id,
                    segment=prompt.segment,
                    source=name,
                    block_length=block_length,
                    output_tokens=record.output_tokens,
                    num_judged_tokens=record.num_judged_tokens,
                    num_accepted_tokens=record.num_accepted_tokens,
                    difference=difference,
                    fallback_reason=record.fallback_reason,
                )


class PlainAnswer:
    """The model's own greedy answer to a prompt, to compare answers under policies with.

    The prompt is run once; each answer starts from a copy of that cache.

    Args:
        model, tokenizer: the target.
        prompt: what is asked.
        max_new_tokens: of each answer; the prompt's own number if None.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prompt: DemoPrompt, *, max_new_tokens: int | None = None
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._inputs = encode(tokenizer, prompt, model)
        self._max_new_tokens = max_new_tokens or prompt.max_new_tokens
        self._prefilled = _prefilled(model, self._inputs["input_ids"][:, :-1])
        self._examined: dict[tuple[int, ...], Difference | None] = {}
        self.tokens = self._answer()

    def compare(
        self, drafts: Sequence[str | DraftSource], policy: str | Policy
    ) -> tuple[RequestRecord, Difference | None]:
        """Answer once more, under a policy.

        Args:
            drafts, policy: as in `autospec.wrap`.

        Returns:
            The request's record, and where its answer first differs from the plain one; None: the same tokens.
        """
        with wrap(self._model, tokenizer=self._tokenizer, drafts=drafts, policy=policy, backend="eager") as speculator:
            found = tuple(self._answer())
            record = speculator.last_request
        assert record is not None  # generate has just set it
        if found not in self._examined:
            self._examined[found] = examine(self._model, self._inputs["input_ids"], self.tokens, found)
        return record, self._examined[found]

    def _answer(self) -> list[int]:
        cache = {CACHE_KEYWORD: copy.deepcopy(self._prefilled)} if self._prefilled is not None else {}
        output = self._model.generate(**self._inputs, **cache, max_new_tokens=self._max_new_tokens, do_sample=False)
        tokens: list[int] = output[0, self._inputs["input_ids"].shape[1] :].tolist()
        return tokens


@torch.no_grad()
def _prefilled(model: PreTrainedModel, ids: torch.Tensor) -> Any | None:
    """A cache that holds `ids`, [1, n], as `generate` would have left it; None for no tokens."""
    if ids.shape[1] == 0:
        return None
    cache = decoding_cache(model)
    stop_recording(cache)
    return append(model, ids, cache)[1]
