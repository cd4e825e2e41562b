"""Totals of what has happened in a store. Pruning jobs, ticks or schedules does not change them.

`add` only notes a change. The database writes all changes of a transaction in one statement before it commits, in the
order of their keys, so that transactions of a database with several writers lock the rows in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Double, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from nimble_jobs.store.tables import Base
from nimble_jobs.store.upsert import Upsert

_PENDING = "nimble_jobs.totals"  # where a session keeps its changes until it commits
_LABEL_LENGTH = 20

Key = tuple[str, str, str]  # what, kind, outcome


class Total(StrEnum):
    """What is counted. `kind` is the job's unless said otherwise."""

    SUBMITTED = "submitted"  # jobs that were queued
    ENDED = "ended"  # jobs that reached a final state, by that state; a retried job counts again
    ATTEMPT = "attempt"  # attempts that ended, with their seconds, by outcome
    RECORDS = "records"  # records done; each counts once for a job, however many attempts repeat it
    REPLAYS = "replays"  # replays of attempts that succeeded
    BUILD = "build"  # schedules that were built and stored here, with the seconds of the search
    TICK = "tick"  # outcomes that ticks of timers got
    NOTIFICATION = "notification"  # notifications by channel, sent or given up


class TotalRow(Base):
    """A total, and the seconds that belong to it."""

    __tablename__ = "totals"

    what: Mapped[str] = mapped_column(String(_LABEL_LENGTH), primary_key=True)
    kind: Mapped[str] = mapped_column(String(_LABEL_LENGTH), primary_key=True)
    outcome: Mapped[str] = mapped_column(String(_LABEL_LENGTH), primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    seconds: Mapped[float] = mapped_column(Double)


def add(
    session: Session, what: Total, kind: str = "", outcome: str = "", *, count: int = 1, seconds: float = 0.0
) -> None:
    """Note an addition to a total. A count or a time below zero, as after a clock was set back, adds nothing."""
    key = (what.value, kind[:_LABEL_LENGTH], outcome[:_LABEL_LENGTH])
    pending: dict[Key, tuple[int, float]] = session.info.setdefault(_PENDING, {})
    before = pending.get(key, (0, 0.0))
    pending[key] = (before[0] + max(count, 0), before[1] + max(seconds, 0.0))


def noted(session: Session) -> bool:
    """Whether this session's transaction adds to a total."""
    return bool(session.info.get(_PENDING))


def write(session: Session) -> None:
    """Write what `add` has noted in this session. `Database` calls this before it commits."""
    pending: dict[Key, tuple[int, float]] = session.info.pop(_PENDING, {})
    rows = [
        {"what": key[0], "kind": key[1], "outcome": key[2], "count": count, "seconds": seconds}
        for key, (count, seconds) in sorted(pending.items())
        if count or seconds
    ]
    if rows:
        session.connection().execute(_ADD.of(session), rows)


def read(session: Session) -> dict[Key, tuple[int, float]]:
    """Count and seconds of each total, by what, kind and outcome."""
    rows = session.execute(select(TotalRow.what, TotalRow.kind, TotalRow.outcome, TotalRow.count, TotalRow.seconds))
    return {(what, kind, outcome): (count, seconds) for what, kind, outcome, count, seconds in rows}


def _add(insert: Callable[..., Any]) -> Any:
    new = insert(TotalRow.__table__)
    changes = {name: getattr(TotalRow, name) + new.excluded[name] for name in ("count", "seconds")}
    return new.on_conflict_do_update(index_elements=["what", "kind", "outcome"], set_=changes)


_ADD = Upsert(_add)
