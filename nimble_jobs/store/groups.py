"""Groups of jobs with a limit on how many run at once, counted from the rows of running jobs.

A group has one limit: the limit of the job that was queued last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import ColumnElement, Table, delete, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from nimble_jobs.job import JobState
from nimble_jobs.store.changes import batched, changed, run
from nimble_jobs.store.tables import GroupRow, JobRow

_GROUPS = cast(Table, GroupRow.__table__)
_LOCKED = select(_GROUPS.c.name).order_by(_GROUPS.c.name).with_for_update()


def group_of(spec: Mapping[str, Any]) -> tuple[str, int] | None:
    """Name and limit in a stored spec's `run.group`."""
    group = (spec.get("run") or {}).get("group")
    return (str(group["name"]), int(group["limit"])) if group else None


def set_group(session: Session, name: str, limit: int) -> int | None:
    """Let at most `limit` jobs of the group run from now on. Returns the previous limit, None for a new group."""
    row = session.get(GroupRow, name, with_for_update=True)
    if row is None:
        session.add(GroupRow(name=name, most=limit))
        session.flush()
        return None
    before, row.most = row.most, limit
    session.flush()
    return before


def lock_groups(session: Session) -> None:
    """Keep others from claiming jobs of a group until the transaction ends. On SQLite nobody else can anyway."""
    if session.get_bind().dialect.name == "postgresql":
        run(session, _LOCKED).all()


def running(name: ColumnElement[str] | InstrumentedAttribute[str] | InstrumentedAttribute[str | None]) -> Any:
    """A subquery: the number of running jobs of the group."""
    other = aliased(JobRow)
    query = select(func.count()).where(other.group_name == name, other.state == JobState.RUNNING.value)
    return query.scalar_subquery()


def has_room() -> ColumnElement[bool]:
    """A condition on a job: it has no group, or its group has room."""
    limit = select(GroupRow.most).where(GroupRow.name == JobRow.group_name).scalar_subquery()
    return or_(JobRow.group_name.is_(None), running(JobRow.group_name) < limit)


def fullness(session: Session, names: list[str]) -> dict[str, tuple[int, int]]:
    """For each of these groups, how many of its jobs run, and how many may."""
    query = select(GroupRow.name, running(GroupRow.name), GroupRow.most).where(GroupRow.name.in_(names))
    return {name: (count, most) for name, count, most in session.execute(query)}


def idle_groups(session: Session) -> list[str]:
    """Groups without queued or running jobs, which claims need not look at."""
    alive = select(JobRow.id).where(
        JobRow.group_name == GroupRow.name, JobRow.state.in_([JobState.QUEUED.value, JobState.RUNNING.value])
    )
    return list(session.scalars(select(GroupRow.name).where(~alive.exists())))


def forget_groups(session: Session) -> None:
    """Drop the idle groups. A job that is queued again brings its group back."""
    for some in batched(idle_groups(session)):
        changed(session, delete(GroupRow).where(GroupRow.name.in_(some)))
