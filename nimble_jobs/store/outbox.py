"""The outbox: notifications that wait to be sent. Senders lease them until they are sent or given up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, and_, case, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.store import totals
from nimble_jobs.store.database import Database
from nimble_jobs.store.notices import UNROUTED, Notice, NoticeState, notice_record, spread
from nimble_jobs.store.outbox_table import NoticeRow
from nimble_jobs.store.routes import Channel
from nimble_jobs.store.totals import Total
from nimble_jobs.store.transitions import changed, record_event

if TYPE_CHECKING:
    from nimble_jobs.settings import Settings

FURTHEST_S = 3600.0  # longest wait between two attempts
LONGEST_LEASE_S = 2 * 3600.0
_SLACK_S = 60.0  # a row that is due later than any wait allows was written before the clock was set back
_PER_TARGET = 2  # most messages to one address at once, so that a hanging receiver does not delay the others
_PRUNED_AT_ONCE = 500
_UNSYNCED = {"synchronize_session": False}
_PENDING = NoticeRow.state == NoticeState.PENDING.value


class Outbox:
    """The table of notifications. Time is always an argument: Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def waiting(self, now: float) -> bool:
        """Whether any notification is due. One cheap read."""
        due = select(NoticeRow.seq).where(_PENDING, _due(now), _unleased(now, LONGEST_LEASE_S)).limit(1)
        return self._db.read(lambda session: session.scalar(due)) is not None

    def lease(
        self, sender: str, now: float, *, lease_s: float, command_s: float | None = None, limit: int = 8
    ) -> list[Notice]:
        """Lease due notifications, at most two per address, for `lease_s`, or commands for `command_s` if given. Each
        counts as an attempt.

        Nobody else gets them during the lease, which ends even if the sender dies. Pings of a job are sent in order:
        each waits until the one before it is sent or given up.
        """

        longest_s = max(lease_s, command_s or 0.0)
        ends = case((NoticeRow.channel == Channel.COMMAND.value, now + (command_s or lease_s)), else_=now + lease_s)

        # Searched before the write transaction, because it takes a while among many waiting rows.
        chosen = self._db.read(lambda session: list(session.scalars(_next(now, longest_s, limit))))
        if not chosen:
            return []

        def work(session: Session) -> list[Notice]:
            taken = (
                update(NoticeRow)
                .where(NoticeRow.seq.in_(chosen), _PENDING, _due(now), _unleased(now, longest_s))
                .values(attempts=NoticeRow.attempts + 1, leased_until=ends, sender=sender)
                .returning(NoticeRow)
            )
            rows = session.scalars(taken, execution_options=_UNSYNCED)
            return sorted(map(notice_record, rows), key=lambda notice: (notice.created_at, notice.id))

        return self._db.write(work)

    def route(self, settings: Settings, now: float) -> int:
        """Find targets for notifications from times when the configuration could not be read. Returns their number."""
        unrouted = select(NoticeRow).where(_PENDING, NoticeRow.channel == UNROUTED).order_by(NoticeRow.seq).limit(100)
        if self._db.read(lambda session: session.scalar(select(unrouted.exists()))) is not True:
            return 0
        return self._db.write(lambda s: sum(spread(s, row, settings, now) for row in list(s.scalars(unrouted))))

    def sent(self, notice_id: str, now: float) -> bool:
        """It was delivered, even if another sender has the lease by now. False if it was sent or given up before."""
        values = {"state": NoticeState.SENT.value, "sent_at": now, "error": None, "leased_until": None}
        done = update(NoticeRow).where(NoticeRow.id == notice_id, _PENDING).values(**values)

        def work(session: Session) -> bool:
            channel = session.execute(done.returning(NoticeRow.channel), execution_options=_UNSYNCED).scalar()
            if channel is None:
                return False
            totals.add(session, Total.NOTIFICATION, channel, NoticeState.SENT.value)
            return True

        return self._db.write(work)

    def failed(self, notice: Notice, error: str, *, next_at: float | None, now: float) -> bool:
        """The attempt failed: try again at `next_at`, or give up, with an event, if that is None.

        False, and nothing is written, if another attempt has begun.
        """

        def work(session: Session) -> bool:
            mine = update(NoticeRow).where(NoticeRow.id == notice.id, NoticeRow.attempts == notice.attempts, _PENDING)
            values: dict[str, Any] = {"error": error, "leased_until": None}
            if next_at is None:
                values["state"] = NoticeState.GIVEN_UP.value
            else:
                values["next_at"] = next_at
            if changed(session, mine.values(**values)) != 1:
                return False
            if next_at is None:
                totals.add(session, Total.NOTIFICATION, notice.channel, NoticeState.GIVEN_UP.value)
                message = f"{notice.channel} of {notice.event} given up after {notice.attempts} attempts: {error}"
                record_event(session, "notify", message, now=now, job=notice.job_id, data={"notification": notice.id})
            return True

        return self._db.write(work)

    def retry(self, ids: Collection[str] | None, now: float) -> list[str]:
        """Retry the named notifications now, or (None) all that were given up. Returns their ids.

        Raises NotFound for an unknown id, UsageError for a sent notification.
        """

        def work(session: Session) -> list[str]:
            query = select(NoticeRow).order_by(NoticeRow.seq)
            if ids is None:
                rows = list(session.scalars(query.where(NoticeRow.state == NoticeState.GIVEN_UP.value)))
            else:
                rows = [_found(session, reference) for reference in ids]
            for row in rows:
                if row.state == NoticeState.SENT.value:
                    raise UsageError(
                        f"notification {row.id} was sent already; send a new one with: nimble-jobs notifications test"
                    )
                row.state, row.next_at, row.since = NoticeState.PENDING.value, now, now
                row.leased_until = None
            session.flush()
            return [row.id for row in rows]

        return self._db.write(work)

    def list(
        self, *, states: Collection[NoticeState] | None = None, job: str | None = None, limit: int | None = None
    ) -> Sequence[Notice]:
        """Notifications, newest first."""
        query = select(NoticeRow).order_by(NoticeRow.seq.desc()).limit(limit)
        if states is not None:
            query = query.where(NoticeRow.state.in_([state.value for state in states]))
        if job is not None:
            query = query.where(NoticeRow.job == job)
        return self._db.read(lambda session: [notice_record(row) for row in session.scalars(query)])

    def counts(self) -> dict[NoticeState, int]:
        """How many notifications are in each state."""
        query = select(NoticeRow.state, func.count()).group_by(NoticeRow.state)
        return self._db.read(lambda session: {NoticeState(state): n for state, n in session.execute(query)})

    def prune_some(self, before: float) -> int:
        """Forget some of those sent or given up that were made before a time, in one transaction.

        Returns how many; 0 when there are no more.
        """
        some = select(NoticeRow.seq).where(*_old(before)).limit(_PRUNED_AT_ONCE)
        seqs = self._db.read(lambda session: list(session.scalars(some)))
        these = delete(NoticeRow).where(NoticeRow.seq.in_(seqs))
        return self._db.write(lambda session: changed(session, these)) if seqs else 0

    def count_old(self, before: float) -> int:
        """How many `prune_some` would forget in the end."""
        query = select(func.count()).select_from(NoticeRow).where(*_old(before))
        return self._db.read(lambda session: int(session.scalar(query) or 0))


