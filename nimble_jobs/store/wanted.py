"""Schedules that jobs missed and did not build. An idle worker does, the most promising first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, String, Text, delete, func, or_, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from nimble_jobs.job import JobState
from nimble_jobs.store.changes import changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.records import dump, load_object
from nimble_jobs.store.tables import Base, JobRow, ScheduleRow
from nimble_jobs.store.timer_tables import TimerRow
from nimble_jobs.store.transitions import record_event
from nimble_jobs.store.words import Words

_READ = 500  # queued jobs and timers that are compared with a job, at most
# How long a schedule is remembered after the last job that missed it: models change, and keys with them.
_KEEP_S = 30 * 86400.0
_MOST = 200  # schedules that are remembered


class WantedState(StrEnum):
    """The state of a wanted schedule."""

    WAITS = "waits"
    BUILDING = "building"
    FAILED = "failed"  # a build failed; `why` says how


class WantedRow(Base):
    """A schedule that jobs missed. The row goes when the schedule is stored."""

    __tablename__ = "wanted_schedules"

    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    model: Mapped[str] = mapped_column(Words)
    device: Mapped[str] = mapped_column(Words)  # in words, as schedules have it
    input: Mapped[str] = mapped_column(Words)
    request: Mapped[str] = mapped_column(Text)  # JSON object: the request for a builder
    misses: Mapped[int] = mapped_column(BigInteger)  # jobs that ran without it
    tries: Mapped[int]  # builds that ended without a result
    saves_s: Mapped[float]  # expected saving for a job like the last that missed
    costs_s: Mapped[float]  # expected cost of the build
    why: Mapped[str] = mapped_column(Words)
    state: Mapped[str] = mapped_column(String(12))  # waits | building | failed
    builder: Mapped[str | None] = mapped_column(Words)  # the worker that builds it
    first_at: Mapped[float]
    last_at: Mapped[float]


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A schedule that a job did without."""

    key: str
    model: str
    device: str  # in words, as schedules have it
    input: str
    request: Mapping[str, Any]  # the request for a builder
    saves_s: float  # expected for a job like this one
    costs_s: float  # expected cost of the build
    why: str  # it was not built


