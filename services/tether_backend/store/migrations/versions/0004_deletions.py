"""Tombstones of deleted conversations, and the rows of a conversation found by its name in every table.

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


def upgrade() -> None:
    op.create_table(
        "deletions",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("conversation", sa.String(length=64), nullable=False),
        sa.Column("deletion", sa.String(length=64), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "conversation"),
    )


def downgrade() -> None:
    op.drop_table("deletions")
