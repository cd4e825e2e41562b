"""Waits of queued jobs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState, When
from nimble_jobs.store.changes import changed
from nimble_jobs.store.ranks import raise_to
from nimble_jobs.store.tables import JobRow, WaitRow
from nimble_jobs.store.transitions import settle


def wait_for(session: Session, job: str, parents: Sequence[tuple[JobRow, When]], now: float) -> None:
    """Let a queued job wait for these ends, and lend its urgency. It is cancelled if one of the ends cannot happen."""
    open_ = [(row, when) for row, when in parents if not when.met_by(JobState(row.state))]
    session.add_all(WaitRow(job=job, parent=row.id, when=when.value) for row, when in open_)
    session.flush()
    changed(session, update(JobRow).where(JobRow.id == job).values(blockers=len(open_)))
    for row, _ in open_:
        if settle(session, row.id, JobState(row.state), now):
            return
    urgency = session.execute(select(JobRow.urgency).where(JobRow.id == job)).scalar_one()
    raise_to(session, [row.id for row, _ in open_ if row.urgency < urgency], urgency)
