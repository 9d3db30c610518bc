"""What each draft source costs and brings on a user's own prompts, by segment and block length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autospec.decoding.tally import Tally
from autospec.drafts.base import DraftSource
from autospec.memory import held_bytes
from autospec.replay import Recording, Replay
from autospec.types import BlockOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.policies.base import CostEstimates

BLOCK_LENGTHS = (1, 2, 4, 8, 16)
ALL = "all"
"""What the row of all segments together is called."""


@dataclass(slots=True)
class Row:
    """A source in a segment at a block length: its blocks, but for those at the end of answers that have no room."""

    source: str
    segment: str
    block_length: int
    blocks: list[BlockOutcome] = field(default_factory=list)
    memory_bytes: int = 0  # the largest at the end of a request: the session, and the source with its model
    failures: list[str] = field(default_factory=list)

    def tally(self) -> Tally:
        """Counts of all blocks, +1 included in acceptance lengths."""
        tally = Tally()
        for block in self.blocks:
            tally.add(block)
        return tally

    @property
    def mean_draft_tokens(self) -> float:
        """Proposed tokens per block."""
        return statistics.fmean(block.num_draft_tokens for block in self.blocks) if self.blocks else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted draft tokens per block."""
        return statistics.fmean(block.num_accepted_tokens for block in self.blocks) if self.blocks else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per block, +1 included."""
        return statistics.fmean(block.num_committed_tokens for block in self.blocks) if self.blocks else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the drafts judged at each position, the share that was accepted."""
        tally = self.tally()
        return [accepted / judged for accepted, judged in zip(tally.accepted, tally.at_risk, strict=True)]

    @property
    def draft_ms(self) -> float:
        """Median milliseconds of drafting in a block, blocks without a proposal included."""
        return 1000 * statistics.median(block.draft_seconds for block in self.blocks) if self.blocks else 0.0

    def expected_speed_up(self, costs: CostEstimates) -> float:
        """Seconds of plain steps over those of these blocks for the same tokens: drafts, catching up, verifying."""
        plain = sum(b.num_committed_tokens * costs.verify_seconds(1, b.context_tokens) for b in self.blocks)
        seconds = sum(
            b.draft_seconds + b.catch_up_seconds + costs.verify_seconds(b.num_draft_tokens + 1, b.context_tokens)
            for b in self.blocks
        )
        return plain / seconds if seconds else 1.0


def bench(
    model: PreTrainedModel,
    tokenizer: Any,
    recordings: Sequence[Recording],
    sources: Sequence[Callable[[], DraftSource]],
    *,
    block_lengths: Sequence[int] = BLOCK_LENGTHS,
) -> Iterator[list[Row]]:
    """Replay recorded answers under each source and block length.

    A source is made anew for each block length, so that what it learns from answers starts from nothing; within it the
    answers come one after another. Sources are timed where they run here and now.

    Args:
        model, tokenizer: the target that made the answers.
        recordings: the answers.
        sources: makers of draft sources, each called once for each block length.
        block_lengths: draft tokens asked for in each block.

    Yields:
        For each source and block length a row of each segment, and last one of all together.

    Raises:
        DraftError: a source cannot work with this target.
    """
    shared = list(model.parameters())
    for make in sources:
        for block_length in block_lengths:
            source = make()
            source.attach(model, tokenizer)
            rows: dict[str, Row] = {}
            whole = Row(source.name, ALL, block_length)
            for recording in recordings:
                replay = Replay(source, recording)
                blocks = [b for b in replay.run(block_length) if b.action.block_length > 0]
                memory_bytes = held_bytes([source, replay.session], shared=[*shared, recording])
                if callable(learn := getattr(source, "learn", None)):
                    learn(recording.request, recording.answer)
                for row in (
                    rows.setdefault(recording.segment, Row(source.name, recording.segment, block_length)),
                    whole,
                ):
                    row.blocks += blocks
                    row.memory_bytes = max(row.memory_bytes, memory_bytes)
                    row.failures += [replay.failure] if replay.failure else []
            yield [*rows.values(), whole]
