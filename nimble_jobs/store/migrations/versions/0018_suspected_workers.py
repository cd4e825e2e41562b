"""Adds to each worker with a lease since when others saw that it was not renewed. PostgreSQL alone has that table."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE IF EXISTS workers ADD COLUMN IF NOT EXISTS suspected_at DOUBLE PRECISION")


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
