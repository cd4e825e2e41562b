"""Adds jobs that several devices work on: how many, their shards, and the devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("gpus", sa.Integer(), nullable=False, server_default="1"))
    op.create_table(
        "shards",
        sa.Column("job", sa.String(length=12), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("stop", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("second", sa.Text(), nullable=True),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_shards_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "index", name=op.f("pk_shards")),
    )
    op.create_index("ix_shards_state", "shards", ["job", "state", "index"])
    op.create_table(
        "members",
        sa.Column("job", sa.String(length=12), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("device", sa.String(length=20), nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("left_at", sa.Double(), nullable=True),
        sa.Column("moved_at", sa.Double(), nullable=False),
        sa.Column("phase", sa.String(length=40), nullable=True),
        sa.Column("records_done", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_members_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", "worker", name=op.f("pk_members")),
    )


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
