"""A worker's operations on jobs: claim one, report, end the attempt. Every write is fenced by the attempt number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, Unpack, cast

from sqlalchemy import ColumnElement, Select, bindparam, case, false, select, true, union_all, update
from sqlalchemy.orm import Session, aliased
from sqlalchemy.sql.dml import ReturningUpdate

from nimble_jobs.job import BadKind, Job, JobState, Publication
from nimble_jobs.seen import Scored
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store.changes import run
from nimble_jobs.store.groups import has_room, lock_groups, running
from nimble_jobs.store.publications import record_publication
from nimble_jobs.store.queries import JobQueries
from nimble_jobs.store.records import (
    dump,
    dump_kinds,
    job_record,
    load_object,
    schedule_columns,
    sha256,
    timings_columns,
)
from nimble_jobs.store.retries import delay_s
from nimble_jobs.store.seen import mark
from nimble_jobs.store.tables import GroupRow, JobRow
from nimble_jobs.store.transitions import (
    ATTEMPT_CHANGED,
    JOBS,
    MINE,
    MINE_CHANGED,
    End,
    count_attempts,
    held,
    leave_running,
    record_event,
    start_attempt,
)


class Progress(TypedDict):
    """An attempt's progress. Fields that are None keep their stored values."""

    done: int  # records
    total: int | None
    bad: int
    phase: NotRequired[str | None]
    schedule: NotRequired[Mapping[str, Any] | None]
    timings: NotRequired[Mapping[str, Any] | None]
    bad_kinds: NotRequired[Sequence[BadKind] | None]


class JobClaims(JobQueries):
    """The worker's side of the job table."""

    def claim(self, worker: str, *, device: str, most_ranks: int = 1, now: float, expected: bool = False) -> Job | None:
        """Take the job with the lowest rank that may run now on `device`, or None. `expected`: there probably is one.

        A training on more devices than `most_ranks` is left to workers of larger machines. One on several devices of
        any kind is left to workers on GPUs. The returned job holds the new attempt number, which every later write of
        this attempt must give.
        """
        devices = sorted({"auto", device, device.partition(":")[0]})
        of_any = 1 if device == "cpu" else most_ranks
        given = {"for_devices": devices, "for_ranks": most_ranks, "for_ranks_of_any": of_any, "until": now}
        if not expected and self._db.read_one(lambda connection: connection.execute(_LOOK, given).first()) is None:
            return None  # read first, so that an idle worker does not take the write lock

        def work(session: Session) -> Job | None:
            lock_groups(session)
            return _take(session, worker, now, _TAKE_NEXT, given)

        return self._db.write(work, beside=True)

    def claim_foreground(self, job_id: str, worker: str, now: float) -> Job | None:
        """Take the job of a `run` command, even before its `not_before`. None if it is not queued or must wait."""

        def work(session: Session) -> Job | None:
            lock_groups(session)
            return _take(session, worker, now, _TAKE_OWN, {"of_job": job_id})

        return self._db.write(work, beside=True)

    def progress(self, job_id: str, attempt: int, **progress: Unpack[Progress]) -> bool:
        """Write the attempt's progress. False if another attempt owns the job or it has ended."""
        return self._db.write(_reporting(job_id, attempt, progress), beside=True)

    def progress_soon(self, job_id: str, attempt: int, **progress: Unpack[Progress]) -> None:
        """As `progress`, but with the next transaction, and without telling whether the attempt still owns the job."""
        self._db.write_soon(_reporting(job_id, attempt, progress), beside=True)

    def cancel_wanted(self, job_id: str, attempt: int) -> bool:
        """Whether this attempt should stop, because the job is cancelled or the attempt no longer owns it."""
        mine = {"of_job": job_id, "of_attempt": attempt}
        wanted = self._db.read_one(lambda connection: connection.execute(_CANCELLED, mine).scalar())
        return wanted is None or wanted

    def finish(
        self,
        job_id: str,
        attempt: int,
        *,
        outputs: Mapping[str, Any],
        timings: Mapping[str, Any],
        schedule: Mapping[str, Any],
        now: float,
        publication: Publication | None = None,
        scored: Scored | None = None,
        empty: bool = False,
    ) -> bool:
        """The attempt succeeded. False, and nothing is written, if it no longer owns the job.

        `publication`: the output. `scored`: the files that become seen. `empty`: there was nothing new, which the job's
        tick records too.
        """

        def work(session: Session) -> bool:
            message = f"attempt {attempt} succeeded" + (": no new files" if empty else "")
            replays = int(timings.get("replays") or 0)
            owned = leave_running(
                session,
                job_id,
                attempt,
                End(to=JobState.SUCCEEDED, message=message, replays=replays, empty=empty),
                now=now,
                outputs=dump(outputs),
                **timings_columns(timings),
                **schedule_columns(schedule),
            )
            if owned and publication is not None:
                record_publication(session, publication, now=now)
            if owned and scored is not None:
                _mark(session, job_id, attempt, scored, now)
            return owned

        return self._db.write(work, beside=True)

    def fail(
        self,
        job_id: str,
        attempt: int,
        *,
        error: str,
        retry: bool,
        lost: bool = False,
        stalled: bool = False,
        now: float,
    ) -> JobState | None:
        """The attempt failed (`retry`: another may succeed), its process died (`lost`) or made no progress (`stalled`).

        Queued again with a delay while attempts are left; then quarantined when each of them killed its worker, else
        failed. Returns the new state, None when the attempt does not own the job any more.
        """

        def work(session: Session) -> JobState | None:
            row = held(session, job_id, attempt)
            if row is None:
                return None
            to, reason, wait_s = _verdict(session, row, error=error, retry=retry, lost=lost)
            again: dict[str, Any] = {}
            if to == JobState.QUEUED:
                again = {"worker": row.worker if row.foreground else None, "not_before": now + wait_s}
            message = f"{reason}; next attempt in {format_duration(wait_s)}" if to == JobState.QUEUED else reason
            outcome = "lost" if lost else "stalled" if stalled else "failed"
            end = End(to=to, message=message, error=reason, outcome=outcome)
            return to if leave_running(session, job_id, attempt, end, now=now, **again) else None

        return self._db.write(work, beside=True)

    def requeue(self, job_id: str, attempt: int, *, reason: str, now: float) -> bool:
        """Queue the job again because its worker stops, without counting a failure. A cancelled job ends instead."""

        def work(session: Session) -> bool:
            row = held(session, job_id, attempt)
            if row is None:
                return False
            if row.cancel_requested:
                return _cancelled(session, job_id, attempt, now)
            end = End(to=JobState.QUEUED, message=reason)
            worker = row.worker if row.foreground else None
            return leave_running(session, job_id, attempt, end, now=now, worker=worker)

        return self._db.write(work, beside=True)

    def cancelled(self, job_id: str, attempt: int, now: float) -> bool:
        """The attempt stopped because its job was cancelled."""
        return self._db.write(lambda session: _cancelled(session, job_id, attempt, now), beside=True)


