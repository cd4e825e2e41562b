"""Reading jobs, attempts and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, cast

from sqlalchemy import Table, and_, bindparam, false, func, or_, select
from sqlalchemy.orm import Session, defer

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.job import Attempt, Event, Job, JobState
from nimble_jobs.store.changes import batched, run
from nimble_jobs.store.groups import fullness
from nimble_jobs.store.ids import LENGTH, MIN_PREFIX, is_prefix, is_start
from nimble_jobs.store.listed import AT_ONCE, Match, Wanted, count_of, ids_of, jobs_of, numbers_of
from nimble_jobs.store.pages import JobPages
from nimble_jobs.store.ranks import aging_s
from nimble_jobs.store.records import attempt_record, event_record, job_record
from nimble_jobs.store.tables import AttemptRow, EventRow, JobRow, WaitRow

Sort = Literal["created", "started", "finished", "name", "state", "priority", "records"]

_COLUMNS = {
    "created": JobRow.seq,
    "started": JobRow.started_at,
    "finished": JobRow.finished_at,
    "name": JobRow.name,
    "state": JobRow.state,
    "priority": JobRow.priority,
    "records": JobRow.records_done,
}
JOBS = cast(Table, JobRow.__table__)
_JOB = select(JOBS).where(JOBS.c.id == bindparam("of_job"))
_LISTED = 5  # how many candidates an error names


def find_job(session: Session, reference: str) -> JobRow:
    """A job by id, by name (the newest of that name), or by a prefix of at least 4 characters.

    Raises NotFound, and UsageError for a prefix of several jobs.
    """
    row = session.scalar(select(JobRow).where(JobRow.id == reference))
    if row is None:
        row = session.scalar(select(JobRow).where(JobRow.name == reference).order_by(JobRow.seq.desc()).limit(1))
    if row is not None:
        return row
    if is_prefix(prefix := reference.lower()):
        first, last = prefix.ljust(LENGTH, "0"), prefix.ljust(LENGTH, "z")
        several = select(JobRow).where(JobRow.id.between(first, last)).order_by(JobRow.seq).limit(_LISTED + 1)
        rows = session.scalars(several).all()
        if len(rows) == 1:
            return rows[0]
        if rows:
            ids = ", ".join(row.id for row in rows[:_LISTED]) + (", ..." if len(rows) > _LISTED else "")
            raise UsageError(f"job {reference}: several ids begin with this: {ids}; type more characters")
    short = is_start(prefix)
    hint = f"; a shortened id needs at least {MIN_PREFIX} characters" if short else ""
    raise NotFound(f"job {reference}: no such id or name{hint}; list jobs with: nimble-jobs ls")


def find_jobs(session: Session, reference: str) -> list[JobRow]:
    """The jobs of an array, in the order of submission, by its id or a prefix of it; else the job of `find_job`.

    Raises NotFound and UsageError, as `find_job` does.
    """
    members = select(JobRow).order_by(JobRow.seq)
    if rows := session.scalars(members.where(JobRow.array == reference)).all():
        return list(rows)
    try:
        return [find_job(session, reference)]
    except NotFound:
        prefix = reference.lower()
        if is_prefix(prefix):
            first, last = prefix.ljust(LENGTH, "0"), prefix.ljust(LENGTH, "z")
            arrays = select(JobRow.array).where(JobRow.array.between(first, last)).distinct().limit(2)
            matching = session.scalars(arrays).all()
            if len(matching) == 1:
                return list(session.scalars(members.where(JobRow.array == matching[0])))
        raise


class JobQueries(JobPages):
    """Queries about jobs, which change nothing."""

    def get(self, reference: str) -> Job:
        """A job by id, name (the newest), or prefix of at least 4 characters. Raises NotFound, UsageError."""

        def work(session: Session) -> Job:
            row = run(session, _JOB, of_job=reference).one_or_none()  # mostly it is an id
            return job_record(find_job(session, reference) if row is None else cast(JobRow, row))

        return self._db.read(work)

    def chosen(self, references: Sequence[str]) -> list[Job]:
        """The jobs named by ids, names, and ids of arrays, each once. Raises NotFound, UsageError."""

        def work(session: Session) -> list[Job]:
            rows = {row.id: row for reference in references for row in find_jobs(session, reference)}
            return [job_record(row) for row in rows.values()]

        return self._db.read(work)

    def array_of(self, reference: str) -> str:
        """The id of an array by its id or a prefix of it. Raises NotFound, UsageError."""

        def work(session: Session) -> str:
            for row in find_jobs(session, reference):
                if row.array is not None and row.array.startswith(reference.lower()):
                    return row.array
            raise NotFound(f"array {reference}: no such array; expected an id that submit --from or --grid printed")

        return self._db.read(work)

    def group_limits(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """For each of these groups, how many of its jobs run now, and how many may."""
        return self._db.read(lambda session: fullness(session, list(names)))

    def aging_s(self) -> float:
        """Seconds of waiting that equal one step of priority."""
        return self._db.read(aging_s)

    def attempts(self, job_id: str) -> tuple[Attempt, ...]:
        """The attempts of a job, oldest first."""
        query = select(AttemptRow).where(AttemptRow.job == job_id).order_by(AttemptRow.number)
        return self._db.read(lambda session: tuple(attempt_record(row) for row in session.scalars(query)))

    def events(self, job_id: str | None = None, since: int = 0, limit: int | None = None) -> tuple[Event, ...]:
        """Events with a number above `since`, oldest first, at most `limit`; of one job, or of everything."""
        query = select(EventRow).where(EventRow.seq > since).order_by(EventRow.seq).limit(limit)
        if job_id is not None:
            query = query.where(EventRow.job == job_id)
        return self._db.read(lambda session: tuple(event_record(row) for row in session.scalars(query)))

    def messages(self, kind: str, job_ids: Sequence[str]) -> list[str]:
        """Messages of events of a kind about these jobs, each once, oldest first."""

        def work(session: Session) -> list[str]:
            texts: dict[str, None] = {}
            for some in batched(list(job_ids)):
                query = select(EventRow.message).where(EventRow.job.in_(some), EventRow.kind == kind)
                texts |= dict.fromkeys(session.scalars(query.order_by(EventRow.seq)))
            return list(texts)

        return self._db.read(work)

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        numbers = dict(self._db.read(lambda session: [(state, n) for state, n in session.execute(query)]))
        return {state: numbers.get(state.value, 0) for state in JobState}

    def records_done(self) -> int:
        """The number of records that all jobs together have done."""
        query = select(func.coalesce(func.sum(JobRow.records_done), 0))
        return self._db.read(lambda session: int(session.scalar(query) or 0))

    def listed(self, wanted: Wanted, *, keep: Callable[[Job], bool] | None = None) -> list[Job]:
        """The jobs, without their specs, that match `wanted` and pass `keep`.

        More than 500 are read in several transactions, because a long one would keep others from writing.
        """
        asked = wanted if keep is None else replace(wanted, limit=None)

        def first(session: Session) -> tuple[list[int], list[Job]]:
            numbers = numbers_of(session, asked)
            return numbers, jobs_of(session, numbers[:AT_ONCE])

        numbers, page = self._db.read(first)
        jobs: list[Job] = []
        for end in range(AT_ONCE, len(numbers) + AT_ONCE, AT_ONCE):
            jobs += page if keep is None else filter(keep, page)
            if wanted.limit is not None and len(jobs) >= wanted.limit:
                break
            if some := numbers[end : end + AT_ONCE]:
                page = self._db.read(partial(jobs_of, numbers=some))
        return jobs[: wanted.limit]

    def ids(self, wanted: Wanted) -> list[str]:
        """The ids of the jobs that are wanted."""
        return self._db.read(partial(ids_of, wanted=wanted))

    def count(self, matches: Sequence[Match], now: float) -> int:
        """How many jobs pass every match."""
        return self._db.read(lambda session: count_of(session, matches, now))

    def running(self) -> list[Job]:
        """The jobs that run now, without their specs, the newest first."""
        match = Match(column="state", compare="=", value=JobState.RUNNING.value)
        return self.listed(Wanted(matches=[match], now=0.0))

    def awaited(self, job_ids: Sequence[str]) -> dict[str, list[Job]]:
        """For each of these jobs, the jobs that it waits for, without their specs."""
        query = select(WaitRow.job, JobRow).join(JobRow, JobRow.id == WaitRow.parent).order_by(JobRow.seq)
        query = query.options(defer(JobRow.spec, raiseload=True))

        def work(session: Session) -> dict[str, list[Job]]:
            parents: dict[str, list[Job]] = {}
            for some in batched(job_ids):
                for job, parent in session.execute(query.where(WaitRow.job.in_(some))):
                    parents.setdefault(job, []).append(job_record(parent, spec=False))
            return parents

        return self._db.read(work)

    def of(self, *, ids: Iterable[str] = (), trainings: Iterable[str] = ()) -> list[Job]:
        """The jobs with these ids, and the fine-tunings whose output is one of `trainings`."""
        wanted, outputs = sorted(ids), sorted(trainings)

        def work(session: Session) -> list[Job]:
            jobs: dict[str, Job] = {}
            for column, values in ((JobRow.id, wanted), (JobRow.output, outputs)):
                for some in batched(values):
                    query = select(JobRow).where(column.in_(some))
                    if column is JobRow.output:
                        query = query.where(JobRow.kind == "finetune")
                    jobs.update((row.id, job_record(row)) for row in session.scalars(query))
            return list(jobs.values())

        return self._db.read(work)

    def retries_due(self, now: float) -> bool:
        """Whether a failed job of a worker waits for its next attempt."""
        query = select(JobRow.id).where(
            JobRow.state == JobState.QUEUED.value,
            JobRow.foreground == false(),
            JobRow.attempt > 0,
            JobRow.not_before > now,
        )
        return self._db.read(lambda session: session.scalar(query.limit(1)) is not None)

    def ahead_of(self, job: Job, now: float) -> int:
        """How many queued jobs that may run now come before this one, on any device."""
        mine = select(JobRow.rank, JobRow.seq).where(JobRow.id == job.id).subquery()
        query = select(func.count()).where(
            JobRow.state == JobState.QUEUED.value,
            JobRow.foreground == false(),
            JobRow.not_before <= now,
            JobRow.held == false(),
            JobRow.blockers == 0,
            or_(JobRow.rank < mine.c.rank, and_(JobRow.rank == mine.c.rank, JobRow.seq < mine.c.seq)),
        )
        return self._db.read(lambda session: int(session.scalar(query) or 0))

    def list(
        self,
        states: Iterable[JobState] | None = None,
        name: str | None = None,
        limit: int | None = None,
        sort: Sort = "created",
        descending: bool = True,
    ) -> list[Job]:
        """Jobs in the given states, or in any; newest first by default."""
        column = _COLUMNS[sort]
        query = select(JobRow).order_by(column.desc() if descending else column.asc(), JobRow.seq.desc())
        if states is not None:
            query = query.where(JobRow.state.in_([JobState(state).value for state in states]))
        if name is not None:
            query = query.where(JobRow.name == name)
        query = query.limit(limit)
        return self._db.read(lambda session: [job_record(row) for row in session.scalars(query)])


def fitting(
    session: Session, references: Sequence[str], reason: Callable[[JobRow], str | None]
) -> tuple[dict[str, JobRow], list[str]]:
    """The jobs without a `reason` against them, by id, and a line for each job of a reference that has no such job.

    Raises NotFound.
    """
    chosen: dict[str, JobRow] = {}
    refused: list[str] = []
    for reference in references:
        candidates = [(row, reason(row)) for row in find_jobs(session, reference)]
        fit = {row.id: row for row, why in candidates if why is None}
        chosen |= fit
        if not fit:
            refused += [f"job {row.id} ({row.name}): {why}" for row, why in candidates]
    return chosen, refused
