"""What policies have learned, resumed after a restart.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "policy_states",
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("deployment_id", ROW_ID, nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("inherited", sa.JSON(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("family", "version", "process", name=op.f("pk_policy_states")),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name=op.f("fk_policy_states_deployment_id_deployments")
        ),
    )
    op.create_index(
        op.f("ix_policy_states_family_version_updated_at"), "policy_states", ["family", "version", "updated_at"]
    )
    op.create_index(op.f("ix_policy_states_updated_at"), "policy_states", ["updated_at"])


def downgrade() -> None:
    op.drop_table("policy_states")
