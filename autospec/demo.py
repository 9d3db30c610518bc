"""The main job: real prompts, decoded plainly and under the policy, side by side, measured and recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from autospec.data import DemoPrompt, encode, interleaved
from autospec.decoding.ties import examine, first_difference
from autospec.errors import AutospecError
from autospec.speculator import Speculator, wrap
from autospec.types import Comparison

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
GREEDY = {"do_sample": False}

_log = logging.getLogger("autospec")


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its tokens and the record of its request."""

    tokens: list[int]
    request_id: str


def run_demo(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[DemoPrompt],
    *,
    store: str,
    run: str,
    drafts: Sequence[Any] = ("ngram",),
    policy: str = "auto",
    backend: str = "auto",
    seed: int = 0,
    show_progress: bool = True,
    say: Callable[[str], None] = _log.info,
) -> None:
    """Decode every prompt greedily and sampled, each plainly (control) and under the policy, in alternating order.

    The control is the model's own `generate`. Records and comparisons go to the store as they come, so that a run that
    is cut short leaves what it measured.

    Args:
        model, tokenizer: the target.
        prompts: what is asked.
        store: URL of the telemetry database.
        run: label of this run's records.
        drafts, policy, backend: as in `autospec.wrap`.
        seed: of the sampled answers; each pair uses the same noise on both sides.
        show_progress: a bar on stderr.
        say: told of each stage before the bar begins.
    """
    say("warming up ...")
    _warm_up(model, tokenizer, prompts[0])
    if policy == "auto":
        say("measuring what drafting and verifying cost on this device ...")
    with wrap(
        model,
        tokenizer=tokenizer,
        drafts=drafts,
        policy=policy,
        backend=backend,
        store=store,
        run=run,
        control_share=0.0,
        resume=False,
    ) as speculator:
        jobs = [(prompt, options) for prompt in interleaved(prompts) for options in (GREEDY, SAMPLED)]
        bar = tqdm(jobs, desc="demo", unit="pair", disable=not show_progress)
        for number, (prompt, options) in enumerate(bar):
            bar.set_postfix_str(f"{prompt.segment}, {'sampled' if options['do_sample'] else 'greedy'}")
            _one_pair(speculator, tokenizer, prompt, options, seed=seed + number, control_first=number % 2 == 0)
        speculator.flush()
        if speculator.recorder is not None and speculator.recorder.dropped:
            raise AutospecError(
                f"{speculator.recorder.dropped} records could not be written: {speculator.recorder.last_error}"
            )


def new_run_name() -> str:
    """As in `demo-20260131-235959`, UTC."""
    return datetime.now(UTC).strftime("demo-%Y%m%d-%H%M%S")


def _one_pair(
    speculator: Speculator,
    tokenizer: Any,
    prompt: DemoPrompt,
    options: dict[str, Any],
    *,
    seed: int,
    control_first: bool,
) -> None:
    inputs = encode(tokenizer, prompt, speculator.model)

    def answer(is_control: bool) -> Answered:
        torch.manual_seed(seed)
        with speculator.control() if is_control else nullcontext():
            output = speculator.model.generate(
                **inputs, max_new_tokens=prompt.max_new_tokens, segment=prompt.segment, **options
            )
        record = speculator.last_request
        assert record is not None  # generate has just set it
        return Answered(output[0, inputs["input_ids"].shape[1] :].tolist(), record.request_id)

    first, second = answer(control_first), answer(not control_first)
    control, treated = (first, second) if control_first else (second, first)
    if speculator.recorder is not None:
        speculator.recorder.compare(_compare(speculator.model, inputs["input_ids"], control, treated, options))


def _compare(
    model: PreTrainedModel, prompt: torch.Tensor, control: Answered, treated: Answered, options: dict[str, Any]
) -> Comparison:
    position = first_difference(control.tokens, treated.tokens)
    difference = None if options["do_sample"] else examine(model, prompt, control.tokens, treated.tokens)
    return Comparison(
        control_request_id=control.request_id,
        request_id=treated.request_id,
        is_identical=position is None,
        first_difference=position,
        logit_gap=difference.logit_gap if difference else None,
        is_tie=difference.is_tie if difference else None,
    )


def _warm_up(model: PreTrainedModel, tokenizer: Any, prompt: DemoPrompt) -> None:
    """First calls allocate and choose kernels; that belongs to neither side."""
    model.generate(**encode(tokenizer, prompt, model), max_new_tokens=4, do_sample=False)