def _old(before: float) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return ~_PENDING, NoticeRow.created_at < before


def _due(now: float) -> ColumnElement[bool]:
    return or_(NoticeRow.next_at <= now, NoticeRow.next_at > now + FURTHEST_S + _SLACK_S)


def _unleased(now: float, lease_s: float) -> ColumnElement[bool]:
    until = NoticeRow.leased_until
    return or_(until.is_(None), until <= now, until > now + lease_s + _SLACK_S)


def _next(now: float, lease_s: float, limit: int) -> Any:
    earlier = aliased(NoticeRow)
    in_order = or_(
        NoticeRow.channel != Channel.PING.value,
        NoticeRow.job.is_(None),
        ~exists().where(
            and_(
                earlier.job == NoticeRow.job,
                earlier.target == NoticeRow.target,
                earlier.channel == NoticeRow.channel,
                earlier.seq < NoticeRow.seq,
                earlier.state == NoticeState.PENDING.value,
            )
        ),
    )
    turn = func.row_number().over(
        partition_by=(NoticeRow.channel, NoticeRow.target), order_by=(NoticeRow.next_at, NoticeRow.seq)
    )
    ready = (
        select(NoticeRow.seq, NoticeRow.next_at, turn.label("turn"))
        .where(_PENDING, NoticeRow.channel != UNROUTED, _due(now), _unleased(now, lease_s), in_order)
        .subquery()
    )
    return select(ready.c.seq).where(ready.c.turn <= _PER_TARGET).order_by(ready.c.next_at, ready.c.seq).limit(limit)


def _found(session: Session, reference: str) -> NoticeRow:
    like = reference.replace("%", "").replace("_", "") + "%"
    rows = list(session.scalars(select(NoticeRow).where(NoticeRow.id.like(like)).limit(2)))
    if not rows or not reference:
        raise NotFound(f"no notification {reference!r}; list them with: nimble-jobs notifications ls")
    if len(rows) > 1:
        raise UsageError(f"{reference!r} matches {rows[0].id} and {rows[1].id}; type more characters")
    return rows[0]
