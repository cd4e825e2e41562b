"""Adds to each attempt its bad records by what was wrong with them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("bad_kinds", sa.Text(), nullable=False, server_default="[]"))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
