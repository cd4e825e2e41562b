"""Adds to each member of a job how long it worked on what it finished. Removes a digest that nobody read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("members", sa.Column("busy_s", sa.Double(), nullable=False, server_default="0"))
    with op.batch_alter_table("shards") as shards:  # SQLite before 3.35 cannot drop a column in place
        shards.drop_column("sha256")


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
