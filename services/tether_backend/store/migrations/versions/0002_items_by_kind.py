"""Items are indexed by kind only where they are asked for by kind: interactions and gaps.

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

_ASKED = sa.text("kind = 'interaction'")
_TOLD = sa.text("kind = 'interaction' OR kind = 'gap'")


def upgrade() -> None:
    op.drop_index("items_kind", table_name="items")
    op.create_index(
        "items_asked", "items", ["tenant", "conversation", "status"], sqlite_where=_ASKED, postgresql_where=_ASKED
    )
    op.create_index(
        "items_told", "items", ["tenant", "execution", "kind", "position"], sqlite_where=_TOLD, postgresql_where=_TOLD
    )


def downgrade() -> None:
    op.drop_index("items_told", table_name="items")
    op.drop_index("items_asked", table_name="items")
    op.create_index("items_kind", "items", ["tenant", "conversation", "kind", "status"], unique=False)
