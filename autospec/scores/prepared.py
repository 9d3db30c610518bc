"""How a recorded request was decoded: its processors and options as `generate` prepares them, without a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList

from autospec.decoding.decoder import temperature_of
from autospec.decoding.processors import pure_processors
from autospec.drafts.base import DraftRequest
from autospec.randomness import TorchRandomness

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request as the decoder and its draft sources would have met it."""

    processors: LogitsProcessorList  # all of the target's
    request: DraftRequest
    max_new_tokens: int
    temperature: float  # 0 when greedy


def prepare(
    model: PreTrainedModel,
    prompt: Sequence[int],
    options: Mapping[str, Any],
    *,
    segment: str,
    is_paired: bool,
) -> Prepared:
    """Ask `generate` what it would decode with.

    Args:
        model: the target, not wrapped.
        prompt: token ids.
        options: of `generate`, as traffic keeps them.
        segment: of the request.
        is_paired: whether drafts draw with the target's noise.
    """
    found: list[Prepared] = []

    def stand_in(
        _: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, generation_config: Any, **__: Any
    ) -> Tensor:
        do_sample = bool(generation_config.do_sample)
        request = DraftRequest(
            device=input_ids.device,
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            do_sample=do_sample,
            processors=pure_processors(logits_processor),
            randomness=TorchRandomness(input_ids.device, torch.Generator(input_ids.device).manual_seed(0)),
            scores_dtype=torch.float32,
            is_paired=is_paired,
            segment=segment,
        )
        room = int(generation_config.max_length) - input_ids.shape[1]
        found.append(Prepared(logits_processor, request, room, temperature_of(generation_config) if do_sample else 0.0))
        return input_ids

    ids = torch.tensor([list(prompt)], device=model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=stand_in, **options)
    return found[0]
