"""Marks schedules that are not used because eager is faster."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("schedules", sa.Column("runs", sa.String(length=12), nullable=False, server_default="schedule"))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
