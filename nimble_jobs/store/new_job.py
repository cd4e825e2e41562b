"""A job that is about to be queued, and the part of a transaction that queues it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec import dump as dump_spec
from nimble_jobs.store.ids import new_id
from nimble_jobs.store.queries import find_job
from nimble_jobs.store.records import dump, job_record, output_path, sha256
from nimble_jobs.store.tables import JobRow, WaitRow
from nimble_jobs.store.transitions import BAD, fail_dependents, record_event

_MAX_ATTEMPTS = 3  # run.retry's default


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """What is known of a job before it has an id. Times are Unix seconds."""

    spec: Mapping[str, Any]
    name: str
    kind: str
    priority: int = 0
    key: str | None = None
    after: tuple[str, ...] = ()  # ids or names (the newest job of that name)
    not_before: float = 0.0
    max_attempts: int | None = None  # None: as run.retry says
    timeout_s: float | None = None
    device: str = "auto"
    foreground: bool = False
    worker: str | None = None  # who will run a foreground job
    allow_python: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec, *, allow_python: tuple[str, ...] = ()) -> NewJob:
        """The job that a spec asks for."""
        return cls(
            spec=dump_spec(spec),
            name=spec.name,
            kind=spec.kind,
            priority=spec.run.priority,
            key=spec.run.key,
            after=spec.run.after,
            max_attempts=spec.run.retry.max_attempts,
            timeout_s=spec.run.timeout,
            device=spec.run.device,
            allow_python=allow_python,
        )


def insert_job(session: Session, new: NewJob, now: float) -> Job:
    """Queue a job, or give the one that has its `key` already, if its spec is the same.

    Raises NotFound for an unknown job in `after`, UsageError when the key belongs to another spec, and then nothing was
    changed. Raises IntegrityError where the id is taken.
    """
    text = dump(new.spec)
    digest = sha256(text)
    if new.key is not None:
        existing = session.scalar(select(JobRow).where(JobRow.key == new.key))
        if existing is not None:
            if existing.spec_digest != digest:
                raise UsageError(
                    f"run.key: {new.key!r} belongs to job {existing.id}, which has another spec; "
                    "expected the same spec or another key"
                )
            return job_record(existing)
    parents: dict[str, JobState] = {}
    for reference in new.after:
        try:
            parent = find_job(session, reference)
        except NotFound as e:
            raise NotFound(f"run.after: {e}") from e
        parents[parent.id] = JobState(parent.state)
    attempts = new.max_attempts
    if attempts is None:
        attempts = int(new.spec.get("run", {}).get("retry", {}).get("max_attempts", _MAX_ATTEMPTS))
    row = JobRow(
        id=new_id(now),
        name=new.name,
        kind=new.kind,
        state=JobState.QUEUED.value,
        priority=new.priority,
        max_attempts=attempts,
        device=new.device,
        foreground=new.foreground,
        key=new.key,
        after=dump(list(parents)),
        not_before=new.not_before,
        timeout_s=new.timeout_s,
        worker=new.worker,
        created_at=now,
        allow_python=dump(list(new.allow_python)),
        spec_digest=digest,
        spec=text,
        output=output_path(new.spec),
    )
    session.add(row)
    session.flush()
    session.add_all(
        WaitRow(job=row.id, parent=parent) for parent, state in parents.items() if state != JobState.SUCCEEDED
    )
    record_event(session, "submitted", f"queued as {row.name}", now=now, job=row.id)
    if any(state in BAD for state in parents.values()):
        fail_dependents(session, now)
        session.expire(row)
    return job_record(row)
