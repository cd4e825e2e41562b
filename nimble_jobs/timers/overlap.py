"""Decides what a tick does while an earlier job of its timer is open. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nimble_jobs.job import JobState
from nimble_jobs.spec.model import CronSpec
from nimble_jobs.store import Tick, TickKind, TickOutcome
from nimble_jobs.store.firing import Planned, Policy, Turn
from nimble_jobs.store.open_jobs import Standing
from nimble_jobs.store.timer_records import utc


def policy(cron: CronSpec) -> Policy:
    """The decision of the timer's `overlap` about a due tick."""
    return partial(_turn, cron)


def may_go(tick: Tick) -> Callable[[Standing], bool]:
    """Whether a waiting tick may run. A tick of a backfill may if fewer than `max_running` of its jobs are open. Any
    other may once every job of its timer has ended and no older tick waits. Backfills are counted apart.
    """
    if tick.kind is TickKind.BACKFILL:
        return lambda there: there.backfills < (tick.max_running or 1)
    return lambda there: not there.regular and not any(earlier.due < tick.due for earlier in there.waiting)


def _turn(cron: CronSpec, planned: Planned, there: Standing) -> Turn:
    jobs, waiting = there.regular, there.waiting
    if cron.overlap == "allow" or not (jobs or waiting):
        return Turn(outcome=TickOutcome.SUBMITTED)
    why = f"job {jobs[0].id} had not ended" if jobs else f"the tick of {utc(waiting[0].due)} still waited"
    late = planned.kind is TickKind.CATCH_UP or any(tick.kind is TickKind.CATCH_UP for tick in waiting)
    # Catch-up ticks run one after another, and ticks that become due meanwhile run after them.
    if cron.catch_up == "all" and late:
        return Turn(outcome=TickOutcome.WAITING, reason=f"{why}; catch_up: all")
    match cron.overlap:
        case "queue" if not waiting:
            return Turn(outcome=TickOutcome.WAITING, reason=f"{why}; overlap: queue")
        case "queue":
            return Turn(
                outcome=TickOutcome.SKIPPED,
                reason=f"the tick of {utc(waiting[0].due)} is already waiting; overlap: queue",
            )
        case "replace":
            runs = any(job.state is JobState.RUNNING for job in jobs)
            return Turn(
                outcome=TickOutcome.WAITING if runs else TickOutcome.SUBMITTED,
                reason=f"{why}, and was asked to stop; overlap: replace" if runs else None,
                cancel=tuple(job.id for job in jobs),
                drop=tuple(tick.due for tick in waiting),
            )
    return Turn(outcome=TickOutcome.SKIPPED, reason=f"{why}; overlap: skip")
