"""Adds the publications of jobs, so that a manifest in a folder need not be trusted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "publications",
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("job", sa.String(length=12), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("folder", sa.String(length=41), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("token", name="pk_publications"),
    )


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
