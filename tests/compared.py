"""One call under plain decoding and under blocks: the same tokens, or left to `generate` with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from test_decoder import Oracle

import autospec
from autospec.drafts import DraftSource
from autospec.policies import Fixed

NEW_TOKENS = 24


def no_options() -> dict[str, Any]:
    return {}


def answer(
    model: Any, ids: torch.Tensor | None, options: Callable[[], dict[str, Any]] = no_options, *, do_sample: bool
) -> torch.Tensor:
    """[1, n], always from the same seed. `options` is called each time: some of what it makes keeps state."""
    torch.manual_seed(1)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, **options()}
    if do_sample:  # sharp enough for the context to count beside the noise
        settings.setdefault("temperature", 0.4)
    output = model.generate(*([] if ids is None else [ids]), **settings)
    sequences: torch.Tensor = getattr(output, "sequences", output)
    return sequences


def assert_exact(
    model: Any,
    ids: torch.Tensor | None,
    options: Callable[[], dict[str, Any]] = no_options,
    *,
    do_sample: bool,
    block_length: int = 5,
    spoil_every: int = 4,
    source: Callable[[list[int]], DraftSource] | None = None,
    rejects: bool = True,
) -> torch.Tensor:
    """Blocks give plain decoding's tokens and leave torch's generator as it does; drafts were accepted and rejected.

    Args:
        model: the target.
        ids: [1, n], the prompt; None where the call gives it in another way.
        options: of the call.
        do_sample: draw tokens.
        block_length: of every block.
        spoil_every: which of the drafted tokens are wrong; 0 is none.
        source: makes another source from the answer; an oracle otherwise.
        rejects: whether a draft is rejected at all.

    Returns:
        The answer, [1, n].
    """
    plain = answer(model, ids, options, do_sample=do_sample)
    generator_state = torch.get_rng_state()
    tokens = plain[0].tolist()
    draft = Oracle(tokens, spoil_every) if source is None else source(tokens)
    policy = Fixed(draft.name, block_length=block_length)
    with autospec.wrap(model, drafts=[draft], policy=policy, sampling="paired") as speculator:
        found = answer(model, ids, options, do_sample=do_sample)
        record = speculator.last_request
    assert record is not None
    assert record.fallback_reason is None
    assert record.notes is None
    assert torch.equal(found, plain)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert record.num_accepted_tokens > 0
    assert (record.num_accepted_tokens < record.num_judged_tokens) == rejects
    return found


def assert_plain(
    model: Any,
    ids: torch.Tensor | None,
    reason: str,
    options: Callable[[], dict[str, Any]] = no_options,
    *,
    do_sample: bool,
    inside: bool = False,
) -> None:
    """No drafts, the tokens of plain decoding, the reason in the record, and one warning.

    Args:
        model: the target.
        ids: [1, n], the prompt.
        reason: part of the recorded reason.
        options: of the call.
        do_sample: draw tokens.
        inside: decoded plainly by autospec's own loop, and not left to `generate`.
    """
    plain = answer(model, ids, options, do_sample=do_sample)
    with (
        warnings.catch_warnings(record=True) as caught,
        autospec.wrap(model, drafts=[Oracle(plain[0].tolist())], policy=Fixed("oracle", block_length=5)) as speculator,
    ):
        warnings.simplefilter("always")
        found = answer(model, ids, options, do_sample=do_sample)
        record = speculator.last_request
        if not inside:  # said once for all requests with this reason
            answer(model, ids, options, do_sample=do_sample)
    assert record is not None
    assert torch.equal(found, plain)
    assert record.num_draft_tokens == 0
    recorded, other = (record.notes, record.fallback_reason) if inside else (record.fallback_reason, record.notes)
    assert reason in (recorded or "")
    assert other is None
    said = [str(w.message) for w in caught if str(w.message).startswith("autospec: ")]
    assert said == [f"autospec: {recorded if inside else f'left to the original generate: {recorded}'}"]
