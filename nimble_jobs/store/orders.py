"""An operator's commands to the queue: cancel, hold, release and retry jobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.store.again import Again, retry
from nimble_jobs.store.claims import JobClaims
from nimble_jobs.store.queries import find_job, fitting
from nimble_jobs.store.records import job_record
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.transitions import cancel, record_event


class JobOrders(JobClaims):
    """The part of the job table that serves an operator."""

    def cancel(self, reference: str, now: float) -> JobState:
        """Cancel a queued job at once, or ask a running one to stop. An ended job stays as it is.

        Returns the state after that. Raises NotFound.
        """

        def work(session: Session) -> JobState:
            job_id = find_job(session, reference).id
            cancel(session, job_id, now=now)
            return JobState(session.execute(select(JobRow.state).where(JobRow.id == job_id)).scalar_one())

        return self._db.write(work)

    def retry(
        self,
        references: Sequence[str] = (),
        *,
        failed: bool = False,
        since: float | None = None,
        with_dependents: bool = False,
        now: float,
    ) -> Again:
        """Queue jobs again that failed, were cancelled or quarantined, with fresh attempts; all or none.

        `failed`: jobs that failed or were quarantined, since `since` if given. `with_dependents`: also jobs that were
        cancelled because their wait for one of these could not end. Of an array, only the jobs that can be retried.
        Raises NotFound, and UsageError with a line for each job that cannot be queued again.
        """
        return self._db.write(
            lambda session: retry(
                session, references, failed=failed, since=since, with_dependents=with_dependents, now=now
            )
        )

    def hold(self, references: Sequence[str], now: float) -> list[Job]:
        """Keep workers from claiming these queued jobs until they are released; all or none.

        Of an array, only the queued jobs. Raises NotFound, and UsageError with a line for each job that is not queued.
        """
        return self._db.write(lambda session: _hold(session, references, held=True, now=now))

    def release(self, references: Sequence[str], now: float) -> list[Job]:
        """Let held jobs run again; all or none. The time on hold counts as waiting. Raises as `hold` does."""
        return self._db.write(lambda session: _hold(session, references, held=False, now=now))


def _hold(session: Session, references: Sequence[str], *, held: bool, now: float) -> list[Job]:
    chosen, refused = fitting(session, references, partial(_reason, held=held))
    if refused:
        raise UsageError("\n".join(refused))
    changing = [row for row in chosen.values() if row.held is not held]
    for row in changing:
        row.held = held
    session.flush()  # in one statement
    what = "held" if held else "released"
    for row in changing:
        record_event(session, what, what, now=now, job=row.id)
    return [job_record(row) for row in chosen.values()]


def _reason(row: JobRow, *, held: bool) -> str | None:
    """Why a job cannot be held or released; None if it can."""
    if row.foreground:
        return "was started by `nimble-jobs run`; expected a submitted job"
    if row.state != JobState.QUEUED.value:
        return f"is {row.state}; expected a queued job"
    return None if held or row.held else "is not held"
