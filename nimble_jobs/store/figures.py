"""What metrics tell about a store, read in one transaction.

Jobs are counted over `ix_jobs_figures`, which holds every column that is asked for, so that no row of a job is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, case, false, func, or_, select, text
from sqlalchemy.orm import Session

from nimble_jobs.job import JobState
from nimble_jobs.store import totals
from nimble_jobs.store.database import Database
from nimble_jobs.store.notices import NoticeState
from nimble_jobs.store.outbox_table import NoticeRow
from nimble_jobs.store.tables import GroupRow, JobRow, ResidentRow, ScheduleArtifactRow, ScheduleRow
from nimble_jobs.store.timer_records import TickOutcome, TimerState
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from nimble_jobs.store.totals import Key
from nimble_jobs.store.uses import Uses, total_uses

_RUNNING = JobRow.state == JobState.RUNNING.value
_PENDING = NoticeRow.state == NoticeState.PENDING.value


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """The open jobs of a group, and how many of them may run at once. Limits of several groups are added up."""

    limit: int
    running: int
    queued: int


@dataclass(frozen=True, kw_only=True)
class TimerFigures:
    """A timer; or several, and then their oldest success and their largest lateness."""

    last_success_at: float | None  # Unix seconds; None: none yet
    late_s: float  # how long the next tick has been due; 0 if it is in the future, or the timer is paused


@dataclass(frozen=True, kw_only=True)
class OutboxFigures:
    """Notifications that were not delivered."""

    pending: int
    oldest_s: float  # age of the oldest pending one; 0 if there is none
    given_up: int  # until they are pruned


@dataclass(frozen=True, kw_only=True)
class ScheduleFigures:
    """Stored schedules."""

    by_state: Mapping[str, int]  # ready | quarantined
    json_bytes: int
    artifacts_bytes: int  # each artifact once


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one moment. `OTHER` stands for the groups and timers that have no entry of their own."""

    totals: Mapping[Key, tuple[int, float]]  # count and seconds
    jobs: Mapping[tuple[str, str], int]  # by state and kind
    due: Mapping[str, tuple[int, float]]  # by kind: queued jobs that may run now, and the age of the oldest
    held: int  # queued jobs that wait for `release`
    records_running: Mapping[str, int]  # by kind: records of running attempts that the totals lack
    groups: Mapping[str, GroupFigures]
    timers: Mapping[str, TimerFigures]
    timers_by_state: Mapping[str, int]
    ticks_waiting: int
    outbox: OutboxFigures
    uses: Uses
    schedules: ScheduleFigures
    residents: Mapping[str, tuple[int, int]]  # by worker: resident schedules, and their bytes
    database_bytes: int | None  # None if the database does not tell
    free_bytes: int  # part of it


OTHER = "other"


def read_figures(database: Database, now: float, *, names: int) -> Figures:
    """The figures at `now`, in Unix seconds. At most `names` groups and as many timers, the first ones by name, have
    entries of their own.

    Raises StoreError.
    """
    return database.read(lambda session: _figures(session, now, names))


def _figures(session: Session, now: float, names: int) -> Figures:
    pages = _sqlite_pages(session) if session.get_bind().dialect.name == "sqlite" else None
    return Figures(
        totals=totals.read(session),
        jobs={(state, kind): count for state, kind, count in session.execute(jobs_by_state())},
        due={kind: (count, max(0.0, now - since)) for kind, count, since in session.execute(due_jobs(now))},
        held=int(session.scalar(held_jobs()) or 0),
        records_running={kind: int(count) for kind, count in session.execute(_records_running())},
        groups=_groups(session, names),
        timers=_timers(session, now, names),
        timers_by_state=dict(session.execute(select(TimerRow.state, func.count()).group_by(TimerRow.state)).all()),
        ticks_waiting=int(session.scalar(_ticks_waiting()) or 0),
        outbox=_outbox(session, now),
        uses=total_uses(session),
        schedules=_schedules(session),
        residents={worker: (int(count), int(nbytes)) for worker, count, nbytes in session.execute(_residents())},
        database_bytes=pages[0] if pages else None,
        free_bytes=pages[1] if pages else 0,
    )


def jobs_by_state() -> Select[str, str, int]:
    """State, kind and number of jobs."""
    return select(JobRow.state, JobRow.kind, func.count()).group_by(JobRow.state, JobRow.kind)


def due_jobs(now: float) -> Select[str, int, Any]:
    """Kind, number of jobs that a worker could claim, and since when the first of them could be."""
    since = case((JobRow.not_before > JobRow.queued_at, JobRow.not_before), else_=JobRow.queued_at)
    where = (_queued(), JobRow.foreground == false(), JobRow.held == false(), JobRow.blockers == 0)
    query = select(JobRow.kind, func.count(), func.min(since)).where(*where, JobRow.not_before <= now)
    return query.group_by(JobRow.kind)


