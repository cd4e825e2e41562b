"""Jobs as a listing asks for them: filtered, sorted and cut by the database, and without their specs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session, defer

from nimble_jobs.job import Job
from nimble_jobs.store.records import job_record
from nimble_jobs.store.tables import JobRow

_ORDERS: dict[str, Callable[[Any, Any], ColumnElement[bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_AT_ONCE = 200  # rows fetched together
COLUMNS: dict[str, InstrumentedAttribute[Any]] = {
    name: getattr(JobRow, name)
    for name in (
        *("id", "name", "kind", "state", "attempt", "created_at", "started_at", "finished_at"),
        *("records_done", "records_total", "records_bad", "phase", "device", "priority", "worker", "error"),
        *("held", "array", "array_index", "urgency", "skipped_by"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Match:
    """A condition on a column that the database checks. Rows that it lets through are checked again unless `exact`."""

    column: str  # of COLUMNS
    compare: Literal["=", "!=", "<", "<=", ">", ">=", "in", "not in"]
    value: Any  # a number, a text, a sequence for the last two; None for null, with = and !=
    exact: bool = True


def jobs_listed(
    session: Session,
    *,
    matches: Sequence[Match] = (),
    keep: Callable[[Job], bool] | None = None,
    sort: str | None = None,
    descending: bool = False,
    limit: int | None = None,
) -> list[Job]:
    """The jobs that pass every match and `keep`; `limit` of them at most. Their `spec` is empty.

    `sort` is a name of COLUMNS: equal ones the newest first, nulls last. None: the newest first.
    """
    query = _ordered(select(JobRow).options(defer(JobRow.spec, raiseload=True)), sort, descending=descending)
    query = query.where(*(_clause(match) for match in matches))
    if keep is None:
        return [job_record(row, spec=False) for row in session.scalars(query.limit(limit))]
    found: list[Job] = []
    for row in session.scalars(query, execution_options={"yield_per": _AT_ONCE}):
        job = job_record(row, spec=False)
        if keep(job):
            found.append(job)
            if len(found) == limit:
                break
    return found


def _ordered(query: Select[Any], sort: str | None, *, descending: bool) -> Select[Any]:
    if sort is None:
        return query.order_by(JobRow.seq.desc())
    column = COLUMNS[sort]
    return query.order_by(column.desc().nulls_last() if descending else column.asc().nulls_last(), JobRow.seq.desc())


def _clause(match: Match) -> ColumnElement[bool]:
    column, value = COLUMNS[match.column], match.value
    clause: ColumnElement[bool]
    match match.compare:
        case "=":
            clause = column.is_(None) if value is None else column == value
        case "!=":
            clause = column.is_not(None) if value is None else or_(column.is_(None), column != value)
        case "in":
            clause = column.in_(value)
        case "not in":
            clause = or_(column.is_(None), column.not_in(value))
        case order:
            clause = _ORDERS[order](column, value)
    return clause
