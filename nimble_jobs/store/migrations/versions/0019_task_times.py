"""Adds what builds measured of single tasks, so that the next model needs no measurement of equal ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "task_times",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("last_used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_task_times")),
    )


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
