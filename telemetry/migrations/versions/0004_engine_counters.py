"""What engines without autospec have counted, by the hour.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def upgrade() -> None:
    op.create_table(
        "engine_counters",
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("began_at", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("scraped_at", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        count("requests"),
        count("prompt_tokens"),
        count("output_tokens"),
        count("request_tokens"),
        sa.Column("request_seconds", sa.Double(), nullable=True),
        count("steps"),
        count("num_drafts"),
        count("num_draft_tokens"),
        count("num_accepted_tokens"),
        sa.Column("accepted", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "target", "began_at", "hour", name=op.f("pk_engine_counters")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_engine_counters_scraped_at"), "engine_counters", ["scraped_at"])


def downgrade() -> None:
    op.drop_table("engine_counters")
