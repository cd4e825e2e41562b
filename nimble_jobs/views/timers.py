"""Timers and their ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.cron import Watched
    from nimble_jobs.job import Job
    from nimble_jobs.store import Due, Tick, Timer

NOBODY = (
    "WARNING: timers do not fire, because no worker and no `nimble-jobs cron serve` is running; start a worker with: "
    "nimble-jobs worker start --detach"
)
NOBODY_RUNS = "no worker is running, so the jobs of timers wait; start one with: nimble-jobs worker start --detach"
LATE_S = 60.0  # a tick that has been due for longer is late


def timer_row(watched: Watched, now: float) -> Row:
    """A timer's row in `cron ls`."""
    from nimble_jobs.ticks import local_text

    timer, last, due, cron = watched.timer, watched.last, watched.next, watched.cron
    return {
        "name": timer.name,
        "state": timer.state.value,
        "expression": cron.expression if cron else None,
        "timezone": cron.timezone if cron else None,
        "words": watched.words,
        "last_tick": figures.iso(last.due) if last else None,
        "last_kind": last.kind.value if last else None,
        "last_outcome": last.outcome.value if last else None,
        "last_job": last.job if last else None,
        "last_state": watched.last_state.value if watched.last_state else None,
        "last_reason": last.reason if last else None,
        "last_error": watched.last_error,
        "next_tick": figures.iso(due.tick) if due else None,
        "next_local": local_text(due.tick, cron.timezone) if due and cron else None,
        "next_at": figures.iso(due.at) if due else None,
        "late_s": round(watched.late_s, 3),
        "in_s": round(due.at - now, 3) if due else None,
        "overlap": cron.overlap if cron else None,
        "catch_up": cron.catch_up if cron else None,
        "since": figures.iso(timer.since),
        "file": timer.file,
    }


def tick_row(tick: Tick, zone: str, job: Job | None = None) -> Row:
    """A past tick and its job."""
    from nimble_jobs.ticks import local_text

    return {
        "tick": figures.iso(tick.due),
        "local": local_text(tick.due, zone),
        "until": figures.iso(tick.until),
        "count": tick.count,
        "kind": tick.kind.value,
        "outcome": tick.outcome.value,
        "job": tick.job,
        "state": job.state.value if job else None,
        "reason": tick.reason,
        "error": job.error if job else None,
        "at": figures.iso(tick.at),
    }


def zone_of(timer: Timer) -> str:
    """The zone of a timer; UTC if its spec cannot be read."""
    cron = timer.spec.get("cron")
    return str(cron.get("timezone", "UTC")) if isinstance(cron, dict) else "UTC"


def upcoming_rows(timer: Timer, count: int, now: float) -> list[Row]:
    """The next ticks of one timer."""
    from nimble_jobs.timers import upcoming

    return due_rows(timer.name, zone_of(timer), upcoming(timer, count, now=now), now)


def due_rows(name: str, zone: str, dues: Sequence[Due], now: float) -> list[Row]:
    """Rows of future ticks."""
    from nimble_jobs.ticks import local_text

    return [
        {
            "name": name,
            "tick": figures.iso(due.tick),
            "local": local_text(due.tick, zone),
            "timezone": zone,
            "at": figures.iso(due.at),
            "in_s": round(due.at - now, 3),
        }
        for due in dues
    ]
