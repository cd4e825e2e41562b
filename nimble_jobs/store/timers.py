"""Adds, pauses, resumes, removes and reads the timers of a store.

`firing.py` fires them, and `asked.py` serves ticks on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Select, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from nimble_jobs.errors import NotFound
from nimble_jobs.store.asked import Asked
from nimble_jobs.store.firing import GAP_S
from nimble_jobs.store.new_job import write_new
from nimble_jobs.store.new_ticks import count_ticks
from nimble_jobs.store.open_jobs import OPEN
from nimble_jobs.store.records import dump
from nimble_jobs.store.tables import JobRow
from nimble_jobs.store.timer_records import (
    Due,
    Tick,
    TickKind,
    TickOutcome,
    Timer,
    TimerChange,
    TimerState,
    tick_record,
    timer_digest,
    timer_record,
)
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from nimble_jobs.store.transitions import changed, record_event

First = Callable[[Timer], Due | None]  # the first tick after `since`

_OWN = (TickKind.SCHEDULED.value, TickKind.CATCH_UP.value)  # kinds of ticks that were not requested
_PRUNED_AT_ONCE = 500
_CLOCK_S = 60.0  # a timer from a clock that was further ahead begins anew when it is added again


class Timers(Asked):
    """The timer table. Time is always an argument: Unix seconds."""

    def add(
        self,
        *,
        name: str,
        spec: Mapping[str, Any],
        file: str,
        base: str,
        allow_python: Sequence[str] = (),
        first: First,
        now: float,
    ) -> tuple[Timer, TimerChange]:
        """Add a timer, or change the one of that name. An equal spec changes nothing.

        `spec`: resolved, with its templates unfilled. `first` gives the first tick after `Timer.since`, which becomes
        `now`. Ticks that were due before are never fired, and neither are waiting ticks of the earlier spec.
        """
        text, allowed = dump(spec), dump([str(folder) for folder in allow_python])
        values = {
            "file": file,
            "base": base,
            "allow_python": allowed,
            "digest": timer_digest(text, allowed),
            "spec": text,
            "edited_at": now,
        }

        def work(session: Session) -> tuple[Timer, TimerChange]:
            row = _locked(session, name)
            whole = row is not None and row.digest == timer_digest(row.spec, row.allow_python)
            if row is not None and whole and row.digest == values["digest"] and row.since <= now + _CLOCK_S:
                return timer_record(row), TimerChange.UNCHANGED
            if row is None:
                change = TimerChange.ADDED
                row = TimerRow(name=name, state=TimerState.ACTIVE.value, created_at=now, since=now, moved_at=now)
                session.add(row)
            else:
                change = TimerChange.EDITED
                _drop_waiting(session, name, "the timer was edited", now)
            for column, value in values.items():
                setattr(row, column, value)
            _begin(row, first, now)
            session.flush()
            record_event(session, "timer", f"{name}: {change}", now=now, data={"timer": name})
            return timer_record(row), change

        return write_new(self._db, work)

    def pause(self, name: str, now: float) -> Timer:
        """Stop firing it until `resume`; waiting ticks are skipped. Raises NotFound."""

        def work(session: Session) -> Timer:
            row = _found(session, name)
            if row.state == TimerState.ACTIVE.value:
                row.state, row.next_due, row.next_at, row.moved_at = TimerState.PAUSED.value, None, None, now
                _drop_waiting(session, name, "the timer was paused", now)
                record_event(session, "timer", f"{name}: paused", now=now, data={"timer": name})
            return timer_record(row)

        return write_new(self._db, work)

    def resume(self, name: str, first: First, now: float) -> Timer:
        """Fire it again, from its first tick after `now`. An active timer stays as it is. Raises NotFound."""

        def work(session: Session) -> Timer:
            row = _found(session, name)
            if row.state == TimerState.PAUSED.value:
                row.state = TimerState.ACTIVE.value
                _begin(row, first, now)
                session.flush()
                record_event(session, "timer", f"{name}: resumed", now=now, data={"timer": name})
            return timer_record(row)

        return write_new(self._db, work)

    def remove(self, name: str, now: float) -> Timer:
        """Remove a timer and its ticks. Its jobs stay. Raises NotFound."""

        def work(session: Session) -> Timer:
            timer = timer_record(_found(session, name))
            count = session.scalar(select(func.count()).where(TickRow.timer == name))
            changed(session, delete(TickRow).where(TickRow.timer == name))
            changed(session, delete(TimerRow).where(TimerRow.name == name))
            message = f"{name}: removed, with {count} recorded ticks"
            record_event(session, "timer", message, now=now, data={"timer": name})
            return timer

        return write_new(self._db, work)

    def get(self, name: str) -> Timer:
        """Raises NotFound."""
        return self._db.read(lambda session: timer_record(_found(session, name, lock=False)))

    def ticks(
        self,
        name: str,
        *,
        since: float | None = None,
        until: float | None = None,
        outcomes: Collection[TickOutcome] = (),
        limit: int | None = None,
    ) -> list[Tick]:
        """The ticks of a timer due from `since` to `until`, both included, newest first. Empty for an unknown timer."""
        query = select(TickRow).where(TickRow.timer == name).order_by(TickRow.due.desc()).limit(limit)
        if since is not None:  # a row for several ticks may begin earlier
            query = query.where(func.coalesce(TickRow.until, TickRow.due) >= since)
        if until is not None:
            query = query.where(TickRow.due <= until)
        if outcomes:
            query = query.where(TickRow.outcome.in_([outcome.value for outcome in outcomes]))
        return self._db.read(lambda session: [tick_record(row) for row in session.scalars(query)])

    def last_ticks(self) -> dict[str, Tick]:
        """The newest tick of each timer that has any."""
        query = select(TickRow).order_by(TickRow.due.desc()).limit(1)

        def work(session: Session) -> dict[str, Tick]:
            # One index lookup per timer: a single query would scan all ticks.
            names = session.scalars(select(TimerRow.name)).all()
            rows = [session.scalar(query.where(TickRow.timer == name)) for name in names]
            return {row.timer: tick_record(row) for row in rows if row is not None}

        return self._db.read(work)

    def tick_of(self, job: str) -> Tick | None:
        """The tick that a job was submitted for."""
        query = select(TickRow).where(TickRow.job == job).limit(1)

        def work(session: Session) -> Tick | None:
            row = session.scalar(query)
            return None if row is None else tick_record(row)

        return self._db.read(work)

    def due(self, now: float, *, slack_s: float) -> list[Timer]:
        """The timers that need work, those due for longest first: a tick is due or waits, or the clock was set back by
        more than `slack_s` into an absence.
        """
        waiting = select(TickRow.timer).where(TickRow.outcome == TickOutcome.WAITING.value).distinct()
        active = TimerRow.state == TimerState.ACTIVE.value
        query = (
            select(TimerRow)
            .where(
                or_(
                    and_(active, TimerRow.next_at <= now),
                    and_(
                        active,
                        TimerRow.gap_from <= now,
                        TimerRow.moved_at > now + slack_s,
                        TimerRow.moved_at <= TimerRow.gap_at + GAP_S,
                    ),
                    TimerRow.name.in_(waiting),
                )
            )
            .order_by(func.coalesce(TimerRow.next_at, now), TimerRow.name)
        )
        return self._db.read(lambda session: [timer_record(row) for row in session.scalars(query)])

    def prune_some_ticks(self, name: str, before: float, keep: int) -> int:
        """Forget a timer's ticks due before a time, but the newest `keep`, and those that wait or whose jobs have not
        ended. Some, in one transaction. Returns how many rows went; 0 when there are no more.
        """
        some = self._old_ticks(name, before, keep)
        if some is None:
            return 0
        dues = self._db.read(lambda session: list(session.scalars(some.limit(_PRUNED_AT_ONCE))))
        these = delete(TickRow).where(TickRow.timer == name, TickRow.due.in_(dues))
        return self._db.write(lambda session: changed(session, these)) if dues else 0

    def count_old_ticks(self, name: str, before: float, keep: int) -> int:
        """How many ticks of a timer `prune_some_ticks` would forget in the end."""
        old = self._old_ticks(name, before, keep)
        if old is None:
            return 0
        query = select(func.count()).select_from(old.subquery())
        return self._db.read(lambda session: int(session.scalar(query) or 0))

    def _old_ticks(self, name: str, before: float, keep: int) -> Select[Any] | None:
        kept = select(TickRow.due).where(TickRow.timer == name).order_by(TickRow.due.desc()).offset(keep).limit(1)
        newest = self._db.read(lambda session: session.scalar(kept))
        return None if newest is None else _to_prune(name, before, newest)

    def names(self) -> list[str]:
        """The names of all timers, in order."""
        return self._db.read(lambda session: [*session.scalars(select(TimerRow.name).order_by(TimerRow.name))])

    def list(self) -> list[Timer]:
        """All timers, by name."""
        query = select(TimerRow).order_by(TimerRow.name)
        return self._db.read(lambda session: [timer_record(row) for row in session.scalars(query)])


def _to_prune(name: str, before: float, newest: int) -> Select[Any]:
    return (
        select(TickRow.due)
        .outerjoin(JobRow, JobRow.id == TickRow.job)
        .where(
            TickRow.timer == name,
            TickRow.due <= newest,
            func.coalesce(TickRow.until, TickRow.due) < before,
            TickRow.outcome != TickOutcome.WAITING.value,
            or_(JobRow.id.is_(None), JobRow.state.not_in(OPEN)),
        )
        .order_by(TickRow.due)
    )


def _locked(session: Session, name: str) -> TimerRow | None:
    return session.scalar(select(TimerRow).where(TimerRow.name == name).with_for_update())


def _found(session: Session, name: str, *, lock: bool = True) -> TimerRow:
    row = _locked(session, name) if lock else session.scalar(select(TimerRow).where(TimerRow.name == name))
    if row is None:
        raise NotFound(f"timer {name}: no such timer; list timers with: nimble-jobs cron ls")
    return row


def _begin(row: TimerRow, first: First, now: float) -> None:
    """Let a timer count its ticks from now on."""
    row.since = row.moved_at = now
    row.gap_from = row.gap_at = None
    row.next_due = row.next_at = None
    if row.state == TimerState.ACTIVE.value and (due := first(timer_record(row))) is not None:
        row.next_due, row.next_at = due.tick, due.at


def _drop_waiting(session: Session, name: str, reason: str, now: float) -> None:
    """Skip waiting ticks, which do not outlive their spec; requested ticks do."""
    waiting = update(TickRow).where(
        TickRow.timer == name, TickRow.outcome == TickOutcome.WAITING.value, TickRow.kind.in_(_OWN)
    )
    dropped = changed(session, waiting.values(outcome=TickOutcome.SKIPPED.value, reason=reason, at=now))
    count_ticks(session, TickOutcome.SKIPPED, dropped)
