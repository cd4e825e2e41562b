"""Totals of hits and misses, which outlive the schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from sqlalchemy import Double, Integer, Table, bindparam, select, update
from sqlalchemy.orm import Session

from nimble_jobs.job import Hit
from nimble_jobs.store.changes import run
from nimble_jobs.store.tables import ScheduleRow, UseRow
from nimble_jobs.store.words import words

_REASON_LENGTH = 200
_SCHEDULE_TABLE, _USE_TABLE = cast(Table, ScheduleRow.__table__), cast(Table, UseRow.__table__)
_SCHEDULES, _USES = _SCHEDULE_TABLE.c, _USE_TABLE.c
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
_MORE = (
    update(_USE_TABLE)
    .where(_USES.hit == bindparam("of_hit"), _USES.reason == bindparam("of_reason"))
    .values(count=_USES.count + 1, saved_s=_USES.saved_s + bindparam("saved", type_=Double), last_at=bindparam("now"))
)


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
    build_s = run(session, _USED, of_key=key, now=now, resident=int(hit is Hit.RESIDENT)).scalar_one_or_none()
    if build_s is not None:
        _add(session, hit, "", now, saved_s=build_s)


def count_miss(session: Session, reason: str, now: float) -> None:
    """Count a miss by its reason, without the details after a colon."""
    _add(session, Hit.MISS, words(reason).partition(":")[0][:_REASON_LENGTH], now)


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


def _add(session: Session, hit: Hit, reason: str, now: float, *, saved_s: float = 0.0) -> None:
    if not run(session, _MORE, of_hit=hit.value, of_reason=reason, saved=saved_s, now=now).rowcount:
        session.add(UseRow(hit=hit.value, reason=reason, count=1, saved_s=saved_s, last_at=now))
        session.flush()
