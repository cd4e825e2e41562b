"""The steps of a job's life, inside a transaction: each is one conditional update, with its attempt row and event."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CursorResult, Delete, Update, delete, func, select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store.records import dump
from nimble_jobs.store.tables import AttemptRow, EventRow, JobRow, WaitRow
from nimble_jobs.store.words import plain

BAD = (JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED)  # ends that dependents do not survive


def changed(session: Session, statement: Update | Delete) -> int:
    """Execute, and say how many rows it touched."""
    result = session.execute(statement, execution_options={"synchronize_session": False})
    assert isinstance(result, CursorResult)
    return result.rowcount


def record_event(
    session: Session,
    kind: str,
    message: str,
    *,
    now: float,
    job: str | None = None,
    attempt: int | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Add an event to the transaction."""
    session.add(EventRow(at=now, job=job, attempt=attempt, kind=kind, message=message, data=dump(plain(data or {}))))
    session.flush()


def start_attempt(session: Session, row: JobRow, now: float) -> None:
    """Note the attempt that a claim just began."""
    assert row.worker is not None
    session.add(AttemptRow(job=row.id, number=row.attempt, worker=row.worker, started_at=now))
    record_event(session, "claimed", f"attempt {row.attempt} on {row.worker}", now=now, job=row.id, attempt=row.attempt)


def held(session: Session, job_id: str, attempt: int) -> JobRow | None:
    """The job, if this attempt still runs it. Nobody else changes the row until the transaction ends."""
    query = select(JobRow).where(JobRow.id == job_id, JobRow.attempt == attempt, JobRow.state == JobState.RUNNING.value)
    return session.scalar(query.with_for_update())


def leave_running(
    session: Session,
    job_id: str,
    attempt: int,
    *,
    to: JobState,
    outcome: str,
    error: str | None,
    event: str,
    message: str,
    now: float,
    **values: Any,
) -> bool:
    """End an attempt. False, and nothing is written, when another attempt owns the job or it has ended."""
    if to.final:
        values |= {"finished_at": now}
    statement = (
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.attempt == attempt, JobRow.state == JobState.RUNNING.value)
        .values(state=to.value, phase=None, error=error, **values)
    )
    if changed(session, statement) != 1:
        return False
    ended = update(AttemptRow).where(AttemptRow.job == job_id, AttemptRow.number == attempt)
    changed(session, ended.values(finished_at=now, outcome=outcome, error=error))
    record_event(session, event, message, now=now, job=job_id, attempt=attempt)
    settle(session, job_id, to, now)
    return True


def leave_queued(
    session: Session, job_id: str, *, to: JobState, error: str | None, event: str, message: str, now: float
) -> bool:
    """End a job that nobody runs. False when it is not queued."""
    statement = (
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.state == JobState.QUEUED.value)
        .values(state=to.value, error=error, finished_at=now)
    )
    if changed(session, statement) != 1:
        return False
    record_event(session, event, message, now=now, job=job_id)
    changed(session, delete(WaitRow).where(WaitRow.job == job_id))
    settle(session, job_id, to, now)
    return True


def settle(session: Session, job_id: str, state: JobState, now: float) -> None:
    """Tell those who wait for a job how it ended."""
    if state == JobState.SUCCEEDED:
        changed(session, delete(WaitRow).where(WaitRow.parent == job_id))
    elif state in BAD and session.scalar(select(WaitRow.job).where(WaitRow.parent == job_id).limit(1)) is not None:
        fail_dependents(session, now)


def fail_dependents(session: Session, now: float) -> list[str]:
    """Fail the queued jobs that wait for one that ended badly, and those that wait for these. Returns their ids."""
    query = (
        select(WaitRow.job, JobRow.id, JobRow.name, JobRow.state)
        .join(JobRow, JobRow.id == WaitRow.parent)
        .where(JobRow.state.in_([state.value for state in BAD]))
        .order_by(WaitRow.job)
    )
    failed: list[str] = []
    while waiting := session.execute(query).all():
        for job, parent, name, state in waiting:
            reason = f"run.after: job {parent} ({name}) ended {state}"
            statement = (
                update(JobRow)
                .where(JobRow.id == job, JobRow.state == JobState.QUEUED.value)
                .values(state=JobState.FAILED.value, error=reason, finished_at=now)
            )
            if changed(session, statement) == 1:
                record_event(session, "failed", reason, now=now, job=job)
                failed.append(job)
            changed(session, delete(WaitRow).where(WaitRow.job == job))
    return failed


def count_attempts(session: Session, job_id: str, *outcomes: str) -> int:
    """How many attempts of a job ended so."""
    query = select(func.count()).where(AttemptRow.job == job_id, AttemptRow.outcome.in_(outcomes))
    return int(session.scalar(query) or 0)
