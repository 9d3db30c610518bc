"""The tables. Counts and seconds only: a ratio is a query, never a column."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
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


class UtcMicroseconds(TypeDecorator[datetime]):
    """An aware datetime stored as whole microseconds since 1970 in UTC, whatever the zone of the machine."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: give an aware datetime, as in datetime.now(UTC)")
        return (value - EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=value)


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
