"""From a folder of traffic to a folder of scores: each request once, also after an interruption."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autospec.costs.fingerprint import describe
from autospec.drafts.base import DraftSource
from autospec.errors import ConfigurationError
from autospec.scores.folder import ScoreFolder
from autospec.scores.scorer import Scorer
from autospec.traffic import TrafficReader, TrafficRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KNOWN_WORDS = {"greedy", "sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"}
_KNOWN_WORDS |= {"eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"}


def why_not(request: TrafficRequest, *, with_imported: bool = False) -> str | None:
    """Why blocks cannot be walked along a request's answer; None when they can.

    Args:
        with_imported: take answers that were imported for the target's own.
    """
    if request.is_pending:
        return "no answer yet (autospec traffic complete)"
    if len(request.output) < 2:
        return "an answer of one token"
    if request.origin.startswith("import:") and not with_imported:
        return "an imported answer, perhaps another model's (--imported takes it for the target's own)"
    if request.fallback_reason is not None and not request.is_control:
        return "left to the original generate"
    words = [word.partition("=")[0] for word in request.decoding.split()]
    if unknown := [word for word in words if word not in _KNOWN_WORDS]:
        return f"decoded with {unknown[0]}, which traffic does not keep"
    return None


def made_with(
    target: PreTrainedModel, sources: Mapping[str, DraftSource], sampling: str, manifest: Any
) -> dict[str, Any]:
    """What scores depend on, as plain JSON values; the device is none of it."""
    found = describe(target, sources)
    return {
        "target": found["target"],
        "sources": found["sources"],
        "sampling": sampling,
        "tokenizer": manifest.fingerprint,
    }


def score_traffic(
    reader: TrafficReader,
    scorer: Scorer,
    folder: ScoreFolder,
    *,
    with_imported: bool = False,
) -> Iterator[tuple[TrafficRequest, str | None]]:
    """Score what is not scored yet, in the order of arrival.

    Yields:
        each request, and why it was left out if it was.
    """
    done = folder.done()
    for request in reader:
        why = why_not(request, with_imported=with_imported)
        if why is None and request.request_id in done:
            scorer.learn(request)
        elif why is None:
            try:
                scored = scorer.score(request)
            except ConfigurationError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001  # of this request alone: its options may hold anything
                why = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            else:
                folder.add(scored)
        yield request, why


def host_seconds(requests: Sequence[TrafficRequest]) -> float | None:
    """Of a block beside drafting and verifying, by the phases that traffic keeps; None where it keeps none."""
    found = []
    for request in requests:
        blocks = sum(request.acceptance_lengths.values())
        if request.seconds is not None and blocks:
            seconds = request.seconds
            found.append((seconds.correction + seconds.emission + seconds.other) / blocks)
    return statistics.median(found) if found else None
