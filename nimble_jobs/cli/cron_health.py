"""Checks that a process fires the timers, and that ticks are not late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nimble_jobs.cli import output
from nimble_jobs.views import figures

if TYPE_CHECKING:
    from nimble_jobs.store import Store

NOBODY = (
    "WARNING: timers do not fire, because no worker and no `nimble-jobs cron serve` is running; start a worker with: "
    "nimble-jobs worker start --detach"
)
NOBODY_RUNS = "no worker is running, so the jobs of timers wait; start one with: nimble-jobs worker start --detach"
LATE_S = 60.0  # a tick that has been due for longer is late


def warn(store: Store) -> None:
    """Warn on stderr if no process fires timers, or if no worker runs their jobs."""
    from nimble_jobs import cron

    if not cron.firing(store=store):
        output.warn(NOBODY)
    else:
        warn_idle(store)


def warn_idle(store: Store) -> None:
    """Say on stderr that no worker runs the jobs of timers, if so."""
    from nimble_jobs import client

    if not client.live_workers(store=store):
        output.note(NOBODY_RUNS)


def findings(store: Store, now: float) -> Iterator[tuple[str, str]]:
    """What `doctor` reports about timers, as pairs of status and text. Nothing if there are no timers."""
    from nimble_jobs import cron

    watched = cron.timers(store=store, now=now)
    active = [each for each in watched if each.timer.state == "active"]
    if not watched:
        return
    if active and not cron.firing(store=store):
        yield "problem", NOBODY.removeprefix("WARNING: ")
    for each in watched:
        if each.cron is None:
            yield "problem", f"{each.timer.name}: {each.words}"
        elif each.late_s > LATE_S:
            late = figures.duration(each.late_s)
            yield "note", f"{each.timer.name}: its tick has been due for {late}"
    yield "ok", f"{len(active):,} active, {len(watched) - len(active):,} paused"
