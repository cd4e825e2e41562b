"""The order of the queue: the job with the lowest `rank` is claimed first, and of equal ones the one submitted first.

`rank = queued_at - urgency * aging_s`. All queued jobs age at the same pace, so ranks need no update as time passes.
For each step of priority that a later job has more, it may come up to `aging_s` later and still go first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, aliased

from nimble_jobs.job import JobState
from nimble_jobs.store.changes import batched, changed
from nimble_jobs.store.tables import JobRow, QueueRow, WaitRow

AGING_S = 3600.0  # the default
_NAME = "aging_s"
_CLOCK_S = 1.0  # how far the clocks of processes on one machine may differ


def aging_s(session: Session) -> float:
    """Seconds of waiting that equal one step of priority in this database's ranks."""
    value = session.scalar(select(QueueRow.value).where(QueueRow.name == _NAME))
    return AGING_S if value is None else value


def set_aging(session: Session, seconds: float) -> None:
    """Rank all queued jobs, and new ones from now on, by another `aging_s`."""
    row = session.get(QueueRow, _NAME, with_for_update=True)
    if row is None:
        session.add(QueueRow(name=_NAME, value=seconds))
    else:
        row.value = seconds
    session.flush()
    queued = update(JobRow).where(JobRow.state == JobState.QUEUED.value)
    changed(session, queued.values(rank=JobRow.queued_at - JobRow.urgency * seconds))


def next_queued_at(session: Session, now: float) -> float:
    """The `queued_at` of a job that is queued now: never earlier than the last queued job's, even if the clock went
    back.
    """
    newest = session.scalar(select(JobRow.queued_at).order_by(JobRow.seq.desc()).limit(1))
    return now if newest is None else max(now, newest)


def bring_back(session: Session, now: float) -> int:
    """Let jobs from a clock that ran ahead count as queued now. Returns their number."""
    ahead = update(JobRow).where(JobRow.state == JobState.QUEUED.value, JobRow.queued_at > now + _CLOCK_S)
    return changed(session, ahead.values(queued_at=now, rank=now - JobRow.urgency * aging_s(session)))


def raise_to(session: Session, jobs: Collection[str], urgency: int) -> None:
    """A job of this urgency waits for these jobs: raise their urgency, and that of the jobs they wait for, to it."""
    aging = aging_s(session) if jobs else AGING_S
    while jobs:
        raised: list[str] = []
        for some in batched(list(jobs)):
            lower = select(JobRow.id).where(JobRow.id.in_(some), JobRow.urgency < urgency)
            raised += session.scalars(lower)
        for some in batched(raised):
            new = {"urgency": urgency, "rank": JobRow.queued_at - urgency * aging}
            changed(session, update(JobRow).where(JobRow.id.in_(some)).values(**new))
        jobs = _parents(session, raised)


def take_back(session: Session, jobs: Iterable[str], urgency: int) -> None:
    """A job of this urgency no longer waits for these jobs: reduce theirs to what others lend, or to their own."""
    jobs = list(jobs)
    aging = aging_s(session) if jobs else AGING_S
    while jobs:
        child = aliased(JobRow)
        query = (
            select(JobRow.id, JobRow.priority, func.max(child.urgency))
            .outerjoin(WaitRow, WaitRow.parent == JobRow.id)
            .outerjoin(child, child.id == WaitRow.job)
            .where(JobRow.id.in_(jobs), JobRow.urgency == urgency, JobRow.priority < urgency)
            .group_by(JobRow.id, JobRow.priority)
        )
        lowered = []
        for job, priority, lent in session.execute(query).all():
            left = max(priority, priority if lent is None else lent)
            if left < urgency:
                new = {"urgency": left, "rank": JobRow.queued_at - left * aging}
                changed(session, update(JobRow).where(JobRow.id == job).values(**new))
                lowered.append(job)
        jobs = _parents(session, lowered)


def _parents(session: Session, jobs: list[str]) -> list[str]:
    parents: dict[str, None] = {}
    for some in batched(jobs):
        parents |= dict.fromkeys(session.scalars(select(WaitRow.parent).where(WaitRow.job.in_(some))))
    return list(parents)