def progress_columns(progress: Progress) -> dict[str, Any]:
    """The columns of a job that change."""
    values: dict[str, Any] = {
        "records_done": progress["done"],
        "records_total": progress["total"],
        "records_bad": progress["bad"],
    }
    if (phase := progress.get("phase")) is not None:
        values["phase"] = phase
    if (schedule := progress.get("schedule")) is not None:
        values |= schedule_columns(schedule)
    if (timings := progress.get("timings")) is not None:
        values |= timings_columns(timings)
    return values


def _reporting(job_id: str, attempt: int, progress: Progress) -> Callable[[Session], bool]:
    """Writes the progress. False if another attempt owns the job or it has ended."""
    values = progress_columns(progress)
    kinds = None if progress.get("bad_kinds") is None else dump_kinds(progress["bad_kinds"] or ())

    def work(session: Session) -> bool:
        mine = {"of_job": job_id, "of_attempt": attempt}
        owned = run(session, MINE_CHANGED, **mine, **values).rowcount == 1
        if owned and kinds is not None:
            run(session, ATTEMPT_CHANGED, **mine, bad_kinds=kinds)
        return owned

    return work


def _mark(session: Session, job_id: str, attempt: int, scored: Scored, now: float) -> None:
    name = session.execute(select(JobRow.name).where(JobRow.id == job_id)).scalar_one()
    overlap = mark(session, name, job_id, scored, now)
    if overlap:
        files = "file was" if overlap == 1 else "files were"
        text = f"{overlap:,} {files} also scored by another job of this name, which ran at the same time"
        record_event(session, "overlap", text, now=now, job=job_id, attempt=attempt)


