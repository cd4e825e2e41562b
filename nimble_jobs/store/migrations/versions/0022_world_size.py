"""Adds to each job how many devices of one machine it needs at once. Jobs of earlier versions are claimed as before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("world_size", sa.Integer(), nullable=False, server_default="1"))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
