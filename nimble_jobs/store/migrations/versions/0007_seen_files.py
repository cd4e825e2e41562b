"""Adds the files that were scored, for jobs that score only new files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "seen_sources",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_seen_sources"),
        sa.UniqueConstraint("name", "root", name="uq_seen_sources_name_root"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "seen_runs",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("source", _SERIAL, nullable=False),
        sa.Column("job", sa.String(length=12), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        sa.Column("listed_at", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["source"], ["seen_sources.id"], name="fk_seen_runs_source", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_seen_runs"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_seen_runs_source", "seen_runs", ["source"])
    op.create_table(
        "seen_files",
        sa.Column("source", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("mtime_ns", sa.BigInteger(), nullable=False),
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("source", "path", name="pk_seen_files"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
