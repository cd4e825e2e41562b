"""Ticks that become jobs. Each step is one transaction: the tick's row, its job, and the timer's next tick.

If two processes fire the same tick, the second one sees that the timer has moved on, and changes nothing. So any number
of processes may fire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.job import JobState
from nimble_jobs.plural import plural
from nimble_jobs.store.database import Database
from nimble_jobs.store.missed import queue_missed
from nimble_jobs.store.new_job import NewJob, insert_job, write_new
from nimble_jobs.store.new_ticks import count_ticks, insert_ticks
from nimble_jobs.store.open_jobs import Standing, standing
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.timer_records import (
    Due,
    OpenJob,
    Tick,
    TickKind,
    TickOutcome,
    Timer,
    TimerState,
    utc,
)
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from nimble_jobs.store.transitions import cancel, changed, record_event

GAP_S = 86400.0  # how long after an absence a clock may be corrected


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan for a tick, made before its timer's open jobs are known."""

    due: int
    kind: TickKind
    job: NewJob | None = None  # the job to submit
    outcome: TickOutcome | None = None  # missed or error, if decided already
    reason: str | None = None
    until: int | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An overlap policy's decision about a tick."""

    outcome: TickOutcome  # submitted, waiting or skipped
    reason: str | None = None
    cancel: tuple[str, ...] = ()  # jobs to cancel for it
    drop: tuple[int, ...] = ()  # waiting ticks that it replaces


Policy = Callable[[Planned, Standing], Turn]


class Firing:
    """The part of the timer table that serves firing."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def taken(self, timer: Timer) -> set[int]:
        """Ticks from `next_due` on that have rows already, because a clock was set back or they were requested."""
        query = select(TickRow.due).where(TickRow.timer == timer.name, TickRow.due >= timer.next_due)
        return self._db.read(lambda session: set(session.scalars(query)))

    def standing(self, name: str) -> Standing:
        """The timer's open jobs and waiting ticks."""
        return self._db.read(lambda session: standing(session, name))

    def fire(
        self,
        timer: Timer,
        planned: Sequence[Planned],
        then: Due | None,
        policy: Policy,
        now: float,
        *,
        absent: bool = False,
    ) -> list[Tick] | None:
        """Record the outcome of a timer's next ticks, submit their jobs, and move on to `then`.

        `absent`: the ticks are late, because no process ran or the clock was set forward; `rewind` may undo this later.
        None, and nothing is written, if another process fired or changed the timer since it was read.
        """

        def work(session: Session) -> list[Tick] | None:
            row = _unchanged(session, timer)
            if row is None:
                return None
            first, last = _span(planned)
            between = select(TickRow.due).where(TickRow.timer == timer.name, TickRow.due.between(first, last))
            if planned and set(session.scalars(between)) & {each.due for each in planned}:
                return None  # a tick was requested meanwhile, so the taken ones are read again
            ticks, now_there = [], standing(session, timer.name)
            for each in planned:
                tick, now_there = _become(session, timer.name, each, now_there, policy, now)
                ticks.append(tick)
            if ticks:
                insert_ticks(session, ticks)
                queue_missed(session, timer, ticks, now)
            if absent and (row.gap_at is None or not row.gap_at <= now <= row.gap_at + GAP_S):
                row.gap_from, row.gap_at = row.moved_at, now
            row.moved_at = now
            row.next_due, row.next_at = (then.tick, then.at) if then else (None, None)
            session.flush()
            return ticks

        return write_new(self._db, work)

    def release(
        self, timer: Timer, tick: Tick, planned: Planned, may: Callable[[Standing], bool], now: float
    ) -> Tick | None:
        """Submit the job of a waiting tick, or record why not.

        None, and nothing is written, if it no longer waits, the timer has changed, or `may` says that it must wait.
        """

        def work(session: Session) -> Tick | None:
            row = session.scalar(select(TimerRow).where(TimerRow.name == timer.name).with_for_update())
            if row is None or row.digest != timer.digest:
                return None
            mine = select(TickRow).where(TickRow.timer == timer.name, TickRow.due == tick.due)
            found = session.scalar(mine)
            if found is None or found.outcome != TickOutcome.WAITING.value:
                return None
            if planned.job is not None and not may(standing(session, timer.name)):
                return None
            done = _settled(session, timer.name, planned, now)
            done = replace(done, kind=tick.kind, max_running=tick.max_running, reason=done.reason or found.reason)
            found.outcome, found.job, found.reason, found.at = done.outcome.value, done.job, done.reason, now
            session.flush()
            count_ticks(session, done.outcome)
            queue_missed(session, timer, [done], now)
            return done

        return write_new(self._db, work)

    def rewind(self, timer: Timer, then: Due | None, cuts: Mapping[int, tuple[int, int]], now: float) -> bool:
        """The clock was set back into the last absence: make ticks after `now` that had no job due again.

        Ticks from before that absence are never changed. `cuts`: for each row of several ticks that ends after `now`,
        by its first tick, its new last tick and count. False, and nothing is written, if the timer has changed since it
        was read.
        """
        nobody_ran = [outcome.value for outcome in (TickOutcome.MISSED, TickOutcome.SKIPPED, TickOutcome.ERROR)]

        def work(session: Session) -> bool:
            row = _unchanged(session, timer)
            if row is None or row.gap_from is None or row.gap_from > now or now > row.moved_at:
                return False
            ahead = delete(TickRow).where(
                TickRow.timer == timer.name,
                TickRow.due > now,
                TickRow.at >= row.gap_at,
                TickRow.outcome.in_(nobody_ran),
            )
            gone = changed(session, ahead)
            for due, (until, count) in cuts.items():
                count -= _between(session, timer.name, due + 1, until)  # these have their own rows
                mine = update(TickRow).where(TickRow.timer == timer.name, TickRow.due == due)
                changed(session, mine.values(until=until, count=count))
            back_s = row.moved_at - now
            row.moved_at = now
            row.next_due, row.next_at = (then.tick, then.at) if then else (None, None)
            session.flush()
            ticks = f"{gone:,} {plural(gone, 'tick')} {plural(gone, 'is')} due again"
            message = f"{timer.name}: the clock was set back by {back_s:.0f} s; {ticks}"
            record_event(session, "timer", message, now=now, data={"timer": timer.name})
            return True

        return write_new(self._db, work)

    def crossing(self, timer: Timer, at: float) -> list[tuple[int, int, int]]:
        """Rows of several ticks that begin before a time and end after it: first and last tick, count."""
        query = select(TickRow.due, TickRow.until, TickRow.count).where(
            TickRow.timer == timer.name, TickRow.due <= at, TickRow.until > at
        )
        return self._db.read(lambda session: [(d, u, n) for d, u, n in session.execute(query) if u is not None])


