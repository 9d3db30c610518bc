"""Engines that are known by their own counters, as tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from autospec.telemetry.engines import EngineSums
from autospec.telemetry.labels import visible
from autospec.telemetry.tables import ABSENT, ACTION_COLUMNS, POSITIONS, Column, Table, number, share

TITLE = "Engines by their own counters, apart from requests"
POSITIONS_TITLE = "Share of an engine's drafts that were accepted up to a position, and when it was counted"

COUNTED: tuple[Column[EngineSums], ...] = (
    Column("drafter", "what drafts in the engine, as `autospec ingest vllm --source` was told.",
           lambda row: visible(row.source, ACTION_COLUMNS)),
    Column("ended", "requests of the engine that ended, however.", lambda row: _count(row.requests)),
    Column("generated", "tokens that the engine generated, for requests that have not ended, too.",
           lambda row: _count(row.output_tokens)),
    Column("tokens/s running", "output tokens of requests that ended / seconds that they ran for, prefill included and "
           "waiting not.", lambda row: number(row.tokens_per_second)),
    Column("tokens per\u00a0step", "tokens generated / steps of the engine, of all requests together.",
           lambda row: number(row.tokens_per_step)),
    Column("drafts", "steps of a request that had draft tokens; - where the engine does not speculate.",
           lambda row: _count(row.num_drafts)),
    Column("engine drafted", "draft tokens proposed in them.", lambda row: _count(row.num_draft_tokens)),
    Column("engine accepted", "draft tokens kept, bonus not counted.", lambda row: _count(row.num_accepted_tokens)),
    Column("acceptance length of\u00a0drafts", "tokens committed by a step with draft tokens, recovered or bonus token "
           "included (+1 included).", lambda row: number(row.mean_acceptance_length)),
)  # fmt: skip

SPAN: tuple[Column[EngineSums], ...] = (
    Column("counted from", "the scrape before, or when the engine began to count, or was first seen; UTC.",
           lambda row: _time(row.first)),
    Column("counted until", "the last scrape; UTC.", lambda row: _time(row.last)),
)  # fmt: skip


def engine_tables(engines: Sequence[EngineSums]) -> list[Table[EngineSums]]:
    """None where there are no engines."""
    if not engines:
        return []
    rows, names = tuple(engines), ("engine", "target")
    num_positions = min(POSITIONS, max(len(row.accepted) for row in rows))
    positions = tuple(Column(str(number + 1), "", _accepted(number)) for number in range(num_positions))
    return [Table(TITLE, names, COUNTED, rows), Table(POSITIONS_TITLE, names, (*SPAN, *positions), rows)]


def _accepted(position: int) -> Callable[[EngineSums], str]:
    def cell(row: EngineSums) -> str:
        shares = row.share_accepted
        return share(shares[position]) if position < len(shares) else ABSENT

    return cell


def _count(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _time(value: datetime) -> str:
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M}"
