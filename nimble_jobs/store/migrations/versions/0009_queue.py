"""Adds ages, inherited priorities, groups, holds, arrays, and waits for a failure or any end."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_AGING_S = 3600.0


def upgrade() -> None:
    op.create_table(
        "job_groups",
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("most", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_job_groups"),
    )
    op.create_table(
        "queue",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_queue"),
    )
    for column in _columns():
        op.add_column("jobs", column)
    op.add_column("waits", sa.Column("when", sa.String(length=8), nullable=False, server_default="success"))
    op.drop_index("ix_jobs_claim", "jobs")
    jobs, waits = sa.table("jobs", *map(sa.column, _NAMES)), sa.table("waits", sa.column("job"), sa.column("parent"))
    op.execute(
        jobs.update().values(
            queued_at=jobs.c.created_at,
            urgency=jobs.c.priority,
            rank=jobs.c.created_at - jobs.c.priority * _AGING_S,
            blockers=sa.select(sa.func.count()).where(waits.c.job == jobs.c.id).scalar_subquery(),
        )
    )
    _lend(jobs, waits)
    op.create_index(
        "ix_jobs_claim",
        "jobs",
        ["state", "foreground", "held", "blockers", "group_name", "rank", "seq", "not_before", "device"],
    )
    for name, columns in (
        ("ix_jobs_group", ["group_name", "state"]),
        ("ix_jobs_array", ["array", "seq"]),
        ("ix_jobs_skipped", ["skipped_by"]),
    ):
        given = sa.text(f"{columns[0]} IS NOT NULL")
        op.create_index(name, "jobs", columns, sqlite_where=given, postgresql_where=given)


_NAMES = ("id", "created_at", "priority", "queued_at", "urgency", "rank", "blockers", "group_name", "array", "seq")


def _columns() -> list[sa.Column[object]]:
    return [
        sa.Column("held", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("blockers", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("group_name", sa.String(length=100), nullable=True),
        sa.Column("array", sa.String(length=12), nullable=True),
        sa.Column("array_index", sa.Integer(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=False, server_default="0"),
        sa.Column("urgency", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("rank", sa.Double(), nullable=False, server_default="0"),
        sa.Column("attempts_before", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("skipped_by", sa.String(length=12), nullable=True),
    ]


def _lend(jobs: sa.TableClause, waits: sa.TableClause) -> None:
    """Give each job the highest priority among the jobs that wait for it, directly or through others."""
    connection = op.get_bind()
    child, parent = jobs.alias(), jobs.alias()
    query = (
        sa.select(parent.c.id, sa.func.max(child.c.urgency))
        .select_from(waits.join(child, child.c.id == waits.c.job).join(parent, parent.c.id == waits.c.parent))
        .where(child.c.urgency > parent.c.urgency)
        .group_by(parent.c.id)
    )
    while raised := connection.execute(query).all():
        for job, urgency in raised:
            values = {"urgency": urgency, "rank": jobs.c.queued_at - urgency * _AGING_S}
            connection.execute(jobs.update().where(jobs.c.id == job).values(**values))


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
