"""Ticks on demand: one now (`cron trigger`), or a range of past ticks without a job (`cron backfill`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from nimble_jobs.plural import count
from nimble_jobs.store.firing import Firing
from nimble_jobs.store.new_job import NewJob, insert_job, write_new
from nimble_jobs.store.new_ticks import insert_ticks
from nimble_jobs.store.timer_records import Tick, TickKind, TickOutcome, Timer, tick_record, utc
from nimble_jobs.store.timer_tables import TickRow, TimerRow
from nimble_jobs.store.transitions import changed, record_event

RAN = (TickOutcome.SUBMITTED, TickOutcome.WAITING)  # ticks that have a job, or will have one


class Asked(Firing):
    """The part of the timer table that serves ticks on demand."""

    def trigger(self, timer: Timer, due: int, job: NewJob, now: float) -> Tick | None:
        """Submit a job now, as its own tick. None if that tick exists or the timer has changed.

        Raises NotFound and UsageError as `Jobs.submit` does; nothing is written then.
        """

        def work(session: Session) -> Tick | None:
            if not _same(session, timer) or session.get(TickRow, (timer.name, due)) is not None:
                return None
            submitted = insert_job(session, job, now)
            tick = Tick(
                timer=timer.name,
                due=due,
                kind=TickKind.MANUAL,
                outcome=TickOutcome.SUBMITTED,
                job=submitted.id,
                at=now,
            )
            insert_ticks(session, [tick])
            return tick

        return write_new(self._db, work)

    def covered(self, name: str, first: int, last: int) -> tuple[Mapping[int, Tick], Sequence[Tick]]:
        """The rows of ticks from `first` to `last`: rows of single ticks by their time, and rows of several ticks."""
        query = select(TickRow).where(
            TickRow.timer == name, TickRow.due <= last, (TickRow.due >= first) | (TickRow.until >= first)
        )
        ticks = self._db.read(lambda session: [tick_record(row) for row in session.scalars(query)])
        return {tick.due: tick for tick in ticks if tick.until is None}, [t for t in ticks if t.until is not None]

    def backfill(
        self, timer: Timer, dues: Sequence[int], after: Callable[[int], int], *, max_running: int, now: float
    ) -> list[int] | None:
        """Let ticks without a job wait for one; at most `max_running` jobs of a backfill are open at once.

        `after` gives the tick after another. Returns the ticks that wait now; None if the timer has changed.
        """

        def work(session: Session) -> list[int] | None:
            if not _same(session, timer) or not dues:
                return None
            rows = select(TickRow).where(TickRow.timer == timer.name, TickRow.due.between(dues[0], dues[-1]))
            existing = {row.due: tick_record(row) for row in session.scalars(rows)}
            wanted = [due for due in dues if due not in existing or existing[due].outcome not in RAN]
            self._cut(session, timer.name, wanted, after)
            again = [due for due in wanted if due in existing and existing[due].until is None]
            for due in again:
                changed(session, delete(TickRow).where(TickRow.timer == timer.name, TickRow.due == due))
            ticks = [
                Tick(
                    timer=timer.name,
                    due=due,
                    kind=TickKind.BACKFILL,
                    outcome=TickOutcome.WAITING,
                    reason=f"was {existing[due].outcome}: {existing[due].reason}" if due in again else None,
                    at=now,
                    max_running=max_running,
                )
                for due in wanted
            ]
            if ticks:
                insert_ticks(session, ticks)
                span = f"{utc(wanted[0])} to {utc(wanted[-1])}"
                message = f"{timer.name}: backfill of {count(len(ticks), 'tick')} from {span}"
                record_event(session, "timer", message, now=now, data={"timer": timer.name})
            return wanted

        return write_new(self._db, work)

    def _cut(self, session: Session, name: str, wanted: Sequence[int], after: Callable[[int], int]) -> None:
        """Split rows that stand for several ticks, so that these ticks get their own rows."""
        if not wanted:
            return
        rows = select(TickRow).where(TickRow.timer == name, TickRow.due <= wanted[-1], TickRow.until >= wanted[0])
        for row in [tick_record(found) for found in session.scalars(rows)]:
            assert row.until is not None
            own = select(TickRow.due).where(TickRow.timer == name, TickRow.due > row.due, TickRow.due <= row.until)
            have = set(session.scalars(own))
            inside = {due for due in wanted if row.due <= due <= row.until} - have
            first = row.due
            while first in inside | have and first <= row.until:
                first = after(first)
            mine = (TickRow.timer == name, TickRow.due == row.due)
            if first > row.until:
                changed(session, delete(TickRow).where(*mine))
            else:
                changed(session, update(TickRow).where(*mine).values(due=first, count=row.count - len(inside)))


def _same(session: Session, timer: Timer) -> bool:
    row = session.scalar(select(TimerRow).where(TimerRow.name == timer.name).with_for_update())
    return row is not None and row.digest == timer.digest
