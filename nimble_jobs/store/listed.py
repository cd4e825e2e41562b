"""Jobs for listings: filtered, sorted and limited by the database, without their specs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from sqlalchemy import ColumnElement, Select, case, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from nimble_jobs.job import Job, JobState
from nimble_jobs.store.records import job_record
from nimble_jobs.store.tables import JobRow

T = TypeVar("T")
_ORDERS: dict[str, Callable[[Any, Any], ColumnElement[bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
AT_ONCE = 500  # most rows in one transaction
EXAMINED = 10_000  # most jobs that one page reads
_INDEXED = {"state": 0, "kind": 1}  # columns with an index in the order of submission, the better one first
TEXT = "text"  # of Match.column: the name or the error
_JSON = ("spec", "schedule", "timings", "outputs")  # long, and not shown
_BRIEF = tuple(column for column in JobRow.__table__.columns if column.key not in _JSON)
_STORED = {
    name: getattr(JobRow, name)
    for name in (
        *("id", "name", "kind", "state", "attempt", "created_at", "started_at", "finished_at"),
        *("records_done", "records_total", "records_bad", "phase", "device", "priority", "worker", "error"),
        *("held", "array", "array_index", "urgency", "skipped_by"),
        *("hit", "runs"),
    )
} | {"group": JobRow.group_name}
COLUMNS = (*_STORED, "elapsed_s", "records_per_s")  # what a listing can be filtered and sorted by


@dataclass(frozen=True, kw_only=True)
class Match:
    """A condition that the database checks. Rows that pass are checked again unless it is `exact`."""

    column: str  # of COLUMNS, or TEXT
    # `like`: a pattern with * and ?; `contains`: a text, whatever its case
    compare: Literal["=", "!=", "<", "<=", ">", ">=", "in", "not in", "like", "not like", "contains"]
    value: Any  # a number, a text, a sequence for `in` and `not in`; None for null, with = and !=
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which jobs, and in which order. `now`, in Unix seconds, is the end of running jobs' elapsed time."""

    matches: Sequence[Match] = ()
    sort: str | None = None  # of COLUMNS: equal ones the newest first, nulls last. None: the newest first
    descending: bool = False
    limit: int | None = None
    now: float


def numbers_of(session: Session, wanted: Wanted) -> list[int]:
    """The `seq` of each job that passes every match, in order; `limit` of them at most."""
    return list(session.scalars(_query(session, JobRow.seq, wanted)))


def page_of(session: Session, wanted: Wanted, *, before: int | None) -> tuple[list[int], int | None]:
    """The `seq` of `limit` jobs at most, the newest first, from `before` on, and where the next page begins.

    An index serves the first match on state or kind. The other matches are checked for at most EXAMINED jobs, so that
    rare ones do not read the whole table: the page may then be short, or empty, though another one follows.
    """
    assert wanted.limit is not None
    sqlite = session.get_bind().dialect.name == "sqlite"
    matches = sorted(wanted.matches, key=lambda match: _INDEXED.get(match.column, len(_INDEXED)))
    served = matches[:1] if matches and matches[0].column in _INDEXED and matches[0].compare == "=" else []
    others = [_clause(match, wanted.now, sqlite=sqlite) for match in matches[len(served) :]]
    some = select(JobRow.seq).where(*(_clause(match, wanted.now, sqlite=sqlite) for match in served))
    some = some.where(JobRow.seq < before) if before is not None else some
    some = some.order_by(JobRow.seq.desc())
    most = wanted.limit
    if not others:
        numbers = list(session.scalars(some.limit(most + 1)))
        return numbers[:most], numbers[most - 1] if len(numbers) > most else None
    last = session.scalar(some.offset(EXAMINED - 1).limit(1))  # None: fewer are left
    least = [JobRow.seq >= last] if last is not None else []
    numbers = list(session.scalars(some.where(*least, *others).limit(most + 1)))
    return numbers[:most], numbers[most - 1] if len(numbers) > most else last


def ids_of(session: Session, wanted: Wanted) -> list[str]:
    """The id of each job that passes every match, in order; `limit` of them at most."""
    return list(session.scalars(_query(session, JobRow.id, wanted)))


def _query(session: Session, what: InstrumentedAttribute[T], wanted: Wanted) -> Select[T]:
    sqlite = session.get_bind().dialect.name == "sqlite"
    query = select(what).where(*(_clause(match, wanted.now, sqlite=sqlite) for match in wanted.matches))
    if wanted.sort is not None:
        column = _column(wanted.sort, wanted.now)
        query = query.order_by(column.desc().nulls_last() if wanted.descending else column.asc().nulls_last())
    return query.order_by(JobRow.seq.desc()).limit(wanted.limit)


def count_of(session: Session, matches: Sequence[Match], now: float) -> int:
    """How many jobs pass every match."""
    sqlite = session.get_bind().dialect.name == "sqlite"
    query = select(func.count()).select_from(JobRow).where(*(_clause(match, now, sqlite=sqlite) for match in matches))
    return int(session.scalar(query) or 0)


def jobs_of(session: Session, numbers: Sequence[int]) -> list[Job]:
    """The jobs with these `seq`, in this order, without their specs. Jobs that were removed meanwhile are left out."""
    rows = {row.seq: row for row in session.execute(select(*_BRIEF).where(JobRow.seq.in_(numbers)))}
    return [job_record(rows[number], spec=False) for number in numbers if number in rows]  # type: ignore[arg-type]  # a row with the same names


def _column(name: str, now: float) -> ColumnElement[Any]:
    until = func.coalesce(JobRow.finished_at, now)
    if name == "elapsed_s":
        return case((until < JobRow.started_at, 0.0), else_=until - JobRow.started_at)
    if name == "records_per_s":
        runs = (JobRow.state == JobState.RUNNING.value) & (JobRow.records_done > 0) & (JobRow.started_at < now)
        return func.coalesce(JobRow.rate, case((runs, JobRow.records_done / (now - JobRow.started_at))))
    column: ColumnElement[Any] = _STORED[name].expression
    return column


def _clause(match: Match, now: float, *, sqlite: bool) -> ColumnElement[bool]:
    value = match.value
    if match.column == TEXT:
        where = [func.lower(column).contains(value.lower(), autoescape=True) for column in (JobRow.name, JobRow.error)]
        return or_(*where)
    column = _column(match.column, now)
    match match.compare:
        case "=":
            return column.is_(None) if value is None else column == value
        case "!=":
            return column.is_not(None) if value is None else or_(column.is_(None), column != value)
        case "in":
            return column.in_(value)
        case "not in":
            return or_(column.is_(None), column.not_in(value))
        case "like":
            return _like(column, value, sqlite=sqlite)
        case "not like":
            return or_(column.is_(None), ~_like(column, value, sqlite=sqlite))
        case "contains":
            raise AssertionError(match.column)
        case order:
            return _ORDERS[order](column, value)


def _like(column: ColumnElement[Any], pattern: str, *, sqlite: bool) -> ColumnElement[bool]:
    """SQLite's LIKE ignores case, and its GLOB does not."""
    if sqlite:
        return column.op("GLOB", is_comparison=True)(pattern)
    for plain in "/%_":
        pattern = pattern.replace(plain, f"/{plain}")
    return column.like(pattern.replace("*", "%").replace("?", "_"), escape="/")
