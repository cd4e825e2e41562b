"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("job", sa.String(length=12), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job", "events", ["job", "seq"])
    op.create_table(
        "jobs",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=20), nullable=False),
        sa.Column("foreground", sa.Boolean(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("timeout_s", sa.Double(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("records_done", sa.BigInteger(), nullable=False),
        sa.Column("records_total", sa.BigInteger(), nullable=True),
        sa.Column("records_bad", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.String(length=40), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("allow_python", sa.Text(), nullable=False),
        sa.Column("spec_digest", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("timings", sa.Text(), nullable=False),
        sa.Column("outputs", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("key", name="uq_jobs_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_name", "jobs", ["name", "seq"])
    op.create_table(
        "residents",
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("worker", "key", name="pk_residents"),
    )
    op.create_table(
        "schedules",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("format_version", sa.Integer(), nullable=False),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("dtype", sa.String(length=20), nullable=False),
        sa.Column("mode", sa.String(length=20), nullable=False),
        sa.Column("streams", sa.Integer(), nullable=False),
        sa.Column("syncs", sa.Integer(), nullable=False),
        sa.Column("replay_us", sa.Double(), nullable=False),
        sa.Column("eager_us", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("refused", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key", name="pk_schedules"),
    )
    op.create_table(
        "attempts",
        sa.Column("job", sa.String(length=12), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(length=12), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_attempts_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "number", name="pk_attempts"),
    )
    op.create_table(
        "schedule_texts",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["key"], ["schedules.key"], name="fk_schedule_texts_key", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key", name="pk_schedule_texts"),
    )
    op.create_table(
        "waits",
        sa.Column("job", sa.String(length=12), nullable=False),
        sa.Column("parent", sa.String(length=12), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_waits_job", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["parent"], ["jobs.id"], name="fk_waits_parent", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "parent", name="pk_waits"),
    )
    op.create_index("ix_waits_parent", "waits", ["parent"])
    op.create_index(
        "ix_jobs_claim",
        "jobs",
        ["state", "foreground", sa.text("priority DESC"), "seq", "not_before", "device"],
        unique=False,
    )


def downgrade() -> None:
    raise NotImplementedError("there is no version before the first")
