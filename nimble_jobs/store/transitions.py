"""Transitions between job states, inside a transaction. Each is one conditional update, with attempt row and event."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import ColumnElement, Table, bindparam, delete, func, insert, select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState, When
from nimble_jobs.store import totals
from nimble_jobs.store.changes import batched, run
from nimble_jobs.store.changes import changed as changed
from nimble_jobs.store.new_ticks import count_ticks
from nimble_jobs.store.notices import TOLD, EndedJob, queue_end, queue_start
from nimble_jobs.store.postgres import end_alone
from nimble_jobs.store.ranks import take_back
from nimble_jobs.store.records import dump
from nimble_jobs.store.shard_tables import ShardRow
from nimble_jobs.store.tables import AttemptRow, EventRow, JobRow, WaitRow
from nimble_jobs.store.timer_records import TickOutcome
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from nimble_jobs.store.totals import Total
from nimble_jobs.store.words import plain, words

FINAL = tuple(state.value for state in JobState if state.final)

# Statements that every job needs, built once: building one takes ten times as long as running it.
JOBS = cast(Table, JobRow.__table__)
ATTEMPTS, _WAITS = cast(Table, AttemptRow.__table__), cast(Table, WaitRow.__table__)
_EVENTS = cast(Table, EventRow.__table__)
_EVENT = insert(_EVENTS)
_ATTEMPT = insert(ATTEMPTS)
MINE = (
    JOBS.c.id == bindparam("of_job"),
    JOBS.c.attempt == bindparam("of_attempt"),
    JOBS.c.state == JobState.RUNNING.value,
)
_OWNED = select(JOBS.c.id).where(*MINE).with_for_update()
MINE_CHANGED = update(JOBS).where(*MINE)  # values are bound when it runs
ATTEMPT_CHANGED = update(ATTEMPTS).where(
    ATTEMPTS.c.job == bindparam("of_job"), ATTEMPTS.c.number == bindparam("of_attempt")
)
_SHARDS = cast(Table, ShardRow.__table__)
_SHARDS_GONE = delete(_SHARDS).where(_SHARDS.c.job == bindparam("of_job"))
_AWAITED = select(_WAITS.c.job).where(_WAITS.c.parent == bindparam("of_job")).limit(1)
_TIMERS, _TICKS = cast(Table, TimerRow.__table__), cast(Table, TickRow.__table__)
_SUCCEEDED = (
    update(_TIMERS)
    .where(_TIMERS.c.name.in_(select(_TICKS.c.timer).where(_TICKS.c.job == bindparam("of_job"))))
    .values(last_success_at=bindparam("at"))
)


def _any(column: ColumnElement[Any]) -> ColumnElement[bool]:
    return select(column).where(column == JOBS.c.id).exists()


# All that the end of an attempt depends on. Rows of other tables that name a running job are added only by transactions
# that run alone, so none can be missed.
_ENDING = (
    select(
        *(JOBS.c.started_at, JOBS.c.records_done, JOBS.c.records_counted, *TOLD),
        _any(_SHARDS.c.job).label("has_shards"),
        _any(_WAITS.c.parent).label("is_awaited"),
        _any(_TICKS.c.job).label("has_tick"),
    )
    .where(*MINE)
    .with_for_update()
)
_OWN = {
    name: bindparam(f"of_{name}", type_=_EVENTS.c[name].type)
    for name in ("at", "job", "attempt", "kind", "message", "data")
}
_PRESENT = (JOBS.c.id == _OWN["job"], JOBS.c.attempt == _OWN["attempt"])
_OWN_EVENT = (
    insert(_EVENTS)
    .from_select(list(_OWN), select(*_OWN.values()).select_from(JOBS).where(*_PRESENT).with_for_update())
    .returning(_EVENTS.c.seq)
)


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
    run(session, _EVENT, at=now, job=job, attempt=attempt, kind=kind, message=message, data=_text(data))


def record_own_event(
    session: Session,
    kind: str,
    message: str,
    *,
    now: float,
    job: str | None,
    attempt: int,
    data: dict[str, Any] | None = None,
) -> bool:
    """As `record_event`. False, and nothing is recorded, if a newer attempt of the job has begun."""
    values = {"of_at": now, "of_job": job, "of_attempt": attempt, "of_kind": kind, "of_message": message}
    return run(session, _OWN_EVENT, **values, of_data=_text(data)).first() is not None


def _text(data: dict[str, Any] | None) -> str:
    return dump(plain(data)) if data else "{}"


def start_attempt(session: Session, row: JobRow, now: float) -> None:
    """Record the attempt that a claim just began."""
    assert row.worker is not None
    seal = secrets.token_hex(16)
    run(session, _ATTEMPT, job=row.id, number=row.attempt, worker=row.worker, started_at=now, seal=seal)
    record_event(
        session, "claimed", f"attempt {row.attempt} by worker {row.worker}", now=now, job=row.id, attempt=row.attempt
    )
    queue_start(session, row, now)


def held(session: Session, job_id: str, attempt: int) -> JobRow | None:
    """The job's row, locked until the transaction ends, if this attempt still runs it."""
    query = select(JobRow).where(JobRow.id == job_id, JobRow.attempt == attempt, JobRow.state == JobState.RUNNING.value)
    return session.scalar(query.with_for_update())