@dataclass(frozen=True, kw_only=True)
class WantedSchedule:
    """A schedule that jobs missed and did not build. Times are Unix seconds."""

    key: str
    model: str
    device: str
    input: str
    request: dict[str, Any]
    misses: int
    tries: int
    saves_s: float
    costs_s: float
    why: str
    state: WantedState
    builder: str | None
    first_at: float
    last_at: float


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Other demand for the schedule of a key, or for schedules of the same model."""

    misses: int = 0  # earlier jobs that ran without this schedule
    tries: int = 0  # builds of it that were ended before they had a result
    failed: str | None = None  # why its build failed, if another one would fail too
    queued: int = 0  # jobs that wait with the same model, input shape left open, batch size and settings
    timers: int = 0  # active ones with the same model
    hits: int = 0  # of stored schedules of the same model


class WantedSchedules:
    """The table of wanted schedules. Time is always an argument: Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def missed(self, miss: Miss, now: float) -> None:
        """A job did without this schedule: count it, with the next transaction. What failed stays failed."""

        def work(session: Session) -> None:
            row = session.get(WantedRow, miss.key)
            if row is None:
                if session.scalar(select(ScheduleRow.state).where(ScheduleRow.key == miss.key)) is not None:
                    return  # another process was first
                _forget_old(session, now)
                row = WantedRow(key=miss.key, model=miss.model, device=miss.device, input=miss.input, first_at=now)
                row.misses, row.tries, row.state = 0, 0, WantedState.WAITS.value
                session.add(row)
            row.misses += 1
            if row.state != WantedState.FAILED.value:
                row.why = miss.why
            row.saves_s, row.costs_s, row.last_at = float(miss.saves_s), float(miss.costs_s), now
            row.request = dump(dict(miss.request))

        self._db.write_soon(work)

    def list(self) -> list[WantedSchedule]:
        """All wanted schedules, the most promising first, by expected saving over expected cost."""
        rows = self._db.read(lambda session: [_record(row) for row in session.scalars(select(WantedRow))])
        return sorted(rows, key=lambda row: (-_promise(row), row.first_at, row.key))

    def take(self, worker: str, device: str, *, alive: Callable[[str], bool], now: float) -> WantedSchedule | None:
        """Take the most promising one for a device, for this worker to build; None if there is none.

        `alive` tells whether a worker runs: builds of dead workers are free again.
        """
        for row in self.list():
            free = row.builder is None or row.builder == worker or not alive(row.builder)
            if row.device != device or row.state is WantedState.FAILED or not free:
                continue
            taken = update(WantedRow).where(
                WantedRow.key == row.key,
                WantedRow.state == row.state.value,
                WantedRow.builder.is_not_distinct_from(row.builder),
            )
            values = {"builder": worker, "state": WantedState.BUILDING.value}
            statement = taken.values(**values)
            if self._db.write(lambda session, s=statement: changed(session, s)):  # type: ignore[misc]
                return row
        return None

    def put_back(self, key: str) -> None:
        """Its build was interrupted; another one may begin."""
        statement = update(WantedRow).where(WantedRow.key == key, WantedRow.state != WantedState.FAILED.value)
        statement = statement.values(builder=None, state=WantedState.WAITS.value, tries=WantedRow.tries + 1)
        self._db.write(lambda session: changed(session, statement))

    def failed(self, key: str, reason: str, now: float) -> None:
        """Its build failed: it is not tried again until a command builds it. The first reason stays."""

        def work(session: Session) -> None:
            statement = update(WantedRow).where(WantedRow.key == key, WantedRow.state != WantedState.FAILED.value)
            values = {"builder": None, "state": WantedState.FAILED.value, "why": reason}
            if changed(session, statement.values(**values)):
                record_event(
                    session, "wanted", f"schedule {key[:16]} was not built: {reason}", now=now, data={"key": key}
                )

        self._db.write(work)

    def demand(self, key: str, spec: Mapping[str, Any], *, job: str | None = None) -> Demand:
        """Other demand for the schedule of a job with this spec. `job` itself does not count."""

        def work(session: Session) -> Demand:
            own = session.get(WantedRow, key)
            texts = session.execute(
                select(JobRow.id, JobRow.spec)
                .where(JobRow.state == JobState.QUEUED.value, JobRow.held.is_(False), JobRow.kind == spec.get("kind"))
                .order_by(JobRow.rank)
                .limit(_READ)
            ).all()
            timers = session.scalars(select(TimerRow.spec).where(TimerRow.state == "active").limit(_READ))
            model = str((spec.get("model") or {}).get("source", ""))
            hits = session.scalar(select(func.sum(ScheduleRow.hits)).where(ScheduleRow.model == model)) or 0
            return Demand(
                misses=own.misses if own else 0,
                tries=own.tries if own else 0,
                failed=own.why if own and own.state == WantedState.FAILED.value else None,
                queued=sum(_alike(load_object(text), spec) for id_, text in texts if id_ != job),
                timers=sum(_alike(load_object(text), spec) for text in timers),
                hits=int(hits),
            )

        return self._db.read(work)


def forget(session: Session, keys: Collection[str]) -> None:
    """Forget schedules that are stored now."""
    changed(session, delete(WantedRow).where(WantedRow.key.in_(list(keys))))


def _forget_old(session: Session, now: float) -> None:
    """Make room for one more: remove schedules not missed for long, and the oldest ones if there are too many."""
    recent = select(WantedRow.key).order_by(WantedRow.last_at.desc(), WantedRow.key).limit(_MOST - 1)
    unused = or_(WantedRow.last_at < now - _KEEP_S, WantedRow.key.not_in(recent))
    changed(session, delete(WantedRow).where(unused, WantedRow.state != WantedState.BUILDING.value))


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two jobs would use the same schedule if their records had the same shape."""
    same = all(one.get(part) == other.get(part) for part in ("kind", "model", "schedule"))
    sizes = [(spec.get("input") or {}).get("batch_size") for spec in (one, other)]
    return same and sizes[0] == sizes[1]


def _promise(row: WantedSchedule) -> float:
    return row.misses * row.saves_s / max(row.costs_s, 1e-3)


def _record(row: WantedRow) -> WantedSchedule:
    return WantedSchedule(
        key=row.key,
        model=row.model,
        device=row.device,
        input=row.input,
        request=load_object(row.request),
        misses=row.misses,
        tries=row.tries,
        saves_s=row.saves_s,
        costs_s=row.costs_s,
        why=row.why,
        state=WantedState(row.state),
        builder=row.builder,
        first_at=row.first_at,
        last_at=row.last_at,
    )
