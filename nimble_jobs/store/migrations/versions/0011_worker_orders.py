"""Adds the orders for workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "worker_orders",
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("wanted", sa.String(length=8), nullable=True),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_worker_orders")),
    )


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