def _unchanged(session: Session, timer: Timer) -> TimerRow | None:
    """The timer's row, if it has not changed since it was read. It is locked until the transaction ends."""
    row = session.scalar(select(TimerRow).where(TimerRow.name == timer.name).with_for_update())
    if row is None or row.state != TimerState.ACTIVE.value:
        return None
    before = (timer.digest, timer.since, timer.next_due, timer.moved_at)
    return row if (row.digest, row.since, row.next_due, row.moved_at) == before else None


def _between(session: Session, timer: str, first: int, last: int) -> int:
    """The number of rows of ticks from `first` to `last`."""
    query = select(func.count()).where(TickRow.timer == timer, TickRow.due.between(first, last))
    return int(session.scalar(query) or 0)


def _span(planned: Sequence[Planned]) -> tuple[int, int]:
    dues = [each.due for each in planned] or [0]
    return min(dues), max(dues)


def _become(
    session: Session, timer: str, planned: Planned, open_now: Standing, policy: Policy, now: float
) -> tuple[Tick, Standing]:
    """Carry out the decision about a tick, except for its row; returns it with the timer's new standing."""
    if planned.job is None:
        return _settled(session, timer, planned, now), open_now
    turn = policy(planned, open_now)
    for job in turn.cancel:
        cancel(
            session,
            job,
            message="cancelled: a later tick of its timer replaces it",
            asked=f"asked to stop: the tick of {utc(planned.due)} replaces it",
            now=now,
        )
    if turn.drop:
        dropped = update(TickRow).where(TickRow.timer == timer, TickRow.due.in_(turn.drop))
        reason = "a later tick of the timer replaced it"
        count_ticks(
            session,
            TickOutcome.SKIPPED,
            changed(session, dropped.values(outcome=TickOutcome.SKIPPED.value, reason=reason, at=now)),
        )
    if turn.cancel or turn.drop:
        session.flush()
        open_now = standing(session, timer)
    if turn.outcome is TickOutcome.SUBMITTED:
        tick = _settled(session, timer, planned, now)
    else:
        tick = _tick(timer, planned, turn.outcome, turn.reason, now)
    if tick.outcome is TickOutcome.WAITING:
        open_now = replace(open_now, waiting=(*open_now.waiting, tick))
    elif tick.job is not None:
        opened = OpenJob(id=tick.job, state=JobState.QUEUED, due=tick.due, kind=tick.kind)
        open_now = replace(open_now, open=(*open_now.open, opened))
    return tick, open_now


def _settled(session: Session, timer: str, planned: Planned, now: float) -> Tick:
    """Submit a tick's job, or return the reason why it cannot be."""
    if planned.job is None:
        assert planned.outcome is not None
        return _tick(timer, planned, planned.outcome, planned.reason, now)
    key = planned.job.key
    has_key = select(JobRow.id).where(JobRow.key == key)
    before = session.scalar(has_key) if key is not None else None
    try:
        job = insert_job(session, planned.job, now)
    except (NotFound, UsageError) as e:
        return _tick(timer, planned, TickOutcome.ERROR, str(e), now)
    if before is not None:
        return _tick(timer, planned, TickOutcome.SKIPPED, f"run.key: {key!r} already belongs to job {before}", now)
    return replace(_tick(timer, planned, TickOutcome.SUBMITTED, planned.reason, now), job=job.id)


def _tick(timer: str, planned: Planned, outcome: TickOutcome, reason: str | None, now: float) -> Tick:
    return Tick(
        timer=timer,
        due=planned.due,
        until=planned.until,
        count=planned.count,
        kind=planned.kind,
        outcome=outcome,
        reason=reason,
        at=now,
    )