def owns(session: Session, job_id: str, attempt: int) -> bool:
    """As `held`, without the row."""
    return run(session, _OWNED, of_job=job_id, of_attempt=attempt).first() is not None


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ends."""

    to: JobState  # what becomes of the job
    message: str  # of the event
    error: str | None = None
    outcome: str | None = None  # of the attempt; None: named as the event
    replays: int = 0  # how many replays the attempt made
    empty: bool = False  # it succeeded because there was nothing to do

    @property
    def event(self) -> str:
        """The event's kind."""
        return "requeued" if self.to is JobState.QUEUED else self.to.value

    @property
    def attempt_outcome(self) -> str:
        """The outcome of the attempt."""
        return self.outcome or self.event


def leave_running(session: Session, job_id: str, attempt: int, end: End, *, now: float, **values: Any) -> bool:
    """End an attempt; `values` are other columns of its job. False, and nothing is written, when another attempt owns
    the job or it has ended.
    """
    if end.to.final:
        values |= {"finished_at": now}
    mine = {"of_job": job_id, "of_attempt": attempt}
    job = run(session, _ENDING, **mine).one_or_none()
    if job is None:
        return False
    counted = _count(session, job, end, now)
    values |= {"state": end.to.value, "phase": None, "error": end.error, "records_counted": counted}
    if run(session, MINE_CHANGED, **mine, **values).rowcount != 1:
        return False
    run(session, ATTEMPT_CHANGED, **mine, finished_at=now, outcome=end.attempt_outcome, error=end.error)
    if end.to.final and job.has_shards:
        run(session, _SHARDS_GONE, of_job=job_id)
    record_event(session, end.event, end.message, now=now, job=job_id, attempt=attempt)
    error = None if end.error is None else words(end.error)
    queue_end(session, EndedJob.of(job, error=error, outputs=values.get("outputs", job.outputs)), end.to, now)
    if job.is_awaited:
        settle(session, job_id, end.to, now)
    if end.to is JobState.SUCCEEDED and job.has_tick:
        _tell_timer(session, job_id, empty=end.empty, now=now)
    return True


def _count(session: Session, job: Any, end: End, now: float) -> int:
    """Add what an attempt did to the totals. Returns how many of its job's records they include now."""
    done, counted = job.records_done, job.records_counted
    seconds = 0.0 if job.started_at is None else now - job.started_at
    totals.add(session, Total.ATTEMPT, job.kind, end.attempt_outcome, seconds=seconds)
    totals.add(session, Total.RECORDS, job.kind, count=done - counted)
    totals.add(session, Total.REPLAYS, job.kind, count=end.replays)
    if end.to.final:
        totals.add(session, Total.ENDED, job.kind, end.to.value)
    return int(max(done, counted))


def _tell_timer(session: Session, job_id: str, *, empty: bool, now: float) -> None:
    """Record the success of a timer's job with the timer, and with its tick if there was nothing to do."""
    if run(session, _SUCCEEDED, of_job=job_id, at=now).rowcount and empty:
        tick = update(TickRow).where(TickRow.job == job_id)
        count = changed(session, tick.values(outcome=TickOutcome.EMPTY.value, reason="no new files"))
        count_ticks(session, TickOutcome.EMPTY, count)


def leave_queued(
    session: Session, job_id: str, *, to: JobState, error: str | None, event: str, message: str, now: float
) -> bool:
    """End a queued job. False if it is not queued."""
    if not _end_queued(session, job_id, to=to, error=error, event=event, message=message, now=now):
        return False
    settle(session, job_id, to, now)
    return True


