"""What the page of one request shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from autospec.telemetry import codec
from autospec.telemetry.explain import find_request
from autospec.telemetry.schema import ComparisonRow, RecordingRow, RequestRow
from autospec.telemetry.store import Store
from autospec.types import BlockOutcome, RequestRecord

CELLS = ("accepted", "rejected", "not judged", "recovered", "bonus")
"""What a token of a block can be; each name has a definition."""

MOST_BLOCKS = 400
MOST_TOKENS = 2_000
"""Tokens of a prompt or an answer that are shown."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the strip."""

    number: int  # from 1
    outcome: BlockOutcome
    cells: tuple[str, ...]  # of CELLS, in the order of the tokens
    tokens: tuple[int, ...] | None  # that it committed; None where they were not recorded


@dataclass(frozen=True, slots=True)
class Request:
    record: RequestRecord
    blocks: tuple[Block, ...]  # the first MOST_BLOCKS
    num_blocks: int  # that were kept
    trouble: str | None  # why kept blocks cannot be read
    control: RequestRecord | None  # the same prompt decoded plainly
    prompt: tuple[int, ...] | None  # token ids, where they were recorded
    output: tuple[int, ...] | None


def load_request(store: Store, name: str) -> Request:
    """A request with its blocks, and its tokens where recording was on.

    Args:
        store: the database.
        name: the request's id, the beginning of it, or `last`.

    Raises:
        ConfigurationError: there is no such request, or there are several.
        StoreError: the database cannot be read.
    """
    record, outcomes, trouble = find_request(store, name)
    pair = select(RequestRow).join(ComparisonRow, ComparisonRow.control_request_id == RequestRow.request_id)
    pair = pair.where(ComparisonRow.request_id == record.request_id).order_by(ComparisonRow.id).limit(1)
    with store.reading() as connection, Session(connection) as session:
        row = session.scalars(pair).first()
        control = None if row is None else codec.row_to_request(row, record.deployment)
        kept = session.get(RecordingRow, record.request_id)
        tokens = None if kept is None else (codec.unpack_tokens(kept.prompt), codec.unpack_tokens(kept.output))
    output = None if tokens is None else tokens[1]
    return Request(
        record=record,
        blocks=tuple(
            Block(number, outcome, cells(outcome), committed(record, outcome, output))
            for number, outcome in enumerate(outcomes[:MOST_BLOCKS], 1)
        ),
        num_blocks=len(outcomes),
        trouble=trouble,
        control=control,
        prompt=None if tokens is None else tokens[0],
        output=output,
    )


def is_empty(store: Store) -> bool:
    """Whether there is no request at all."""
    with store.reading() as connection:
        return connection.scalar(select(RequestRow.id).limit(1)) is None


def cells(outcome: BlockOutcome) -> tuple[str, ...]:
    """What became of each token of the block: its drafts in order, then the token that the target added."""
    is_rejected = outcome.num_judged_tokens > outcome.num_accepted_tokens
    found: Sequence[str] = ["accepted"] * outcome.num_accepted_tokens + ["rejected"] * is_rejected
    found = [*found, *["not judged"] * max(0, outcome.num_draft_tokens - len(found))]
    if outcome.num_committed_tokens > outcome.num_accepted_tokens:
        found = [*found, "recovered" if is_rejected else "bonus"]
    return tuple(found)


def committed(record: RequestRecord, outcome: BlockOutcome, output: Sequence[int] | None) -> tuple[int, ...] | None:
    """The tokens that the block added to the answer; None where they are not known."""
    start = outcome.context_tokens - record.prompt_tokens
    end = start + outcome.num_committed_tokens
    return None if output is None or start < 0 or end > len(output) else tuple(output[start:end])
