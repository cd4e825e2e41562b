"""Queues jobs again that ended badly, with fresh attempts. Their history is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job, JobState, When
from nimble_jobs.store.changes import batched, changed
from nimble_jobs.store.groups import group_of, set_group
from nimble_jobs.store.queries import fitting
from nimble_jobs.store.ranks import aging_s, next_queued_at
from nimble_jobs.store.records import job_record, load_after, load_object, schedule_columns, sha256, timings_columns
from nimble_jobs.store.tables import GroupRow, JobRow
from nimble_jobs.store.transitions import record_event
from nimble_jobs.store.waiting import wait_for

_AGAIN = (JobState.FAILED.value, JobState.CANCELLED.value, JobState.QUARANTINED.value)
_FAILED = (JobState.FAILED.value, JobState.QUARANTINED.value)


@dataclass(frozen=True, kw_only=True)
class Again:
    """The result of `retry`."""

    queued: tuple[Job, ...]  # in the order of their first submission
    # Jobs that were cancelled because of these and stay so: not requested, or they wait for other jobs.
    left: tuple[Job, ...] = ()


def retry(
    session: Session,
    references: Sequence[str],
    *,
    failed: bool,
    since: float | None,
    with_dependents: bool,
    now: float,
) -> Again:
    """`Jobs.retry`, inside a transaction."""
    chosen, refused = fitting(session, references, _reason)
    if failed:
        chosen |= {row.id: row for row in _failed(session, since) if _reason(row) is None}
    skipped = _skipped_by(session, list(chosen))
    taken = _possible(session, skipped, chosen) if with_dependents else {}
    chosen |= taken
    left = [row for job, row in skipped.items() if job not in chosen]
    rows = sorted(chosen.values(), key=lambda row: row.seq)
    refused += [f"job {row.id} ({row.name}): {why}" for row in rows if (why := _impossible(session, row, chosen))]
    if refused:
        raise UsageError("\n".join(refused))
    queued_at, aging = next_queued_at(session, now), aging_s(session)
    for row in rows:
        _reset(session, row, queued_at, aging, now)
    session.expire_all()
    for row in rows:
        _wait_again(session, row, now)
    session.expire_all()
    return Again(
        queued=tuple(job_record(row) for row in rows),
        left=tuple(job_record(row) for row in sorted(left, key=lambda row: row.seq)),
    )


def _reason(row: JobRow) -> str | None:
    """Why a job cannot be queued again; None if it can."""
    if row.foreground:
        return "was started by `nimble-jobs run`, which cannot be retried; run its spec again"
    if row.state not in _AGAIN:
        what = "has succeeded; submit its spec to run it once more" if row.state == "succeeded" else f"is {row.state}"
        return f"{what}; expected a job that failed, was cancelled or quarantined"
    if sha256(row.spec) != row.spec_digest:
        return "its stored spec is damaged; submit it again"
    return None


def _impossible(session: Session, row: JobRow, chosen: dict[str, JobRow]) -> str | None:
    """The wait of a job that could never end; None if all can. A job that has run before waits for nothing any more."""
    if row.attempt:
        return None
    for parent, when in load_after(row.after).items():
        if parent in chosen:
            continue
        other = session.scalar(select(JobRow).where(JobRow.id == parent))
        if other is None:
            return f"waits for job {parent}, which was removed; submit its spec again"
        state = JobState(other.state)
        if state.final and not when.met_by(state):
            return (
                f"waits for the {when} of job {parent} ({other.name}), which ended {state}; "
                f"retry that job --with-dependents, or submit this one again"
            )
    return None


def _possible(session: Session, skipped: dict[str, JobRow], chosen: dict[str, JobRow]) -> dict[str, JobRow]:
    """The skipped jobs whose waits can end once the chosen jobs run again."""
    taken = {job: row for job, row in skipped.items() if _reason(row) is None}
    while lost := [job for job, row in taken.items() if _impossible(session, row, chosen | taken)]:
        for job in lost:
            del taken[job]
    return taken


def _failed(session: Session, since: float | None) -> Sequence[JobRow]:
    query = select(JobRow).where(JobRow.state.in_(_FAILED)).order_by(JobRow.seq)
    if since is not None:
        query = query.where(JobRow.finished_at >= since)
    return session.scalars(query).all()


def _skipped_by(session: Session, jobs: list[str]) -> dict[str, JobRow]:
    """The jobs that were cancelled because of these, directly or through each other."""
    skipped: dict[str, JobRow] = {}
    while jobs:
        rows: list[JobRow] = []
        for some in batched(jobs):
            query = select(JobRow).where(JobRow.skipped_by.in_(some), JobRow.state == JobState.CANCELLED.value)
            rows += session.scalars(query)
        jobs = [row.id for row in rows if row.id not in skipped]
        skipped |= {row.id: row for row in rows}
    return skipped


def _reset(session: Session, row: JobRow, queued_at: float, aging: float, now: float) -> None:
    """Reset a job to its state after submission. It keeps its attempt number, which fences off earlier attempts."""
    values = {
        "state": JobState.QUEUED.value,
        "attempts_before": row.attempt,
        "cancel_requested": False,
        "not_before": 0.0,
        "worker": None,
        "started_at": None,
        "finished_at": None,
        "records_done": 0,
        "records_total": None,
        "records_bad": 0,
        "phase": None,
        "error": None,
        **schedule_columns({}),
        **timings_columns({}),
        "outputs": "{}",
        "skipped_by": None,
        "queued_at": queued_at,
        "urgency": row.priority,
        "rank": queued_at - row.priority * aging,
    }
    was, error, job = row.state, row.error, row.id
    group = group_of(load_object(row.spec))
    if group and session.get(GroupRow, group[0]) is None:
        set_group(session, *group)
    changed(session, update(JobRow).where(JobRow.id == job, JobRow.state == was).values(**values))
    message = f"queued again; it was {was}" + (f": {error}" if error else "")
    record_event(session, "retried", message, now=now, job=job, data={"state": was, "error": error})


def _wait_again(session: Session, row: JobRow, now: float) -> None:
    """Wait again for jobs that have not ended. A job that has run before waits only for jobs that are queued again."""
    parents: list[tuple[JobRow, When]] = []
    for parent, when in load_after(row.after).items():
        other = session.scalar(select(JobRow).where(JobRow.id == parent))
        if other is not None and not JobState(other.state).final:
            parents.append((other, when))
    if parents:
        wait_for(session, row.id, parents, now)
