"""Totals of hits and misses, which outlive the schedules.

`count_hit` and `count_miss` only note a use. The database writes the uses of a transaction after all else but `totals`,
in the order of their keys, so that transactions of a database with several writers lock the rows in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Integer, Table, bindparam, select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import Hit
from nimble_jobs.store.changes import run
from nimble_jobs.store.tables import ScheduleRow, UseRow
from nimble_jobs.store.upsert import Upsert
from nimble_jobs.store.words import words

_PENDING = "nimble_jobs.uses"  # where a session keeps its uses until it writes them
_REASON_LENGTH = 200
_SCHEDULE_TABLE, _USE_TABLE = cast(Table, ScheduleRow.__table__), cast(Table, UseRow.__table__)
_SCHEDULES = _SCHEDULE_TABLE.c
_USED = (
    update(_SCHEDULE_TABLE)
    .where(_SCHEDULES.key == bindparam("of_key"))
    .values(
        last_used_at=bindparam("now"),
        hits=_SCHEDULES.hits + 1,
        resident_hits=_SCHEDULES.resident_hits + bindparam("resident", type_=Integer),
    )
    .returning(_SCHEDULES.build_s)
)

Use = tuple[str, Hit, str, float]  # key, hit, reason, time


@dataclass(frozen=True, kw_only=True)
class Uses:
    """All uses since the state folder was made."""

    resident: int
    stored: int
    misses: dict[str, int]  # by reason
    saved_s: float  # for each hit, the build time of its schedule

    @property
    def total(self) -> int:
        return self.resident + self.stored + sum(self.misses.values())


def count_hit(session: Session, key: str, hit: Hit, now: float) -> None:
    """Count a hit of a schedule, on its row and in the totals. Does nothing if the schedule is gone."""
    session.info.setdefault(_PENDING, []).append((key, hit, "", now))


def count_miss(session: Session, reason: str, now: float) -> None:
    """Count a miss by its reason, without the details after a colon."""
    reason = words(reason).partition(":")[0][:_REASON_LENGTH]
    session.info.setdefault(_PENDING, []).append(("", Hit.MISS, reason, now))


def write(session: Session) -> None:
    """Write what was counted in this session. `Database` calls this."""
    pending: list[Use] = session.info.pop(_PENDING, [])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for key, hit, reason, now in sorted(pending, key=lambda use: use[0]):
        saved_s: float | None = 0.0
        if hit is not Hit.MISS:
            of_key = {"of_key": key, "now": now, "resident": int(hit is Hit.RESIDENT)}
            saved_s = run(session, _USED, **of_key).scalar_one_or_none()
        if saved_s is None:
            continue
        new = {"hit": hit.value, "reason": reason, "count": 0, "saved_s": 0.0, "last_at": now}
        row = rows.setdefault((hit.value, reason), new)
        row |= {"count": row["count"] + 1, "saved_s": row["saved_s"] + saved_s, "last_at": max(row["last_at"], now)}
    if rows:
        session.connection().execute(_ADD.of(session), [rows[name] for name in sorted(rows)])


def total_uses(session: Session) -> Uses:
    """The totals; the most frequent reasons come first."""
    rows = session.scalars(select(UseRow).order_by(UseRow.count.desc(), UseRow.reason)).all()
    hits = {row.hit: row.count for row in rows if row.hit != Hit.MISS.value}
    return Uses(
        resident=hits.get(Hit.RESIDENT.value, 0),
        stored=hits.get(Hit.STORED.value, 0),
        misses={row.reason: row.count for row in rows if row.hit == Hit.MISS.value},
        saved_s=sum(row.saved_s for row in rows),
    )


def _add(insert: Callable[..., Any]) -> Any:
    new = insert(_USE_TABLE)
    changes = {name: _USE_TABLE.c[name] + new.excluded[name] for name in ("count", "saved_s")}
    changes["last_at"] = new.excluded.last_at
    return new.on_conflict_do_update(index_elements=["hit", "reason"], set_=changes)


_ADD = Upsert(_add)
