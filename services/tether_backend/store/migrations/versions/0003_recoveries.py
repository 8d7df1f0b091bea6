"""Executions whose rows are to be repaired, and an index of those that have not ended.

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

_OPEN = sa.text("phase <> 'ended'")


def upgrade() -> None:
    op.create_table(
        "recoveries",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("execution", sa.String(length=64), nullable=False),
        sa.Column("conversation", sa.String(length=64), nullable=False),
        sa.Column("workspace", sa.String(length=64), nullable=False),
        sa.Column("mark", sa.BigInteger(), nullable=False),
        sa.Column("why", sa.String(length=16), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "execution"),
    )
    op.create_index(
        "executions_open", "executions", ["tenant", "execution"], sqlite_where=_OPEN, postgresql_where=_OPEN
    )


def downgrade() -> None:
    op.drop_index("executions_open", table_name="executions")
    op.drop_table("recoveries")
