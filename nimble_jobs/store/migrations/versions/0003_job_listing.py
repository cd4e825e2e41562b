"""Adds an index for listing the jobs in one state, newest first."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_state", "jobs", ["state", "seq"])


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
