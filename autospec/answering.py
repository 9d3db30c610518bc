"""The plain target's answers as traffic: to prompts of a file, and to what recorded traffic left unanswered."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autospec.calls import Call
from autospec.data import DemoPrompt, encode
from autospec.deployment import model_name
from autospec.errors import AutospecError
from autospec.recording import SETTINGS, options_of
from autospec.speculator import Speculator, wrap
from autospec.traffic import FollowUp, Manifest, ShardWriter, Traffic, TrafficReader, TrafficRequest
from autospec.traffic.importers import BrokenEntryError
from autospec.traffic.manifest import open_folder
from autospec.traffic.tokenising import chat_ids
from autospec.traffic.writer import MAX_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_NEW_TOKENS = 256
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_TAKEN = set(SETTINGS) - {"max_length"}


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one unanswered request."""

    request: TrafficRequest  # answered, where it was
    error: str | None  # why it was not
    num_follow_ups: int  # requests that its answer added to those that wait


def record_prompts(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[DemoPrompt],
    traffic: Traffic,
    options: Mapping[str, Any],
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> Iterator[DemoPrompt]:
    """Answer prompts with the plain target and record them.

    Args:
        model, tokenizer: the target.
        prompts: what is asked.
        traffic: where to.
        options: of `generate`, as in `{"do_sample": True, "temperature": 0.8}`.
        max_new_tokens: of each answer; the prompt's own number if None.
        seed: of the first sampled answer; the next one has the next.

    Yields:
        each prompt once it is answered.

    Raises:
        AutospecError: an answer could not be recorded.
    """
    with _plain(model, tokenizer, traffic):
        for number, prompt in enumerate(prompts):
            model.generate(
                **encode(tokenizer, prompt, model),
                **options,
                max_new_tokens=max_new_tokens or prompt.max_new_tokens,
                segment=prompt.segment,
                generator=torch.Generator(model.device).manual_seed(seed + number),
            )
            if traffic.failed:
                raise AutospecError(f"{prompt.prompt_id} could not be recorded: {traffic.last_error}")
            yield prompt


def complete(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
) -> Iterator[Completion]:
    """Answer what waits for an answer, once, with the plain target. Run again, it goes on with the rest.

    A request is answered as its own options say; where they do not say how to choose tokens, as `options` do. Its noise
    follows from the seed and its id, so that a run that was cut short ends as it would have. Later turns of a
    conversation are asked, each once the one before is answered.

    Args:
        model, tokenizer: the target.
        folder: of the traffic.
        options: of `generate`; greedy if None.
        max_new_tokens: of answers whose options say nothing of it.
        seed: of sampled answers.
        max_bytes: bound of the folder.

    Raises:
        ConfigurationError: the folder holds no traffic, or traffic of another tokenizer.
        AutospecError: the folder cannot be written, or has reached its bound.
    """
    reader = TrafficReader(folder)
    open_folder(folder, Manifest.of(tokenizer, model_name(model)))
    waiting = deque(request for request in reader if request.is_pending)
    writer = ShardWriter(folder, max_bytes=max_bytes)
    defaults = {"do_sample": False} if options is None else dict(options)
    try:
        with _plain(model, tokenizer, False) as speculator:
            while waiting:
                request = waiting.popleft()
                try:
                    answered = _answered(speculator, request, defaults, max_new_tokens, seed)
                    follow_up = _follow_up(answered, tokenizer)
                except Exception as error:  # noqa: BLE001  # one that is too long, say, must not keep the others waiting
                    yield Completion(request, " ".join(f"{type(error).__name__}: {error}".split()), 0)
                    continue
                answered = replace(answered, follow_up=None)
                for each in (follow_up, answered):  # in this order: cut short between them, the answer is made again
                    if each is not None:
                        _write(writer, each)
                if follow_up is not None:
                    waiting.appendleft(follow_up)
                yield Completion(answered, None, int(follow_up is not None))
    finally:
        writer.close()


@contextmanager
def _plain(model: Any, tokenizer: Any, record: bool | Traffic) -> Iterator[Speculator]:
    """The target alone, by blocks of length 0: as its own `generate`, with seconds by phase."""
    with wrap(
        model, tokenizer=tokenizer, drafts=(), policy="off", control_share=1.0, record=record, backend="eager"
    ) as speculator:
        yield speculator


def _answered(
    speculator: Speculator, request: TrafficRequest, defaults: Mapping[str, Any], max_new_tokens: int, seed: int
) -> TrafficRequest:
    model = speculator.model
    prompt = torch.tensor([request.prompt], device=model.device)
    options = {name: value for name, value in request.options.items() if name in _TAKEN}
    if "do_sample" not in options:
        options = {**defaults, **options}
    if not options["do_sample"]:
        options = {name: value for name, value in options.items() if name not in _SAMPLING}
    options.setdefault("max_new_tokens", max_new_tokens)
    arguments: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **options}
    generator = torch.Generator(model.device).manual_seed(_seed(seed, request.request_id))
    output: Any = model.generate(**arguments, generator=generator, segment=request.segment)
    record = speculator.last_request
    assert record is not None  # generate has just set it
    return replace(
        request,
        output=tuple(output[0, len(request.prompt) :].tolist()),
        options=options_of(Call(model, (), arguments)),
        decoding=record.decoding,
        policy=record.policy,
        is_control=record.is_control,
        fallback_reason=record.fallback_reason,
        total_seconds=record.total_seconds,
        seconds=record.seconds,
        acceptance_lengths=record.acceptance_lengths,
        num_draft_tokens=record.num_draft_tokens,
        origin="complete",
        revision=request.revision + 1,
    )


def _follow_up(answered: TrafficRequest, tokenizer: Any) -> TrafficRequest | None:
    """The next turn of the conversation, which waits for its answer."""
    later = answered.follow_up
    if later is None or not later.turns:
        return None
    said = {"role": "assistant", "content": tokenizer.decode(answered.output, skip_special_tokens=True)}
    messages = (*later.messages, said, {"role": "user", "content": later.turns[0]})
    try:
        prompt = chat_ids(tokenizer, messages)
    except BrokenEntryError as error:
        raise AutospecError(f"the next turn cannot be asked: {error}") from error
    return TrafficRequest(
        request_id=hashlib.blake2b(f"{answered.request_id} next".encode(), digest_size=16).hexdigest(),
        started_at=answered.started_at,
        segment=answered.segment,
        prompt=prompt,
        options={name: value for name, value in answered.options.items() if name != "max_length"},
        conversation=answered.conversation,
        turn=answered.turn + 1,
        origin=answered.origin,
        is_arrival_known=False,
        follow_up=FollowUp(messages, later.turns[1:]),
    )


def _write(writer: ShardWriter, request: TrafficRequest) -> None:
    try:
        writer.write(request)
    except OSError as error:
        raise AutospecError(f"cannot write traffic: {error.strerror or type(error).__name__}") from error


def _seed(seed: int, request_id: str) -> int:
    digest = hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