def _next_job(*, lock: bool) -> Select[Any]:
    """The first job that may run, among the jobs without a group and the first job of each group with room.

    Each of them is the first row that fits in `ix_jobs_claim`. `for_devices`, `for_ranks`, `for_ranks_of_any` and
    `until` (Unix seconds) come later. With `lock`, PostgreSQL locks these rows and passes over those that another claim
    has locked.
    """
    job = aliased(JobRow)
    first = (
        select(job.id)
        .where(
            job.state == JobState.QUEUED.value,
            job.foreground == false(),
            job.held == false(),
            job.blockers == 0,
            job.not_before <= bindparam("until"),
            job.device.in_(bindparam("for_devices", expanding=True)),
            job.world_size <= case((job.device == "auto", bindparam("for_ranks_of_any")), else_=bindparam("for_ranks")),
        )
        .order_by(job.rank, job.seq)
        .limit(1)
    )
    first = first.with_for_update(skip_locked=True, of=job) if lock else first
    of_none = first.where(job.group_name.is_(None)).scalar_subquery()
    of_group = first.where(job.group_name == GroupRow.name).correlate(GroupRow).scalar_subquery()
    of_groups = select(of_group).where(running(GroupRow.name) < GroupRow.most)
    firsts = union_all(select(of_none), of_groups)  # with OR in its place, PostgreSQL reads all jobs
    return select(JobRow.id).where(JobRow.id.in_(firsts)).order_by(JobRow.rank, JobRow.seq).limit(1)


def _taking(*which: ColumnElement[bool]) -> ReturningUpdate[Any]:
    """Move one queued job to running, of `by_worker` at `at`."""
    return (
        update(JOBS)
        .where(*which, JOBS.c.state == JobState.QUEUED.value)
        .values(
            state=JobState.RUNNING.value,
            attempt=JOBS.c.attempt + 1,
            worker=bindparam("by_worker", type_=JOBS.c.worker.type),
            started_at=bindparam("at"),
            finished_at=None,
            error=None,
        )
        .returning(*JOBS.c)
    )


# Built once, as in `transitions`.
_LOOK = _next_job(lock=False)
_TAKE_NEXT = _taking(JOBS.c.id == _next_job(lock=True).scalar_subquery())
_TAKE_OWN = _taking(JOBS.c.id == bindparam("of_job"), JOBS.c.foreground == true(), JOBS.c.blockers == 0, has_room())
_CANCELLED = select(JOBS.c.cancel_requested).where(*MINE)


def _take(
    session: Session, worker: str, now: float, statement: ReturningUpdate[Any], which: Mapping[str, Any]
) -> Job | None:
    """Move one queued job to running. If its stored spec is damaged, the job fails, and the next one is tried."""
    while True:
        row = cast(JobRow | None, run(session, statement, by_worker=worker, at=now, **which).one_or_none())
        if row is None:
            return None
        start_attempt(session, row, now)
        if sha256(row.spec) == row.spec_digest:
            return job_record(row)
        reason = "the stored spec is damaged; submit it again"
        end = End(to=JobState.FAILED, message=reason, error=reason)
        leave_running(session, row.id, row.attempt, end, now=now)


def _cancelled(session: Session, job_id: str, attempt: int, now: float) -> bool:
    end = End(to=JobState.CANCELLED, message=f"attempt {attempt} stopped")
    return leave_running(session, job_id, attempt, end, now=now)


def _verdict(session: Session, row: JobRow, *, error: str, retry: bool, lost: bool) -> tuple[JobState, str, float]:
    """The job's state after a failed attempt, the reason, and the seconds until the next attempt."""
    deaths = count_attempts(session, row, "lost") + lost
    tries = count_attempts(session, row, "lost", "failed", "stalled") + 1
    if (retry or lost) and tries < row.max_attempts and not (lost and row.foreground):
        if row.cancel_requested:
            return JobState.CANCELLED, error, 0.0
        return JobState.QUEUED, error, delay_s(row.id, load_object(row.spec), tries)
    if lost and deaths >= row.max_attempts and not row.foreground:
        return (
            JobState.QUARANTINED,
            f"the worker died {deaths} times while it ran this job; the last error: {error}",
            0.0,
        )
    if tries > 1:
        error = f"{error} (attempt {tries} of {row.max_attempts})"
    return JobState.FAILED, error, 0.0
