"""What an operator tells the queue: cancel jobs, hold them, release them, try them again."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.store.again import Again, retry
from nimble_jobs.store.changes import changed
from nimble_jobs.store.claims import JobClaims
from nimble_jobs.store.queries import find_job, find_jobs
from nimble_jobs.store.records import job_record
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.transitions import leave_queued, record_event


class JobOrders(JobClaims):
    """The operator's side of the job table."""

    def cancel(self, reference: str, now: float) -> JobState:
        """Cancel a queued job at once, ask a running one to stop; a job that has ended stays as it is.

        Returns the state after that. Raises NotFound.
        """

        def work(session: Session) -> JobState:
            job_id = find_job(session, reference).id
            if leave_queued(
                session, job_id, to=JobState.CANCELLED, error=None, event="cancelled", message="cancelled", now=now
            ):
                return JobState.CANCELLED
            asked = (
                update(JobRow)
                .where(
                    JobRow.id == job_id,
                    JobRow.state == JobState.RUNNING.value,
                    JobRow.cancel_requested.is_(False),
                )
                .values(cancel_requested=True)
            )
            if changed(session, asked) == 1:
                record_event(session, "cancel", "asked to stop", now=now, job=job_id)
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

        `failed`: those that failed or were quarantined, at `since` or later where given. `with_dependents`: those too
        that were cancelled because the wait for one of these could not end. Of an array the jobs that can be. Raises
        NotFound, and UsageError with a line for each job that cannot be queued again.
        """
        return self._db.write(
            lambda session: retry(
                session, references, failed=failed, since=since, with_dependents=with_dependents, now=now
            )
        )

    def hold(self, references: Sequence[str], now: float) -> list[Job]:
        """Let no worker claim these queued jobs until they are released; all or none. A held one stays held.

        Of an array the queued jobs. Raises NotFound, and UsageError with a line for each job that is not queued.
        """
        return self._db.write(lambda session: _hold(session, references, held=True, now=now))

    def release(self, references: Sequence[str], now: float) -> list[Job]:
        """Let held jobs run again; all or none. Their age has grown meanwhile. Raises as `hold` does."""
        return self._db.write(lambda session: _hold(session, references, held=False, now=now))


def _hold(session: Session, references: Sequence[str], *, held: bool, now: float) -> list[Job]:
    chosen: dict[str, JobRow] = {}
    refused: list[str] = []
    for reference in references:
        rows = find_jobs(session, reference)
        fit = [row for row in rows if _reason(row, held=held) is None]
        chosen |= {row.id: row for row in fit}
        if not fit:
            refused += [f"job {row.id} ({row.name}): {_reason(row, held=held)}" for row in rows]
    if refused:
        raise UsageError("\n".join(refused))
    ids = [row.id for row in chosen.values() if row.held is not held]
    for job in ids:
        changed(session, update(JobRow).where(JobRow.id == job).values(held=held))
        record_event(session, "held" if held else "released", "held" if held else "released", now=now, job=job)
    session.expire_all()
    return [job_record(row) for row in chosen.values()]


def _reason(row: JobRow, *, held: bool) -> str | None:
    """Why a job cannot be held, or released; None where it can."""
    if row.foreground:
        return "belongs to a run command; expected a job of submit"
    if row.state != JobState.QUEUED.value:
        return f"is {row.state}; expected a queued job"
    return None if held or row.held else "is not held"
