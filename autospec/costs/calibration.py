"""Measures the cost curves of a target and its draft sources, once, when a policy needs them."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList

from autospec.caches import append, context_window, drop_last, new_cache, why_not_rollback
from autospec.costs.table import CostTable, Curve
from autospec.drafts.base import DraftRequest, DraftSource, hidden_layers_of
from autospec.randomness import TorchRandomness, spared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_LENGTHS = (1, 2, 4, 8, 16)
CONTEXTS = (64, 768)
REPEATS = 5
LONG_SECONDS = 10.0
"""A calibration that takes longer says so."""

_log = logging.getLogger("autospec")


def calibrate(
    target: PreTrainedModel,
    sources: Mapping[str, DraftSource],
    *,
    block_lengths: Sequence[int] = BLOCK_LENGTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
) -> CostTable:
    """Time verification for every block length and drafting for every source.

    Widths are measured in turn, round after round, so that a slow moment of the machine touches all of them; the
    median over the rounds is kept. Takes about repeats x contexts x (1 + block lengths) target steps.

    Args:
        target: the model that verifies.
        sources: draft sources by name.
        block_lengths: block lengths to measure, ascending.
        contexts: context lengths in tokens; those beyond the target's window are left out.
        repeats: rounds.
    """
    started = time.perf_counter()
    window = context_window(target) or sys.maxsize
    # what is measured reaches this far beyond the context: the longest block, and a token for each draft proposed
    reach = max(block_lengths) + 1 + (repeats + 1) * len(block_lengths)
    fitting = [c for c in contexts if c + reach <= window] or [max(1, window - reach)]
    widths = (1, *(k + 1 for k in block_lengths))
    with torch.no_grad(), spared(target.device):
        verify = Curve(
            tuple(fitting), widths, tuple(tuple(_verify_medians(target, c, widths, repeats)) for c in fitting)
        )
        measured = {
            name: _draft_curve(target, source, fitting, block_lengths, repeats) for name, source in sources.items()
        }
    drafts = {name: curve for name, curve in measured.items() if curve is not None}
    seconds = time.perf_counter() - started
    level = logging.WARNING if seconds > LONG_SECONDS else logging.INFO
    _log.log(level, "measured what drafting and verifying cost on this device: %.0f s (policy auto, once)", seconds)
    return CostTable(tuple(block_lengths), verify, drafts)


def _verify_medians(target: PreTrainedModel, context: int, widths: Sequence[int], repeats: int) -> list[float]:
    tokens = _some_tokens(target, context + max(widths))
    _, cache = append(target, tokens[:, :context], new_cache(target))
    following = tokens[:, context:]
    if why_not_rollback(cache):  # such a target is decoded plainly; only the plain step matters
        return [_seconds(target, lambda: append(target, following[:, :1], cache))] * len(widths)

    def verify(width: int) -> None:
        append(target, following[:, :width], cache, logits_kept=width)
        drop_last(cache, width)

    return _medians(target, verify, widths, repeats)


def _draft_curve(
    target: PreTrainedModel, source: DraftSource, contexts: Sequence[int], block_lengths: Sequence[int], repeats: int
) -> Curve | None:
    """Over the contexts that the source can draft in; None when there are none, so that it is never chosen."""
    rows: dict[int, tuple[float, ...]] = {}
    for context in contexts:
        try:
            rows[context] = tuple(_draft_medians(target, source, context, block_lengths, repeats))
        except Exception as error:  # noqa: BLE001  # logged; while decoding it would be switched off with this reason
            _log.warning("draft source %s cannot be timed after %d tokens: %s", source.name, context, error)
    return Curve(tuple(rows), tuple(block_lengths), tuple(rows.values())) if rows else None


def _draft_medians(
    target: PreTrainedModel, source: DraftSource, context: int, block_lengths: Sequence[int], repeats: int
) -> list[float]:
    request = DraftRequest(
        device=target.device,
        vocab_size=int(target.get_output_embeddings().weight.shape[0]),
        do_sample=False,
        processors=LogitsProcessorList(),
        randomness=TorchRandomness(target.device),
        scores_dtype=torch.float32,
        is_paired=True,
    )
    session: Any = source.start(request)
    # a text that repeats itself, so that retrieval sources find something; it grows by a token with every proposal
    committed = (_some_tokens(target, context // 2)[0].tolist() * 3)[:context]

    layers = hidden_layers_of(source)
    size = int(getattr(target.config.get_text_config(decoder=True), "hidden_size", 1))
    num_seen = 0

    def propose(block_length: int) -> None:
        nonlocal num_seen
        if layers:  # any numbers do: what they are makes no difference to the time
            new = torch.zeros((len(committed) - 1 - num_seen, size), dtype=target.dtype, device=target.device)
            session.see([new] * len(layers))
            num_seen += len(new)
        session.propose(committed, block_length)
        committed.append(committed[-(context // 2)] if context >= 2 else committed[-1])

    return _medians(target, propose, block_lengths, repeats)


def _medians(target: PreTrainedModel, step: Callable[[int], None], sizes: Sequence[int], repeats: int) -> list[float]:
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:  # warm-up: allocations, first calls, the prefill of a draft's cache
        step(size)
    for _ in range(repeats):
        for size in sizes:
            samples[size].append(_seconds(target, lambda size=size: step(size)))  # type: ignore[misc]
    return [statistics.median(samples[size]) for size in sizes]


def _seconds(target: PreTrainedModel, step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - started


def _some_tokens(target: PreTrainedModel, count: int) -> torch.Tensor:
    """[1, count], the same every time, without touching the global generator."""
    generator = torch.Generator().manual_seed(0)
    size = int(target.get_input_embeddings().weight.shape[0])
    return torch.randint(0, size, (1, max(1, count)), generator=generator).to(target.device)
