"""What is told about ticks that got no job: one notification for all of one look at a timer."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from nimble_jobs.store.notices import queue
from nimble_jobs.store.timer_records import Tick, TickOutcome, Timer, utc

_REASON_CHARS = 300


def queue_missed(session: Session, timer: Timer, ticks: Sequence[Tick], now: float) -> None:
    """Write it into the transaction that writes the ticks. Those that could not be submitted are missed, too."""
    lost = [tick for tick in ticks if tick.outcome in (TickOutcome.MISSED, TickOutcome.ERROR)]
    if not lost:
        return
    first, last = lost[0], lost[-1]
    count = sum(tick.count for tick in lost)
    until = last.due if last.until is None else last.until
    when = utc(first.due) if count == 1 else f"{count} ticks, {utc(first.due)} to {utc(until)}"
    reason = " ".join((last.reason or "").split())[:_REASON_CHARS]
    facts = {
        "name": timer.name,
        "timer": timer.name,
        "ticks": count,
        "first_due": utc(first.due),
        "last_due": utc(until),
        "outcome": last.outcome.value,
        "reason": reason or None,
        "at": utc(now),
    }
    text = f"{timer.name}: missed: {when}" + (f": {reason}" if reason else "")
    notify = timer.spec.get("notify")
    queue(session, "missed", name=timer.name, text=text, facts=facts, now=now, notify=notify)
