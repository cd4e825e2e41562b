"""Rows of ticks, and the totals of what became of them. A tick that waits is counted once it no longer does."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert
from sqlalchemy.orm import Session

from nimble_jobs.store import totals
from nimble_jobs.store.timer_records import Tick, TickOutcome, tick_values
from nimble_jobs.store.timer_tables import TickRow
from nimble_jobs.store.totals import Total


def insert_ticks(session: Session, ticks: Sequence[Tick]) -> None:
    """Insert rows for these ticks."""
    session.execute(insert(TickRow), [tick_values(tick) for tick in ticks])
    for tick in ticks:
        count_ticks(session, tick.outcome, tick.count)


def count_ticks(session: Session, outcome: TickOutcome, count: int = 1) -> None:
    """So many ticks got this outcome."""
    if outcome is not TickOutcome.WAITING:
        totals.add(session, Total.TICK, outcome=outcome.value, count=count)