def held_jobs() -> Select[Any]:
    """The number of jobs on hold."""
    return select(func.count()).where(_queued(), JobRow.held)


def _queued() -> ColumnElement[bool]:
    return JobRow.state == JobState.QUEUED.value


def _records_running() -> Select[str, Any]:
    more = case((JobRow.records_done > JobRow.records_counted, JobRow.records_done - JobRow.records_counted), else_=0)
    return select(JobRow.kind, func.sum(more)).where(_RUNNING).group_by(JobRow.kind)


def _groups(session: Session, names: int) -> dict[str, GroupFigures]:
    def count(state: JobState) -> ColumnElement[int]:
        mine = select(func.count()).where(JobRow.group_name == GroupRow.name, JobRow.state == state.value)
        return mine.correlate(GroupRow).scalar_subquery()

    query = select(GroupRow.name, GroupRow.most, count(JobState.RUNNING), count(JobState.QUEUED)).order_by(
        GroupRow.name
    )
    groups: dict[str, GroupFigures] = {}
    for name, most, running, queued in session.execute(query):
        label = _label(name, groups, names)
        before = groups.get(label, GroupFigures(limit=0, running=0, queued=0))
        groups[label] = GroupFigures(
            limit=before.limit + most, running=before.running + running, queued=before.queued + queued
        )
    return groups


def _label(name: str, taken: Mapping[str, Any], names: int) -> str:
    """A name's own label, or `OTHER`, also for a name that is spelt like it."""
    return name if len(taken.keys() - {OTHER}) < names and name != OTHER else OTHER


def _timers(session: Session, now: float, names: int) -> dict[str, TimerFigures]:
    due = case((TimerRow.state == TimerState.ACTIVE.value, TimerRow.next_at))
    own = select(TimerRow.name, TimerRow.last_success_at, due).where(TimerRow.name != OTHER)
    rows = list(session.execute(own.order_by(TimerRow.name).limit(names)))
    timers = {name: _timer(success, due_at, now) for name, success, due_at in rows}
    after = [TimerRow.name > rows[-1][0]] if len(rows) == names and rows else []
    rest = select(func.count(), func.min(TimerRow.last_success_at), func.min(due))
    count, success, due_at = session.execute(rest.where(or_(TimerRow.name == OTHER, *after))).one()
    if count:
        timers[OTHER] = _timer(success, due_at, now)
    return timers


def _timer(success: float | None, due_at: float | None, now: float) -> TimerFigures:
    return TimerFigures(last_success_at=success, late_s=0.0 if due_at is None else max(0.0, now - due_at))


def _ticks_waiting() -> Select[Any]:
    return select(func.count()).where(TickRow.outcome == TickOutcome.WAITING.value)


def _outbox(session: Session, now: float) -> OutboxFigures:
    count, oldest = session.execute(select(func.count(), func.min(NoticeRow.created_at)).where(_PENDING)).one()
    given_up = select(func.count()).where(NoticeRow.state == NoticeState.GIVEN_UP.value)
    oldest_s = 0.0 if oldest is None else max(0.0, now - oldest)
    return OutboxFigures(pending=count, oldest_s=oldest_s, given_up=int(session.scalar(given_up) or 0))


def _schedules(session: Session) -> ScheduleFigures:
    rows = session.execute(
        select(ScheduleRow.state, func.count(), func.sum(ScheduleRow.bytes)).group_by(ScheduleRow.state)
    )
    by_state, nbytes = {}, 0
    for state, count, size in rows:
        by_state[state] = count
        nbytes += int(size)
    row = ScheduleArtifactRow
    each = select(func.max(row.bytes).label("bytes"), func.count().label("users")).group_by(row.name).subquery()
    sums = select(func.coalesce(func.sum(each.c.bytes), 0), func.coalesce(func.sum(each.c.bytes * each.c.users), 0))
    once, shared = session.execute(sums).one()
    return ScheduleFigures(by_state=by_state, json_bytes=max(0, nbytes - int(shared)), artifacts_bytes=int(once))


def _residents() -> Select[str, int, int]:
    return select(ResidentRow.worker, func.count(), func.sum(ResidentRow.bytes)).group_by(ResidentRow.worker)


def _sqlite_pages(session: Session) -> tuple[int, int]:
    """Bytes of the database file, and bytes of its free pages."""
    count, size, free = (
        int(session.execute(text(f"PRAGMA {name}")).scalar_one())
        for name in ("page_count", "page_size", "freelist_count")
    )
    return count * size, free * size
