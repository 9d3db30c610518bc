"""What a draft source would have done along an answer that is already there: no forward of the target is run.

A block ends at the first draft token that is not the answer's own. Under greedy decoding, with one-hot drafts, and in
paired sampling that is what the decoder does, so that the counts are the decoder's own, block for block.

Source: docs/exactness.md for paired sampling, in which the text follows from prompt and seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autospec.data import DemoPrompt, encode
from autospec.decoding.tally import Stopwatch
from autospec.drafts.base import DraftRequest, DraftSession, DraftSource, Proposal, checked, hidden_layers_of
from autospec.errors import AutospecError, DraftError
from autospec.randomness import TorchRandomness
from autospec.speculator import wrap
from autospec.types import OFF, Action, BlockOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Recording:
    """A plain answer, and what a draft source may know about its request."""

    prompt_id: str
    segment: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_new_tokens: int
    request: DraftRequest
    noise: tuple[Tensor, ...]  # the generator's state before each token of the answer; empty for greedy answers


class Replay:
    """One session along one recording, block by block.

    Args:
        source: attached to the target already.
        recording: the answer, made by the target that the source is attached to.

    Raises:
        DraftError: the source looks at more than tokens.
    """

    def __init__(self, source: DraftSource, recording: Recording) -> None:
        if hidden_layers_of(source):
            raise DraftError(f"{source.name} looks at the target's hidden states, which no recording holds")
        self._name = source.name
        self._recording = recording
        self._generator = torch.Generator(recording.request.device)
        randomness = TorchRandomness(recording.request.device, self._generator)
        self._source = source
        self._request = replace(recording.request, randomness=randomness)
        self.session: DraftSession | None = None
        self.failure: str | None = None
        self._text = [*recording.prompt, recording.answer[0]]  # the first token comes from the prompt's forward

    def run(self, block_length: int) -> Iterator[BlockOutcome]:
        """All blocks of the answer, each asked for `block_length` draft tokens, fewer at its end."""
        recording, answer = self._recording, self._recording.answer
        for position in iter(lambda: len(self._text) - len(recording.prompt), len(answer)):
            length = min(block_length, recording.max_new_tokens - position - 1)
            watch = Stopwatch()
            proposal = self._propose(length, position)
            seconds = watch.lap()
            tokens, following = proposal.tokens, answer[position:]
            same = (draft == token for draft, token in zip(tokens, following, strict=False))
            num_accepted = next((index for index, is_same in enumerate(same) if not is_same), None)
            if num_accepted is None:
                num_accepted = min(len(tokens), len(following))
            num_committed = min(num_accepted + 1, len(following))
            yield BlockOutcome(
                segment=recording.segment,
                action=Action(self._name, length) if length > 0 else OFF,
                context_tokens=len(self._text),
                num_draft_tokens=len(tokens),
                num_judged_tokens=min(num_committed, len(tokens)),
                num_accepted_tokens=num_accepted,
                num_committed_tokens=num_committed,
                draft_seconds=seconds - proposal.catch_up_seconds,
                catch_up_seconds=proposal.catch_up_seconds,
            )
            self._text.extend(following[:num_committed])

    def _propose(self, block_length: int, position: int) -> Proposal:
        if block_length < 1 or self.failure is not None:
            return Proposal()
        if self._recording.noise:
            self._generator.set_state(self._recording.noise[position])
        try:
            if self.session is None:
                self.session = self._source.start(self._request)
            proposal = self.session.propose(self._text, block_length)
            return checked(proposal, block_length, self._recording.request.vocab_size)
        except Exception as error:  # noqa: BLE001  # as in the decoder: off for the rest of the request
            self.failure = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
            return Proposal()


def record(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[DemoPrompt],
    options: Mapping[str, Any],
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> Iterator[Recording]:
    """The target's own answers to prompts.

    Args:
        model, tokenizer: the target.
        prompts: what is asked.
        options: of `generate`, as in `{"do_sample": True, "temperature": 0.8}`.
        max_new_tokens: of each answer; the prompt's own number if None.
        seed: of the first sampled answer; the next one has the next.

    Yields:
        one for each answer that has a block with room for a draft. The target's cache is not in it: in a replay
        `early_exit` has one of its own.

    Raises:
        AutospecError: answers cannot be made by the decoder with these options, with the reason.
    """
    listener = _Listener()
    with wrap(
        model, tokenizer=tokenizer, drafts=[listener], policy=f"fixed:{listener.name}:1", backend="eager"
    ) as speculator:
        for number, prompt in enumerate(prompts):
            inputs = encode(tokenizer, prompt, model)
            generator = torch.Generator(model.device).manual_seed(seed + number)
            length = max_new_tokens or prompt.max_new_tokens
            output = model.generate(
                **inputs, **options, max_new_tokens=length, segment=prompt.segment, generator=generator
            )
            made = speculator.last_request
            assert made is not None  # generate has just set it
            if why := made.fallback_reason or made.notes:
                raise AutospecError(f"cannot replay answers with {dict(options)}: {why}")
            prompt_ids = inputs["input_ids"][0].tolist()
            answer = tuple(output[0, len(prompt_ids) :].tolist())
            if listener.request is None:
                continue  # it has no block with room for a draft
            request, listener.request = replace(listener.request, target_cache=None), None
            generator.manual_seed(seed + number)
            yield Recording(
                prompt_id=prompt.prompt_id,
                segment=prompt.segment,
                prompt=tuple(prompt_ids),
                answer=answer,
                max_new_tokens=length,
                request=request,
                noise=_states(generator, request, len(answer)) if request.do_sample else (),
            )


class _Listener:
    """A draft source that proposes nothing and learns what sources are told."""

    name = "listener"

    def __init__(self) -> None:
        self.request: DraftRequest | None = None

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        """Works with every target."""

    def start(self, request: DraftRequest) -> _Listener:
        self.request = request
        return self

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        return Proposal()


def _states(generator: torch.Generator, request: DraftRequest, count: int) -> tuple[Tensor, ...]:
    """The generator's state before each of `count` draws of plain sampling."""
    randomness = TorchRandomness(request.device, generator)
    probs = torch.full((request.vocab_size,), 1 / request.vocab_size, dtype=request.scores_dtype, device=request.device)
    states = []
    for _ in range(count):
        states.append(generator.get_state())
        randomness.categorical(probs)
    return tuple(states)
