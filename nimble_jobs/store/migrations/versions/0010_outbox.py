"""Adds the notifications to send."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("event", sa.String(length=20), nullable=False),
        sa.Column("job", sa.String(length=12), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("channel", sa.String(length=12), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("sender", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name="pk_outbox"),
        sa.UniqueConstraint("id", name="uq_outbox_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_outbox_due", "outbox", ["state", "next_at"])
    op.create_index("ix_outbox_job", "outbox", ["job", "seq"])


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
