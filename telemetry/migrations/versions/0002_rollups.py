"""Hourly sums, block traces, policy versions, calibration samples; what a request's actions did.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTS = (
    "requests",
    "failed",
    "fallbacks",
    "prompt_tokens",
    "output_tokens",
    "blocks",
    "block_tokens",
    "num_draft_tokens",
    "num_judged_tokens",
    "num_accepted_tokens",
)
PHASES = ("prefill", "draft", "verify", "correction", "emission", "other", "total")
BLOCK_PHASES = ("draft", "verify", "correction", "emission")
BLOCK_KEY = ("segment", "source", "block_length")
NEW_IN_REQUESTS = ("by_action", "decisions", "policy_version", "predicted_control_seconds", "peak_memory_bytes")


def count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def seconds(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=False)


def block_key() -> list[sa.Column[object]]:
    return [
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("block_length", sa.Integer(), nullable=False),
    ]


def upgrade() -> None:
    op.add_column("deployments", sa.Column("model_bytes", sa.BigInteger(), nullable=True))
    op.add_column("requests", sa.Column("by_action", sa.JSON(), nullable=True))
    op.add_column("requests", sa.Column("decisions", sa.JSON(), nullable=True))
    op.add_column("requests", sa.Column("policy_version", sa.Text(), nullable=True))
    op.add_column("requests", sa.Column("predicted_control_seconds", sa.Double(), nullable=True))
    op.add_column("requests", sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "block_traces",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("blocks", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_block_traces")),
    )
    op.create_table(
        "recordings",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("output", sa.LargeBinary(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_recordings")),
    )
    op.create_table(
        "horizon",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("pruned_before", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_horizon")),
    )
    op.create_table(
        "policy_versions",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("made_by", sa.Text(), nullable=False),
        sa.Column("made_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_policy_versions")),
    )
    op.create_table(
        "calibration_samples",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("deployment_id", ROW_ID, nullable=False),
        sa.Column("measured_at", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("context_tokens", sa.Integer(), nullable=False),
        seconds("seconds"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calibration_samples")),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name=op.f("fk_calibration_samples_deployment_id_deployments")
        ),
        sa.UniqueConstraint(
            "deployment_id",
            "measured_at",
            "source",
            "tokens",
            "context_tokens",
            name=op.f("uq_calibration_samples_deployment_id_measured_at_source_tokens_context_tokens"),
        ),
    )
    key = ("segment", "policy", "deployment_id", "is_control", "do_sample", "hour")
    op.create_table(
        "hourly_requests",
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("deployment_id", sa.BigInteger(), nullable=False),
        sa.Column("is_control", sa.Boolean(), nullable=False),
        sa.Column("do_sample", sa.Boolean(), nullable=False),
        count("hour"),
        *map(count, COUNTS),
        *(seconds(f"{phase}_seconds") for phase in PHASES),
        seconds("squared_seconds"),
        seconds("squared_tokens"),
        seconds("seconds_times_tokens"),
        count("predicted"),
        seconds("predicted_control_seconds"),
        seconds("predicted_seconds"),
        count("predicted_slower"),
        seconds("saved_seconds"),
        seconds("lost_seconds"),
        count("most_memory_bytes"),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_hourly_requests")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_hourly_requests_hour"), "hourly_requests", ["hour"])
    op.create_table(
        "hourly_actions",
        *block_key(),
        count("hour"),
        *map(count, ("blocks", "num_draft_tokens", "num_judged_tokens", "num_accepted_tokens", "num_committed_tokens")),
        *(seconds(f"{phase}_seconds") for phase in BLOCK_PHASES),
        sa.PrimaryKeyConstraint(*BLOCK_KEY, "hour", name=op.f("pk_hourly_actions")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "hourly_positions",
        *block_key(),
        sa.Column("position", sa.Integer(), nullable=False),
        count("hour"),
        count("at_risk"),
        count("accepted"),
        sa.PrimaryKeyConstraint(*BLOCK_KEY, "position", "hour", name=op.f("pk_hourly_positions")),
        sqlite_with_rowid=False,
    )
    _fill_hourly_requests()


def _fill_hourly_requests() -> None:
    """Sums of the requests that are there. What their actions did is not known by block length and position."""
    microseconds = 3_600_000_000
    block_tokens = (
        "SELECT SUM(CAST(key AS INTEGER) * CAST(value AS INTEGER)) FROM "
        + ("json_each_text" if op.get_bind().dialect.name == "postgresql" else "json_each")
        + "(acceptance_lengths)"
    )
    sums = {name: f"SUM({name})" for name in COUNTS if name not in ("requests", "failed", "fallbacks", "block_tokens")}
    sums |= {f"{phase}_seconds": f"SUM({phase}_seconds)" for phase in PHASES}
    values = {
        "hour": f"started_at - started_at % {microseconds}",
        "segment": "segment",
        "policy": "policy",
        "deployment_id": "COALESCE(deployment_id, 0)",
        "is_control": "is_control",
        "do_sample": "do_sample",
        "requests": "COUNT(*)",
        "failed": "COUNT(error)",
        "fallbacks": "COUNT(fallback_reason)",
        "block_tokens": f"COALESCE(SUM(({block_tokens})), 0)",
        **sums,
        "squared_seconds": "SUM(total_seconds * total_seconds)",
        "squared_tokens": "SUM(1.0 * output_tokens * output_tokens)",
        "seconds_times_tokens": "SUM(total_seconds * output_tokens)",
        **dict.fromkeys(
            (
                "predicted",
                "predicted_control_seconds",
                "predicted_seconds",
                "predicted_slower",
                "saved_seconds",
                "lost_seconds",
                "most_memory_bytes",
            ),
            "0",
        ),
    }
    op.execute(
        f"INSERT INTO hourly_requests ({', '.join(values)}) SELECT {', '.join(values.values())} FROM requests "
        "GROUP BY 1, 2, 3, 4, 5, 6"
    )


def downgrade() -> None:
    for table in (
        "hourly_positions",
        "hourly_actions",
        "hourly_requests",
        "calibration_samples",
        "policy_versions",
        "horizon",
        "recordings",
        "block_traces",
    ):
        op.drop_table(table)
    for column in NEW_IN_REQUESTS:
        op.drop_column("requests", column)
    op.drop_column("deployments", "model_bytes")
