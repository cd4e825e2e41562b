"""New jobs, and the part of a transaction that queues them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from nimble_jobs.errors import NotFound, StoreError, UsageError
from nimble_jobs.job import ALL_GPUS, After, Job, JobState, When
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec import dump as dump_spec
from nimble_jobs.store import totals
from nimble_jobs.store.database import Database
from nimble_jobs.store.groups import group_of, set_group
from nimble_jobs.store.ids import new_id
from nimble_jobs.store.queries import find_jobs
from nimble_jobs.store.ranks import aging_s, next_queued_at
from nimble_jobs.store.records import dump, dump_after, job_record, output_path, sha256
from nimble_jobs.store.tables import EventRow, JobRow
from nimble_jobs.store.totals import Total
from nimble_jobs.store.transitions import record_event
from nimble_jobs.store.waiting import wait_for

T = TypeVar("T")

_APART_S = 0.001  # apart in an array's ids: within one millisecond, thousands of random ids would collide
_MAX_ATTEMPTS = 3  # run.retry's default


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job before it has an id. Times are Unix seconds."""

    spec: Mapping[str, Any]
    name: str
    kind: str
    priority: int = 0
    key: str | None = None
    after: tuple[After | str, ...] = ()  # a text: that job must succeed
    not_before: float = 0.0
    max_attempts: int | None = None  # None: as run.retry says
    timeout_s: float | None = None
    device: str = "auto"
    foreground: bool = False
    # The process that will run a foreground job: it does not wait for ever for a process that died.
    worker: str | None = None
    allow_python: tuple[str, ...] = ()
    traceparent: str | None = None  # W3C trace context: the trace that this job is a part of

    @classmethod
    def of(cls, spec: JobSpec, *, allow_python: tuple[str, ...] = ()) -> NewJob:
        """The job of a spec."""
        return cls(
            spec=dump_spec(spec),
            name=spec.name,
            kind=spec.kind,
            priority=spec.run.priority,
            key=spec.run.key,
            after=waits_of(spec),
            max_attempts=spec.run.retry.max_attempts,
            timeout_s=spec.run.timeout,
            device=spec.run.device,
            allow_python=allow_python,
        )


def waits_of(spec: JobSpec) -> tuple[After, ...]:
    """The waits in a spec's `run.after`."""
    return tuple(
        After(job=item) if isinstance(item, str) else After(job=item.job, when=When(item.when))
        for item in spec.run.after
    )


def insert_job(session: Session, new: NewJob, now: float) -> Job:
    """Queue a job, or return the existing job with the same `key`, if its spec is the same.

    Raises what `insert_jobs` raises.
    """
    return insert_jobs(session, [new], now)[0]


def insert_jobs(session: Session, new: Sequence[NewJob], now: float, array: str | None = None) -> list[Job]:
    """Queue jobs. For a `key` that exists already with the same spec, the existing job is returned.

    Raises NotFound for an unknown job in `after`, UsageError when the key belongs to another spec and when a job is
    awaited with different ends, and then nothing was changed. Raises IntegrityError if the id is taken.
    """
    place = _Place(queued_at=next_queued_at(session, now), aging_s=aging_s(session), array=array)
    rows = [_add(session, each, now, place, index) for index, each in enumerate(new)]
    session.flush()
    return [job_record(row) for row in rows]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The place in the queue of jobs that are queued together."""

    queued_at: float
    aging_s: float
    array: str | None
    limits: dict[str, int] = field(default_factory=dict)  # of groups, as this transaction has set them


def write_new(database: Database, work: Callable[[Session], T]) -> T:
    """Write in one transaction. Repeat it if an id, or on a database with several writers a key or tick, was taken."""
    for _ in range(5):
        try:
            return database.write(work)
        except IntegrityError:
            continue
    raise StoreError("no free job id was found; check that the clock is running")


def _add(session: Session, new: NewJob, now: float, place: _Place, index: int) -> JobRow:
    """Add a job to the session. It is flushed only if it must be found, since many rows at once are much faster."""
    if new.key is not None or new.after:
        session.flush()  # the wait may name an earlier one of these jobs
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
            return existing
    parents = _parents(session, new)
    attempts = new.max_attempts
    if attempts is None:
        attempts = int(new.spec.get("run", {}).get("retry", {}).get("max_attempts", _MAX_ATTEMPTS))
    group = group_of(new.spec)
    row = JobRow(
        id=new_id(now + _APART_S * index),
        name=new.name,
        kind=new.kind,
        state=JobState.QUEUED.value,
        priority=new.priority,
        max_attempts=attempts,
        device=new.device,
        foreground=new.foreground,
        key=new.key,
        after=dump_after({job.id: when for job, when in parents}),
        not_before=new.not_before,
        timeout_s=new.timeout_s,
        worker=new.worker,
        created_at=now,
        allow_python=dump(list(new.allow_python)),
        spec_digest=digest,
        spec=text,
        output=output_path(new.spec),
        group_name=group[0] if group else None,
        array=place.array,
        array_index=None if place.array is None else index,
        queued_at=place.queued_at,
        urgency=new.priority,
        rank=place.queued_at - new.priority * place.aging_s,
        traceparent=new.traceparent,
        **_devices(new.spec),
    )
    session.add(row)
    totals.add(session, Total.SUBMITTED, new.kind)
    session.add(EventRow(at=now, job=row.id, kind="submitted", message=f"queued as {row.name}", data="{}"))
    if group and place.limits.get(group[0]) != group[1]:
        _join(session, row.id, *group, now=now)
        place.limits[group[0]] = group[1]
    if parents:
        session.flush()
        wait_for(session, row.id, parents, now)
        session.refresh(row)
    return row


def _devices(spec: Mapping[str, Any]) -> dict[str, int]:
    """How many workers' devices may work on the job at once, and how many of one machine it needs at once."""
    given = spec.get("run", {}).get("gpus", 1)
    if spec.get("kind") == "finetune":  # further devices are no workers of the job, but processes of its own
        return {"gpus": 1, "world_size": int(given)}
    return {"gpus": ALL_GPUS if given == "all" else int(given), "world_size": 1}


def _parents(session: Session, new: NewJob) -> list[tuple[JobRow, When]]:
    parents: dict[str, tuple[JobRow, When]] = {}
    for wanted in new.after:
        after = After(job=wanted) if isinstance(wanted, str) else wanted
        try:
            jobs = find_jobs(session, after.job)
        except NotFound as e:
            raise NotFound(f"run.after: {e}") from e
        for row in jobs:
            earlier = parents.setdefault(row.id, (row, after.when))[1]
            if earlier is not after.when:
                raise UsageError(
                    f"run.after: job {row.id} ({row.name}) is given with {earlier} and {after.when}; expected one"
                )
    return list(parents.values())


def _join(session: Session, job: str, name: str, limit: int, *, now: float) -> None:
    before = set_group(session, name, limit)
    if before is not None and before != limit:
        message = f"run.group: the limit of {name} was {before} and is {limit} now, for all of its jobs"
        record_event(session, "group", message, now=now, job=job)
