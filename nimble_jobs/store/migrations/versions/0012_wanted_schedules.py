"""Adds schedules for idle workers to build, because jobs ran without them, and the times that builds took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "wanted_schedules",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("misses", sa.BigInteger(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("saves_s", sa.Double(), nullable=False),
        sa.Column("costs_s", sa.Double(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("builder", sa.Text(), nullable=True),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_wanted_schedules")),
    )
    op.add_column("schedules", sa.Column("quick_us", sa.Double(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
