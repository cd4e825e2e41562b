"""Is somebody there to fire timers, and do they come in time?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nimble_jobs.cli import output, render

if TYPE_CHECKING:
    from nimble_jobs.store import Store

NOBODY = (
    "WARNING: nobody fires timers: no worker runs, and no `nimble-jobs cron serve`. Ticks are missed until you start a "
    "worker with: nimble-jobs worker start --detach"
)
NOBODY_RUNS = "no worker is running, so jobs of timers wait; start one with: nimble-jobs worker start --detach"
LATE_S = 60.0  # a tick that could have been fired for so long is late


def warn(store: Store) -> None:
    """On stderr, loudly, where nobody fires timers; and where nobody runs their jobs."""
    from nimble_jobs import cron

    if not cron.firing(store=store):
        output.warn(NOBODY)
    else:
        warn_idle(store)


def warn_idle(store: Store) -> None:
    """On stderr, where no worker is there to run the jobs of timers."""
    from nimble_jobs import client

    if not client.live_workers(store=store):
        output.note(NOBODY_RUNS)


def findings(store: Store, now: float) -> Iterator[tuple[str, str]]:
    """What `doctor` says of timers: a status and its words. Nothing where there are none."""
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
            late = render.duration(each.late_s)
            yield "note", f"{each.timer.name}: its tick could have been fired {late} ago"
    yield "ok", f"{len(active):,} active, {len(watched) - len(active):,} paused"
