"""Totals that removals do not change, the bytes of residents, last successes of timers, and traces of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "totals",
        sa.Column("what", sa.String(length=20), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("outcome", sa.String(length=20), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("what", "kind", "outcome", name=op.f("pk_totals")),
    )
    op.add_column("jobs", sa.Column("records_counted", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("traceparent", sa.String(length=55), nullable=True))
    op.add_column("timers", sa.Column("last_success_at", sa.Double(), nullable=True))
    op.add_column("residents", sa.Column("bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index(
        "ix_jobs_figures", "jobs", ["state", "kind", "foreground", "held", "blockers", "not_before", "queued_at"]
    )
    _note_successes()
    # Totals begin at zero now, so what earlier attempts did must not be added later.
    jobs = sa.table("jobs", sa.column("records_done"), sa.column("records_counted"))
    op.execute(jobs.update().values(records_counted=jobs.c.records_done))


def _note_successes() -> None:
    """Set each timer's last success to the newest one among the jobs that are left."""
    timers = sa.table("timers", sa.column("name"), sa.column("last_success_at"))
    ticks = sa.table("ticks", sa.column("timer"), sa.column("job"))
    jobs = sa.table("jobs", sa.column("id"), sa.column("state"), sa.column("finished_at"))
    newest = (
        sa.select(sa.func.max(jobs.c.finished_at))
        .select_from(ticks.join(jobs, jobs.c.id == ticks.c.job))
        .where(ticks.c.timer == timers.c.name, jobs.c.state == "succeeded")
    )
    op.execute(timers.update().values(last_success_at=newest.scalar_subquery()))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
