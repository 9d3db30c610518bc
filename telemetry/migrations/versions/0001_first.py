"""The first tables: deployments, requests, comparisons.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTS = ("prompt", "output")
TOKENS = ("num_draft", "num_judged", "num_accepted")
PHASES = ("prefill", "draft", "verify", "correction", "emission", "other", "total")


def upgrade() -> None:
    op.create_table(
        "deployments",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("drafts", sa.JSON(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deployments")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_deployments_fingerprint")),
    )
    op.create_table(
        "requests",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("deployment_id", ROW_ID, nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("is_control", sa.Boolean(), nullable=False),
        sa.Column("do_sample", sa.Boolean(), nullable=False),
        sa.Column("decoding", sa.Text(), nullable=False),
        *(sa.Column(f"{name}_tokens", sa.Integer(), nullable=False) for name in COUNTS),
        sa.Column("blocks", sa.Integer(), nullable=False),
        *(sa.Column(f"{name}_tokens", sa.Integer(), nullable=False) for name in TOKENS),
        *(sa.Column(f"{phase}_seconds", sa.Double(), nullable=False) for phase in PHASES),
        sa.Column("acceptance_lengths", sa.JSON(), nullable=False),
        sa.Column("at_risk", sa.JSON(), nullable=False),
        sa.Column("accepted", sa.JSON(), nullable=False),
        sa.Column("actions", sa.JSON(), nullable=False),
        sa.Column("fallback_reason", sa.Text(), nullable=True),
        sa.Column("notes", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("run", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
        sa.UniqueConstraint("request_id", name=op.f("uq_requests_request_id")),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name=op.f("fk_requests_deployment_id_deployments")
        ),
    )
    op.create_index(op.f("ix_requests_segment_started_at"), "requests", ["segment", "started_at"])
    op.create_index(op.f("ix_requests_run"), "requests", ["run"])
    op.create_table(
        "comparisons",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("control_request_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("is_identical", sa.Boolean(), nullable=True),
        sa.Column("first_difference", sa.Integer(), nullable=True),
        sa.Column("logit_gap", sa.Double(), nullable=True),
        sa.Column("is_tie", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_comparisons")),
        sa.UniqueConstraint(
            "control_request_id", "request_id", name=op.f("uq_comparisons_control_request_id_request_id")
        ),
    )
    op.create_index(op.f("ix_comparisons_request_id"), "comparisons", ["request_id"])


def downgrade() -> None:
    op.drop_table("comparisons")
    op.drop_table("requests")
    op.drop_table("deployments")
