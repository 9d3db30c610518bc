"""The decoder in the form that `generate(custom_generate=...)` takes; one object per call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from autospec.backends.backend import Backend, Lease
from autospec.caches import context_window, stretches_beyond
from autospec.decoding.answer import Answer
from autospec.decoding.loop import Chooser, Loop
from autospec.decoding.processors import pure_processors
from autospec.decoding.selection import make_rule
from autospec.decoding.static_target import StaticTargetSession
from autospec.decoding.support import CannotDecodeError, check_prompt, why_not
from autospec.decoding.tally import Tally
from autospec.decoding.target import TargetSession
from autospec.decoding.tokens import Tokens
from autospec.decoding.verification import Verification
from autospec.drafts.base import DraftRequest, DraftSource
from autospec.randomness import Randomness, TorchRandomness
from autospec.types import RequestContext


class Decoder:
    """Decodes one `generate` call by blocks.

    transformers prepares the call (processors, stopping criteria, cache, defaults) and then hands it over. Streamers do
    not reach a custom decoding loop, so the streamer is given here and not to `generate`.

    Args:
        segment: the request's segment.
        chooser: picks an action before each block.
        sources: draft sources by name.
        sampling: how drawn drafts are verified, `paired` or `maximal`.
        streamer: sees the prompt and then each committed token.
        make_randomness: where draws come from; torch's global generator unless something is to be proved.
        scores_dtype: of the target's processed scores; `generate` uses float32.
        keeps_blocks: the tally keeps each block's outcome.
        backend: how forwards run; None: as the models themselves run them.
        hands_back_cache: somebody may look at the target's cache afterwards.
    """

    def __init__(
        self,
        *,
        segment: str,
        chooser: Chooser,
        sources: Mapping[str, DraftSource],
        sampling: str,
        streamer: BaseStreamer | None = None,
        make_randomness: Callable[[torch.device], Randomness] = TorchRandomness,
        scores_dtype: torch.dtype = torch.float32,
        keeps_blocks: bool = False,
        backend: Backend | None = None,
        hands_back_cache: bool = True,
    ) -> None:
        self._segment = segment
        self._chooser = chooser
        self._sources = sources
        self._sampling = sampling
        self._streamer = streamer
        self._make_randomness = make_randomness
        self._scores_dtype = scores_dtype
        self._keeps_blocks = keeps_blocks
        self._backend = backend
        self._hands_back_cache = hands_back_cache
        self.__signature__ = _SIGNATURE
        self.tally = Tally()
        self.prompt_tokens = 0
        self.output_tokens = 0

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decode. Args: input_ids: [1, n]. Returns: what `generate` returns.

        Raises:
            CannotDecodeError: the call is one for the original `generate`; nothing was drawn or streamed yet.
            ConfigurationError: the prompt is empty or longer than the context window.
        """
        if why := why_not(model, input_ids, generation_config, model_kwargs):
            raise CannotDecodeError(why)
        check_prompt(model, input_ids, context_window(model))
        self.prompt_tokens = input_ids.shape[1]
        text = _without_padding(input_ids, model_kwargs.get("attention_mask"))
        do_sample = bool(generation_config.do_sample)
        request = RequestContext(
            segment=self._segment,
            prompt_tokens=len(text),
            max_new_tokens=int(generation_config.max_length) - self.prompt_tokens,
            do_sample=do_sample,
            sources=tuple(self._sources),
            temperature=temperature_of(generation_config) if do_sample else 0.0,
        )
        is_control = self._chooser.is_control(request)
        # controls run as `generate` runs them: what is gained is measured against that
        with nullcontext(Lease()) if self._backend is None or is_control else self._backend.lease() as lease:
            return self._decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                text=text,
                request=request,
                lease=lease,
                is_control=is_control,
            )

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        text: list[int],
        request: RequestContext,
        lease: Lease,
        is_control: bool,
    ) -> Any:
        target = self._target(model, generation_config, model_kwargs, lease, is_control=is_control)
        randomness = self._make_randomness(input_ids.device)
        draft_request = DraftRequest(
            device=input_ids.device,
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            do_sample=request.do_sample,
            processors=pure_processors(logits_processor),
            randomness=randomness,
            scores_dtype=self._scores_dtype,
            is_paired=self._sampling == "paired",
            segment=self._segment,
            target_cache=target.cache,
            static_draft=lease.draft,
        )
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        answer = Answer(Tokens(input_ids), stopping_criteria, generation_config, self._streamer)
        rule = make_rule(do_sample=request.do_sample, sampling=self._sampling, randomness=randomness)
        loop = Loop(
            target=target,
            answer=answer,
            verification=Verification(answer, logits_processor, rule, text, self._scores_dtype),
            chooser=self._chooser,
            sources=self._sources,
            request=request,
            draft_request=draft_request,
            text=text,
            window=context_window(model),
            is_control=is_control,
            stretches_beyond=None if self._chooser.is_off else stretches_beyond(model),
        )
        self.tally = loop.tally
        self.tally.outcomes = [] if self._keeps_blocks else None
        try:
            loop.run()
        except BaseException as error:
            try:
                target.finish()
            except RuntimeError as other:  # it may have run out of memory; the first error is the one to raise
                error.add_note(f"the cache could not be put back: {other}")
            answer.break_stream()
            raise
        finally:
            self.output_tokens = answer.num_tokens
            if rule.num_residual_underflows:
                loop.tally.notes.append(f"{rule.num_residual_underflows} residuals underflowed")
            loop.tally.is_prepared = lease.is_packed or (lease.target is not None and target.why_eager is None)
            if why := lease.why_not or target.why_eager:
                loop.tally.notes.append(f"decoded eagerly: {why}")
        answer.end_stream()
        loop.learn(self.output_tokens)
        return answer.output(target.finish())

    def _target(
        self,
        model: PreTrainedModel,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        lease: Lease,
        *,
        is_control: bool,
    ) -> TargetSession:
        hands_back = self._hands_back_cache
        if lease.target is None:
            session = TargetSession(model, config, model_kwargs, hands_back=hands_back, is_control=is_control)
            session.is_prepared = lease.is_packed
            return session
        return StaticTargetSession(model, config, model_kwargs, lease.target, hands_back=hands_back)


_parameters = list(inspect.signature(Decoder.__call__).parameters.values())
_SIGNATURE = inspect.Signature(_parameters[1:])  # generate asks for it in every call, which takes longer than a block


def temperature_of(config: GenerationConfig) -> float:
    return float(config.temperature) if config.temperature is not None else 1.0


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """The prompt's tokens as draft sources see them."""
    row = input_ids[0]
    if attention_mask is not None and attention_mask.shape == input_ids.shape:
        row = row[attention_mask[0].to(row.device) != 0]
    tokens: list[int] = row.tolist()
    return tokens
