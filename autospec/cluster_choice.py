"""How many clusters: as many as separate acceptance best, on prompts that they were not made from.

Inertia only says how near prompts lie to their centres, and falls with every further one. What a segment is for is to
tell apart prompts whose drafts are accepted more from those whose drafts are accepted less.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autospec.drafts.base import DraftSource
from autospec.replay import Recording, Replay
from autospec.segments.clusters import fit_clusters, points_of
from autospec.segments.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNTS = (2, 3, 4, 6, 8, 12, 16)
FOLDS = 5
REPEATS = 4
_PRIOR_BLOCKS = 30.0  # a cluster's mean starts at that of all prompts, as if so many blocks had said so


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What one action did along one answer."""

    blocks: int
    accepted: int  # draft tokens; +1 not included


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    """A prompt, and what every action did along its answer."""

    prompt: Prompt
    segment: str
    counts: Mapping[str, BlockCounts]  # by Action.label, the same actions for each prompt


@dataclass(frozen=True, slots=True)
class Candidate:
    """A number of clusters, and how much it brings."""

    clusters: int
    separation: float  # share of the squared error of accepted tokens per block that is gone, on held-out prompts


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    recordings: Sequence[Recording],
    sources: Sequence[Callable[[], DraftSource]],
    *,
    block_lengths: Sequence[int],
) -> Iterator[MeasuredPrompt]:
    """Replay each source along each answer.

    Args:
        model, tokenizer: the target that made the answers.
        recordings: the answers.
        sources: makers of draft sources; what one learns from answers is not used.
        block_lengths: draft tokens asked for in each block.

    Yields:
        one for each recording, in their order.

    Raises:
        DraftError: a source cannot work with this target.
    """
    made = [make() for make in sources]
    for source in made:
        source.attach(model, tokenizer)
    for recording in recordings:
        counts = {
            f"{source.name}:{length}": _counts(Replay(source, recording), length)
            for source in made
            for length in block_lengths
        }
        yield MeasuredPrompt(Prompt.of_ids(recording.prompt, tokenizer), recording.segment, counts)


def candidates(
    measured: Sequence[MeasuredPrompt], counts: Sequence[int] = COUNTS, *, seed: int = 0
) -> Iterator[Candidate]:
    """Cross-validate numbers of clusters.

    In each of several rounds prompts are dealt into folds. Clusters are made from the text of all but one fold, their
    mean acceptance is taken there, shrunk towards that of all prompts, and compared with what the prompts of the fold
    left out did.

    Args:
        measured: at least as many as there are folds.
        counts: numbers to try; those that the folds have not enough prompts for are left out.
        seed: of folds and centres.
    """
    folds = min(FOLDS, len(measured))
    points = points_of([each.prompt for each in measured])
    for count in counts:
        if count > len(measured) - -(-len(measured) // folds):
            continue
        error = base = 0.0
        for repeat in range(REPEATS):
            order = list(range(len(measured)))
            random.Random(seed + repeat).shuffle(order)
            for fold in range(folds):
                held_out = order[fold::folds]
                rest = [index for place, index in enumerate(order) if place % folds != fold]
                places = fit_clusters(points.take(rest), count, seed=seed + repeat).places(points).tolist()
                found = squared_errors(measured, places, rest, held_out)
                error, base = error + found[0], base + found[1]
        yield Candidate(count, 1 - error / base if base else 0.0)


def best(found: Sequence[Candidate]) -> Candidate | None:
    """The one that separates most; None when none is better than one segment for all."""
    choice = max(found, key=lambda candidate: (candidate.separation, -candidate.clusters), default=None)
    return choice if choice is not None and choice.separation > 0 else None


def squared_errors(
    measured: Sequence[MeasuredPrompt], places: Sequence[int], known: Sequence[int], unseen: Sequence[int]
) -> tuple[float, float]:
    """Of accepted tokens per block of unseen prompts, by blocks: predicted by their clusters, and by all known prompts.

    Args:
        measured: all prompts.
        places: the cluster of each.
        known, unseen: their numbers, of those that predict and of those that are predicted.
    """
    error = base = 0.0
    for action in measured[0].counts:
        blocks, accepted = [0.0] * (max(places) + 1), [0.0] * (max(places) + 1)
        for index in known:
            blocks[places[index]] += measured[index].counts[action].blocks
            accepted[places[index]] += measured[index].counts[action].accepted
        overall = sum(accepted) / max(1.0, sum(blocks))
        for index in unseen:
            own, place = measured[index].counts[action], places[index]
            if not own.blocks:
                continue
            predicted = (accepted[place] + _PRIOR_BLOCKS * overall) / (blocks[place] + _PRIOR_BLOCKS)
            seen = own.accepted / own.blocks
            error += own.blocks * (seen - predicted) ** 2
            base += own.blocks * (seen - overall) ** 2
    return error, base


def _counts(replay: Replay, block_length: int) -> BlockCounts:
    blocks = [block for block in replay.run(block_length) if block.action.block_length > 0]
    return BlockCounts(len(blocks), sum(block.num_accepted_tokens for block in blocks))
