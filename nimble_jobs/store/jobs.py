"""The job table for everyone but workers: queue, cancel, and recovery of forgotten jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import Job, JobState
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store.changes import changed
from nimble_jobs.store.groups import forget_groups, idle_groups
from nimble_jobs.store.ids import new_id
from nimble_jobs.store.new_job import NewJob, insert_job, insert_jobs, write_new
from nimble_jobs.store.orders import JobOrders
from nimble_jobs.store.ranks import aging_s, bring_back, set_aging
from nimble_jobs.store.records import job_record, load_object
from nimble_jobs.store.retries import longest_s
from nimble_jobs.store.tables import JobRow, WaitRow
from nimble_jobs.store.transitions import FINAL, leave_queued, record_event, record_own_event, settle_missed

_CLOCK_S = 1.0  # how far the clocks of processes on one machine may differ
_UNOWNED_S = 600.0  # how long a foreground job may have no process; torch may take long to load


class Jobs(JobOrders):
    """The job table. Time is always an argument: Unix seconds."""

    def queue(self, new: NewJob, now: float) -> Job:
        """Queue a job, durably. With a `key` that exists already: the job that has it, if its spec is the same.

        Raises NotFound for an unknown job in `after`, UsageError when the key belongs to another spec.
        """
        return write_new(self._db, lambda session: insert_job(session, new, now))

    def queue_array(self, new: Sequence[NewJob], now: float) -> tuple[str, list[Job]]:
        """Queue several jobs, all or none. Returns the id of their array, and the jobs.

        Jobs may wait for earlier ones of the array by name. One whose `key` exists already is the job that has it, and
        is no part of the array. Raises what `queue` raises.
        """

        def work(session: Session) -> tuple[str, list[Job]]:
            array = new_id(now)
            return array, insert_jobs(session, new, now, array)

        return write_new(self._db, work)

    def sweep(self, now: float) -> list[Job]:
        """Settle jobs that still wait for a job that has ended. Returns the cancelled ones.

        The end of a job does this already; this catches whatever was missed. It also brings back retries and queue
        places that a clock, now set back, had put far into the future, and forgets groups without open jobs.
        """
        self._bring_forward(now)
        self._forget_groups()
        ended = select(WaitRow.job).join(JobRow, JobRow.id == WaitRow.parent).where(JobRow.state.in_(FINAL)).limit(1)
        if self._db.read(lambda session: session.scalar(ended)) is None:
            return []
        return [self.get(job) for job in self._db.write(lambda session: settle_missed(session, now))]

    def _bring_forward(self, now: float) -> None:
        late = select(JobRow).where(
            JobRow.state == JobState.QUEUED.value, JobRow.attempt > 0, JobRow.not_before > now + _CLOCK_S
        )
        for row in self._db.read(lambda session: list(session.scalars(late))):
            due = now + longest_s(load_object(row.spec), row.attempt)
            if row.not_before > due + _CLOCK_S:
                where = (JobRow.id == row.id, JobRow.attempt == row.attempt, JobRow.not_before == row.not_before)
                self._db.write(partial(changed, statement=update(JobRow).where(*where).values(not_before=due)))
        newest = select(JobRow.queued_at).order_by(JobRow.seq.desc()).limit(1)
        ahead = self._db.read(lambda session: session.scalar(newest))
        if ahead is not None and ahead > now + _CLOCK_S:
            self._db.write(lambda session: bring_back(session, now))

    def _forget_groups(self) -> None:
        if self._db.read(idle_groups):
            self._db.write(forget_groups)

    def set_aging(self, seconds: float, now: float) -> bool:
        """Rank the queue by a new `aging_s`, the seconds of waiting that equal one step of priority.

        False if it is unchanged. New jobs use the value that was set last.
        """

        def work(session: Session) -> bool:
            before = aging_s(session)
            if before == seconds:  # another worker was first
                return False
            set_aging(session, seconds)
            message = (
                f"queue.aging changed from {format_duration(before)} to {format_duration(seconds)}; the queue "
                "was re-ranked"
            )
            record_event(session, "ranked", message, now=now)
            return True

        return self.aging_s() != seconds and self._db.write(work)

    def recover(self, live: Callable[[str], bool] | Collection[str], now: float) -> list[Job]:
        """End the attempts whose worker is gone. Returns their jobs.

        `live` tells whether a worker is alive, by its id. It is called after the jobs were read, so that a worker that
        started meanwhile is not taken for dead.
        """
        alive = live if callable(live) else live.__contains__
        query = select(JobRow).where(
            (JobRow.state == JobState.RUNNING.value)
            | ((JobRow.state == JobState.QUEUED.value) & JobRow.foreground.is_(True))
        )
        jobs = self._db.read(lambda session: [job_record(row) for row in session.scalars(query)])
        verdict = {worker: alive(worker) for worker in {job.worker for job in jobs if job.worker}}
        lost: list[Job] = []
        for job in jobs:
            if verdict[job.worker] if job.worker else now < job.created_at + _UNOWNED_S:
                continue
            if self._give_up(job, now):
                lost.append(self.get(job.id))
        return lost

    def _give_up(self, job: Job, now: float) -> bool:
        reason = "the run process died" if job.foreground else f"worker {job.worker} died"
        if job.state == JobState.RUNNING:
            return self.fail(job.id, job.attempt, error=reason, retry=True, lost=True, now=now) is not None
        return self._db.write(
            lambda session: leave_queued(
                session, job.id, to=JobState.FAILED, error=reason, event="failed", message=reason, now=now
            )
        )

    def event(
        self,
        kind: str,
        message: str,
        job_id: str | None = None,
        attempt: int | None = None,
        data: Mapping[str, Any] | None = None,
        *,
        now: float,
    ) -> bool:
        """Record an event. With an attempt: False, and nothing is recorded, if a newer attempt has begun."""
        return self._db.write(
            lambda session: _note(session, kind, message, job=job_id, attempt=attempt, data=dict(data or {}), now=now),
            beside=True,
        )

    def event_soon(
        self, kind: str, message: str, job_id: str, attempt: int, data: Mapping[str, Any], *, now: float
    ) -> None:
        """As `event`, but with the next transaction: at the latest when the attempt ends."""
        held = dict(data)
        self._db.write_soon(
            lambda session: _note(session, kind, message, job=job_id, attempt=attempt, data=held, now=now),
            beside=True,
        )


def _note(
    session: Session,
    kind: str,
    message: str,
    *,
    job: str | None,
    attempt: int | None,
    data: dict[str, Any],
    now: float,
) -> bool:
    if attempt is not None:
        return record_own_event(session, kind, message, now=now, job=job, attempt=attempt, data=data)
    record_event(session, kind, message, now=now, job=job, attempt=attempt, data=data)
    return True
