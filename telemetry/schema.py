"""The tables. Counts and seconds only: a ratio is a query, never a column."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

VERSION_TABLE = "autospec_version"
"""Where Alembic keeps the revision; its presence also marks a database as ours."""

APPLICATION_ID = 0x41535043
"""SQLite's `application_id` of our files: the letters ASPC."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

RowId = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows itself only in an INTEGER key


def to_microseconds(value: datetime) -> int:
    """Whole microseconds since 1970 in UTC, of an aware datetime."""
    return (value - EPOCH) // timedelta(microseconds=1)


def from_microseconds(value: int) -> datetime:
    return EPOCH + timedelta(microseconds=value)


class UtcMicroseconds(TypeDecorator[datetime]):
    """An aware datetime stored as whole microseconds since 1970 in UTC, whatever the zone of the machine."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: give an aware datetime, as in datetime.now(UTC)")
        return to_microseconds(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else from_microseconds(value)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        float: Double(),
        bytes: LargeBinary(),
        datetime: UtcMicroseconds(),
        dict[str, Any]: JSON(),
        list[Any]: JSON(),
    }


class DeploymentRow(Base):
    """Where requests ran."""

    __tablename__ = "deployments"
    __table_args__ = (UniqueConstraint("fingerprint"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    fingerprint: Mapped[str]  # sha256 of the content, hexadecimal
    host: Mapped[str]
    device: Mapped[str]
    target: Mapped[str]
    dtype: Mapped[str]
    drafts: Mapped[list[Any]]
    versions: Mapped[dict[str, Any]]
    model_bytes: Mapped[int | None] = mapped_column(BigInteger())


class RequestRow(Base):
    """One `generate` call."""

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("request_id"),
        Index(None, "segment", "started_at"),
        Index(None, "run"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    request_id: Mapped[str]
    deployment_id: Mapped[int | None] = mapped_column(RowId, ForeignKey("deployments.id"))
    started_at: Mapped[datetime]
    segment: Mapped[str]
    policy: Mapped[str]
    is_control: Mapped[bool]
    do_sample: Mapped[bool]
    decoding: Mapped[str]
    prompt_tokens: Mapped[int]
    output_tokens: Mapped[int]
    blocks: Mapped[int]
    num_draft_tokens: Mapped[int]
    num_judged_tokens: Mapped[int]
    num_accepted_tokens: Mapped[int]
    prefill_seconds: Mapped[float]
    draft_seconds: Mapped[float]
    verify_seconds: Mapped[float]
    correction_seconds: Mapped[float]
    emission_seconds: Mapped[float]
    other_seconds: Mapped[float]
    total_seconds: Mapped[float]
    acceptance_lengths: Mapped[dict[str, Any]]  # acceptance length (+1 included) -> blocks
    at_risk: Mapped[list[Any]]
    accepted: Mapped[list[Any]]
    actions: Mapped[dict[str, Any]]  # Action.label -> blocks
    fallback_reason: Mapped[str | None]
    notes: Mapped[str | None]
    error: Mapped[str | None]
    run: Mapped[str | None]
    by_action: Mapped[dict[str, Any] | None] = mapped_column(JSON())  # Action.label -> fields of an ActionTally
    decisions: Mapped[dict[str, Any] | None] = mapped_column(JSON())
    policy_version: Mapped[str | None]
    predicted_control_seconds: Mapped[float | None]
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger())


class ComparisonRow(Base):
    """The same prompt under control and under a policy. No foreign keys: the two requests may arrive later."""

    __tablename__ = "comparisons"
    __table_args__ = (UniqueConstraint("control_request_id", "request_id"), Index(None, "request_id"))

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    control_request_id: Mapped[str]
    request_id: Mapped[str]
    is_identical: Mapped[bool | None]
    first_difference: Mapped[int | None]
    logit_gap: Mapped[float | None]
    is_tie: Mapped[bool | None]


class TraceRow(Base):
    """The blocks of a request one by one, compressed (telemetry/traces.py)."""

    __tablename__ = "block_traces"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    blocks: Mapped[bytes]


class RecordingRow(Base):
    """Prompt and answer of a request, where recording was switched on: token ids, 4 bytes each, compressed."""

    __tablename__ = "recordings"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    prompt: Mapped[bytes]
    output: Mapped[bytes]
    options: Mapped[dict[str, Any]]


class HorizonRow(Base):
    """Up to when requests were pruned: what started before is in the sums already, and is not taken a second time."""

    __tablename__ = "horizon"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # one row, 1
    pruned_before: Mapped[datetime]


class PolicyVersionRow(Base):
    """The settings a policy had."""

    __tablename__ = "policy_versions"

    version: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    settings: Mapped[dict[str, Any]]
    made_by: Mapped[str]
    made_at: Mapped[datetime]


class PolicyStateRow(Base):
    """What a policy had learned in one process, the newest only (telemetry/states.py)."""

    __tablename__ = "policy_states"
    __table_args__ = (Index(None, "family", "version", "updated_at"), Index(None, "updated_at"))

    family: Mapped[str] = mapped_column(primary_key=True)  # what must agree for it to be resumed
    version: Mapped[str] = mapped_column(primary_key=True)  # of the policy's settings
    process: Mapped[str] = mapped_column(primary_key=True)
    deployment_id: Mapped[int] = mapped_column(RowId, ForeignKey("deployments.id"))
    policy: Mapped[str]
    updated_at: Mapped[datetime]
    inherited: Mapped[dict[str, Any]]  # process -> microseconds since 1970, of the states that it went on from
    state: Mapped[bytes]  # JSON, compressed


class CalibrationRow(Base):
    """A measured point of the cost model."""

    __tablename__ = "calibration_samples"
    __table_args__ = (UniqueConstraint("deployment_id", "measured_at", "source", "tokens", "context_tokens"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    deployment_id: Mapped[int] = mapped_column(RowId, ForeignKey("deployments.id"))
    measured_at: Mapped[datetime]
    source: Mapped[str]
    tokens: Mapped[int]
    context_tokens: Mapped[int]
    seconds: Mapped[float]


def _key() -> Any:
    return mapped_column(primary_key=True, autoincrement=False)


IN_KEY_ORDER: dict[str, Any] = {"sqlite_with_rowid": False}
"""Rows that lie in the order of their key, the hour last: sums by segment read them as they lie."""


class HourlyRequests(Base):
    """Sums over the requests that started within an hour. Kept up with each insert, exactly once per request."""

    __tablename__ = "hourly_requests"
    __table_args__ = (Index(None, "hour"), IN_KEY_ORDER)

    segment: Mapped[str] = _key()
    policy: Mapped[str] = _key()
    deployment_id: Mapped[int] = mapped_column(BigInteger(), primary_key=True, autoincrement=False)  # 0: unknown
    is_control: Mapped[bool] = mapped_column(Boolean(), primary_key=True)
    do_sample: Mapped[bool] = mapped_column(Boolean(), primary_key=True)
    hour: Mapped[datetime] = _key()  # its beginning
    requests: Mapped[int] = mapped_column(BigInteger())
    failed: Mapped[int] = mapped_column(BigInteger())
    fallbacks: Mapped[int] = mapped_column(BigInteger())
    prompt_tokens: Mapped[int] = mapped_column(BigInteger())
    output_tokens: Mapped[int] = mapped_column(BigInteger())
    blocks: Mapped[int] = mapped_column(BigInteger())
    block_tokens: Mapped[int] = mapped_column(BigInteger())
    num_draft_tokens: Mapped[int] = mapped_column(BigInteger())
    num_judged_tokens: Mapped[int] = mapped_column(BigInteger())
    num_accepted_tokens: Mapped[int] = mapped_column(BigInteger())
    prefill_seconds: Mapped[float]
    draft_seconds: Mapped[float]
    verify_seconds: Mapped[float]
    correction_seconds: Mapped[float]
    emission_seconds: Mapped[float]
    other_seconds: Mapped[float]
    total_seconds: Mapped[float]
    squared_seconds: Mapped[float]  # sums of squares and products, for the spread of the speed-up
    squared_tokens: Mapped[float]
    seconds_times_tokens: Mapped[float]
    predicted: Mapped[int] = mapped_column(BigInteger())  # requests with a predicted control, and their sums
    predicted_control_seconds: Mapped[float]
    predicted_seconds: Mapped[float]
    predicted_slower: Mapped[int] = mapped_column(BigInteger())
    saved_seconds: Mapped[float]  # of those faster than predicted
    lost_seconds: Mapped[float]  # of those slower
    most_memory_bytes: Mapped[int] = mapped_column(BigInteger())  # 0: not measured


class HourlyActions(Base):
    """Sums over the blocks of one draft source and block length."""

    __tablename__ = "hourly_actions"
    __table_args__ = IN_KEY_ORDER

    segment: Mapped[str] = _key()
    source: Mapped[str] = _key()
    block_length: Mapped[int] = _key()
    hour: Mapped[datetime] = _key()
    blocks: Mapped[int] = mapped_column(BigInteger())
    num_draft_tokens: Mapped[int] = mapped_column(BigInteger())
    num_judged_tokens: Mapped[int] = mapped_column(BigInteger())
    num_accepted_tokens: Mapped[int] = mapped_column(BigInteger())
    num_committed_tokens: Mapped[int] = mapped_column(BigInteger())
    draft_seconds: Mapped[float]
    verify_seconds: Mapped[float]
    correction_seconds: Mapped[float]
    emission_seconds: Mapped[float]


class HourlyPositions(Base):
    """Of the blocks of one draft source and block length: how often a draft position was judged, and accepted."""

    __tablename__ = "hourly_positions"
    __table_args__ = IN_KEY_ORDER

    segment: Mapped[str] = _key()
    source: Mapped[str] = _key()
    block_length: Mapped[int] = _key()
    position: Mapped[int] = _key()  # from 1
    hour: Mapped[datetime] = _key()
    at_risk: Mapped[int] = mapped_column(BigInteger())
    accepted: Mapped[int] = mapped_column(BigInteger())


class EngineRow(Base):
    """What an engine had counted since it began, when it was last seen within an hour. Sums are differences of rows.

    The latest scrape of an hour stands for all before it, so that the same one twice, in any order and by any number of
    scrapers, leaves the same row.
    """

    __tablename__ = "engine_counters"
    __table_args__ = (Index(None, "scraped_at"), IN_KEY_ORDER)

    engine: Mapped[str] = _key()
    target: Mapped[str] = _key()
    began_at: Mapped[datetime] = _key()  # counting; where the engine does not say, when it was first seen
    hour: Mapped[datetime] = _key()
    scraped_at: Mapped[datetime]
    device: Mapped[str]
    source: Mapped[str]
    requests: Mapped[int | None] = mapped_column(BigInteger())  # None, here and below: the engine does not say
    prompt_tokens: Mapped[int | None] = mapped_column(BigInteger())
    output_tokens: Mapped[int | None] = mapped_column(BigInteger())
    request_tokens: Mapped[int | None] = mapped_column(BigInteger())
    request_seconds: Mapped[float | None]
    steps: Mapped[int | None] = mapped_column(BigInteger())
    num_drafts: Mapped[int | None] = mapped_column(BigInteger())
    num_draft_tokens: Mapped[int | None] = mapped_column(BigInteger())
    num_accepted_tokens: Mapped[int | None] = mapped_column(BigInteger())
    accepted: Mapped[list[Any]]  # [j] drafts of which at least j + 1 tokens were accepted
