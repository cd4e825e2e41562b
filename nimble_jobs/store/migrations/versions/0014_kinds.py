"""Adds an index for listing the jobs of one kind, newest first."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_kind", "jobs", ["kind", "seq"])


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
