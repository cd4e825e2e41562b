"""Adds timers, their ticks, and an index of the unfinished jobs of a name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "timers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("next_due", sa.BigInteger(), nullable=True),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("moved_at", sa.Double(), nullable=False),
        sa.Column("gap_from", sa.Double(), nullable=True),
        sa.Column("gap_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("edited_at", sa.Double(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("allow_python", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_timers"),
    )
    op.create_index("ix_timers_due", "timers", ["state", "next_at"])
    op.create_table(
        "ticks",
        sa.Column("timer", sa.Text(), nullable=False),
        sa.Column("due", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=True),
        sa.Column("count", sa.Integer(), server_default="1", nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("outcome", sa.String(length=12), nullable=False),
        sa.Column("job", sa.String(length=12), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["timer"], ["timers.name"], name="fk_ticks_timer", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("timer", "due", name="pk_ticks"),
    )
    op.create_index("ix_ticks_job", "ticks", ["job"])
    op.create_index("ix_ticks_outcome", "ticks", ["outcome", "timer", "due"])
    op.create_index("ix_jobs_open", "jobs", ["name", "state"])


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
