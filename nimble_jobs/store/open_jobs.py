"""The open jobs of a timer, and its waiting ticks."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store.changes import batched
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.timer_records import OpenJob, Tick, TickKind, TickOutcome, tick_record
from nimble_jobs.store.timer_tables import TickRow

OPEN = (JobState.QUEUED.value, JobState.RUNNING.value)
WAITING_AT_MOST = 1000  # ticks of one timer that are looked at while they wait


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A timer's open jobs and waiting ticks."""

    open: tuple[OpenJob, ...] = ()  # jobs of its ticks that are queued or running, by tick
    waiting: tuple[Tick, ...] = ()  # waiting ticks except backfills, oldest first
    backfill: tuple[Tick, ...] = ()  # waiting ticks of backfills

    @property
    def backfills(self) -> int:
        """The number of open jobs of backfills."""
        return sum(job.kind is TickKind.BACKFILL for job in self.open)

    @property
    def regular(self) -> tuple[OpenJob, ...]:
        """The open jobs except backfills."""
        return tuple(job for job in self.open if job.kind is not TickKind.BACKFILL)


def standing(session: Session, timer: str) -> Standing:
    """The timer's open jobs as the transaction sees them."""
    # In two steps: a join would look at all ticks of the timer, and it may have half a million.
    jobs = select(JobRow.id, JobRow.state).where(JobRow.name == timer, JobRow.state.in_(OPEN))
    states: dict[str, str] = {job: state for job, state in session.execute(jobs)}  # noqa: C416  # rows are no pairs to mypy
    opened: list[OpenJob] = []
    for some in batched(list(states)):
        ticks = select(TickRow.job, TickRow.timer, TickRow.due, TickRow.kind).where(TickRow.job.in_(some))
        opened += [
            OpenJob(id=job, state=JobState(states[job]), due=due, kind=TickKind(kind))
            for job, of, due, kind in session.execute(ticks)
            if of == timer and job is not None
        ]
    waiting = select(TickRow).where(TickRow.timer == timer, TickRow.outcome == TickOutcome.WAITING.value)
    waiting = waiting.order_by(TickRow.due).limit(WAITING_AT_MOST)
    backfill = TickRow.kind == TickKind.BACKFILL.value  # apart: thousands of them must not hide the others
    return Standing(
        open=tuple(sorted(opened, key=lambda job: job.due)),
        waiting=tuple(tick_record(row) for row in session.scalars(waiting.where(~backfill))),
        backfill=tuple(tick_record(row) for row in session.scalars(waiting.where(backfill))),
    )
