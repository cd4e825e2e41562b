"""Notifications about ticks without a job. One notification reports all ticks of one look at a timer, and of earlier
looks whose notification has not been sent yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from nimble_jobs.store.notices import News, NoticeState, queue, routes_of
from nimble_jobs.store.outbox_table import NoticeRow
from nimble_jobs.store.records import dump, load_object
from nimble_jobs.store.timer_records import Tick, TickOutcome, Timer, utc

_EVENT = "missed"
_REASON_CHARS = 300


def queue_missed(session: Session, timer: Timer, ticks: Sequence[Tick], now: float) -> None:
    """Queue the notification in the transaction that writes the ticks. Ticks with errors count as missed too."""
    lost = [tick for tick in ticks if tick.outcome in (TickOutcome.MISSED, TickOutcome.ERROR)]
    if not lost:
        return
    first, last = lost[0], lost[-1]
    until = utc(last.due if last.until is None else last.until)
    count = sum(tick.count for tick in lost)
    facts = {
        "name": timer.name,
        "timer": timer.name,
        "ticks": count,
        "first_due": utc(first.due),
        "last_due": until,
        "outcome": last.outcome.value,
        "reason": " ".join((last.reason or "").split())[:_REASON_CHARS] or None,
        "at": utc(now),
    }
    if _add_to_unsent(session, facts):
        return
    notify = timer.spec.get("notify")
    targets = routes_of(session, notify)
    queue(session, News(event=_EVENT, name=timer.name, body={"text": _text(facts), **facts}), targets, notify, now)


def _add_to_unsent(session: Session, facts: Mapping[str, Any]) -> bool:
    """Add the ticks to a notification that has not been tried yet, since a long absence leads to many looks."""
    unsent = select(NoticeRow).where(
        NoticeRow.state == NoticeState.PENDING.value,
        NoticeRow.event == _EVENT,
        NoticeRow.name == facts["name"],
        NoticeRow.attempts == 0,
    )
    rows = list(session.scalars(unsent.with_for_update()))
    for row in rows:
        body = load_object(row.body)
        merged = {**facts, "ticks": body["ticks"] + facts["ticks"], "first_due": body["first_due"]}
        row.body = dump({**body, **merged, "text": _text(merged)})
    session.flush()
    return bool(rows)


def _text(facts: Mapping[str, Any]) -> str:
    """The missed ticks in one line."""
    several = f"{facts['ticks']} ticks, {facts['first_due']} to {facts['last_due']}"
    when = facts["first_due"] if facts["ticks"] == 1 else several
    return f"{facts['timer']}: missed: {when}" + (f": {facts['reason']}" if facts["reason"] else "")