def cancel(
    session: Session, job_id: str, *, message: str = "cancelled", asked: str = "asked to stop", now: float
) -> None:
    """Cancel a queued job, or ask a running one to stop. Nothing changes if it has ended or was asked before."""
    if leave_queued(session, job_id, to=JobState.CANCELLED, error=None, event="cancelled", message=message, now=now):
        return
    running = update(JobRow).where(
        JobRow.id == job_id, JobRow.state == JobState.RUNNING.value, JobRow.cancel_requested.is_(False)
    )
    if changed(session, running.values(cancel_requested=True)) == 1:
        record_event(session, "cancel", asked, now=now, job=job_id)


def _end_queued(
    session: Session,
    job_id: str,
    *,
    to: JobState,
    error: str | None,
    event: str,
    message: str,
    now: float,
    skipped_by: str | None = None,
) -> bool:
    statement = (
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.state == JobState.QUEUED.value)
        .values(state=to.value, error=error, finished_at=now, held=False, blockers=0, skipped_by=skipped_by)
        .returning(JobRow.urgency, *TOLD)
    )
    ended = session.execute(statement, execution_options={"synchronize_session": False}).one_or_none()
    if ended is None:
        return False
    run(session, _SHARDS_GONE, of_job=job_id)
    totals.add(session, Total.ENDED, ended.kind, to.value)
    record_event(session, event, message, now=now, job=job_id)
    queue_end(session, EndedJob.of(ended, error=ended.error, outputs=ended.outputs), to, now)
    parents = list(session.scalars(select(WaitRow.parent).where(WaitRow.job == job_id)))
    if parents:
        changed(session, delete(WaitRow).where(WaitRow.job == job_id))
        take_back(session, parents, ended.urgency)
    return True


def settle(session: Session, job_id: str, state: JobState, now: float) -> list[str]:
    """After a job reached this state, free jobs whose wait is over, and cancel jobs whose wait can never end.

    A cancelled job has ended too, so this repeats for the jobs that wait for it. Returns the ids of cancelled jobs.
    """
    skipped: list[str] = []
    ended = [(job_id, state)] if state.final else []
    if ended and run(session, _AWAITED, of_job=job_id).first() is not None:
        end_alone(session)
    while ended:
        parent, end = ended.pop()
        if run(session, _AWAITED, of_job=parent).first() is None:
            continue
        _free(session, parent, [when.value for when in When if when.met_by(end)])
        for job, when, name in session.execute(
            select(WaitRow.job, WaitRow.when, JobRow.name)
            .join(JobRow, JobRow.id == WaitRow.parent)
            .where(WaitRow.parent == parent)
            .order_by(WaitRow.job)
        ).all():
            reason = f"run.after: job {parent} ({name}) ended {end}; this job waits for {_WANTED[When(when)]}"
            if _end_queued(
                session,
                job,
                to=JobState.CANCELLED,
                error=reason,
                event="skipped",
                message=reason,
                now=now,
                skipped_by=parent,
            ):
                skipped.append(job)
                ended.append((job, JobState.CANCELLED))
            else:  # only queued jobs wait
                changed(session, delete(WaitRow).where(WaitRow.job == job, WaitRow.parent == parent))
    return skipped


_WANTED = {When.SUCCESS: "its success", When.FAILURE: "its failure", When.DONE: "its end"}


def _free(session: Session, parent: str, ends: list[str]) -> None:
    over = (WaitRow.parent == parent, WaitRow.when.in_(ends))
    # The rows go first: whoever deletes one, and nobody else, counts it off.
    gone = delete(WaitRow).where(*over).returning(WaitRow.job)
    freed = list(session.scalars(gone, execution_options={"synchronize_session": False}))
    for some in batched(freed):
        changed(session, update(JobRow).where(JobRow.id.in_(some)).values(blockers=JobRow.blockers - 1))


def settle_missed(session: Session, now: float) -> list[str]:
    """Settle ended jobs whose waiting jobs were missed. Returns the ids of cancelled jobs."""
    ended = select(JobRow.id, JobRow.state).join(WaitRow, WaitRow.parent == JobRow.id).where(JobRow.state.in_(FINAL))
    skipped = []
    for job, state in session.execute(ended.distinct().order_by(JobRow.id)).all():
        skipped += settle(session, job, JobState(state), now)
    return skipped


def count_attempts(session: Session, row: JobRow, *outcomes: str) -> int:
    """How many attempts of a job have this outcome since it was queued or retried."""
    query = select(func.count()).where(
        AttemptRow.job == row.id, AttemptRow.outcome.in_(outcomes), AttemptRow.number > row.attempts_before
    )
    return int(session.scalar(query) or 0)
