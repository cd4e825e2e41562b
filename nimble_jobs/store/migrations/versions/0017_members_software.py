"""Adds to each member of a job the software and the device that decide over its numbers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("members", sa.Column("software", sa.Text(), nullable=False, server_default="{}"))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
