"""Adds columns of jobs for listings and retention, and the times of daily duties."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_AT_ONCE = 1000


def upgrade() -> None:
    for column in (
        sa.Column("output", sa.Text()),
        sa.Column("hit", sa.String(length=10)),
        sa.Column("runs", sa.String(length=12)),
        sa.Column("rate", sa.Double()),
    ):
        op.add_column("jobs", column)
    op.create_table(
        "daily",
        sa.Column("duty", sa.String(length=40), nullable=False),
        sa.Column("slot", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("duty", name=op.f("pk_daily")),
    )
    _fill(op.get_bind())


def _fill(connection: sa.Connection) -> None:
    names = ("seq", "spec", "schedule", "timings", "output", "hit", "runs", "rate")
    jobs = sa.table("jobs", *(sa.column(name) for name in names))
    query = sa.select(jobs.c.seq, jobs.c.spec, jobs.c.schedule, jobs.c.timings).order_by(jobs.c.seq).limit(_AT_ONCE)
    new: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in ("output", "hit", "runs", "rate")}
    statement = jobs.update().where(jobs.c.seq == sa.bindparam("of")).values(**new)
    last = 0
    while rows := connection.execute(query.where(jobs.c.seq > last)).all():
        last = rows[-1][0]
        connection.execute(statement, [_values(*row) for row in rows])


def _values(seq: int, spec: str, schedule: str, timings: str) -> dict[str, Any]:
    found, rate = _object(schedule), _object(timings).get("records_per_s")
    output = _object(spec).get("output")
    return {
        "of": seq,
        "new_output": _text(output.get("path"), None) if isinstance(output, dict) else None,
        "new_hit": _text(found.get("hit"), 10),
        "new_runs": _text(found.get("runs"), 12),
        "new_rate": float(rate) if isinstance(rate, int | float) else None,
    }


def _text(value: object, length: int | None) -> str | None:
    return value[:length] if isinstance(value, str) else None


def _object(text: str) -> dict[str, Any]:
    """Empty if it is damaged."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


def downgrade() -> None:
    raise NotImplementedError("a database is not brought back to an earlier version")
