"""Adds to each attempt the secret with which it seals its manifest. Attempts of earlier versions have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("seal", sa.String(32), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
