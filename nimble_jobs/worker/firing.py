"""The duty of every worker, and of `cron serve`, to fire timers."""

from __future__ import annotations

import logging

from nimble_jobs.errors import StoreTrouble
from nimble_jobs.store import Store, Tick, TickOutcome
from nimble_jobs.store.timer_records import utc
from nimble_jobs.timers import Firer

log = logging.getLogger(__name__)

_WARNED = (TickOutcome.MISSED, TickOutcome.ERROR)


class Fire:
    """Fires due timers. All workers of a store do this, and the first one wins."""

    name = "fire"
    every_s = 1.0

    def __init__(self, store: Store) -> None:
        self._firer = Firer(store)

    def run(self, now: float) -> bool:
        try:
            fired = self._firer.run(now)
        except StoreTrouble as error:  # the worker's loop waits for the same store, and reports it
            log.debug("%s", error)
            return False
        for tick in fired.ticks:
            log.log(logging.WARNING if tick.outcome in _WARNED else logging.INFO, "%s", _told(tick))
        return fired.more


def _told(tick: Tick) -> str:
    which = utc(tick.due) if tick.until is None else f"{utc(tick.due)} to {utc(tick.until)}"
    about = f" as {tick.job}" if tick.job else f": {tick.reason}" if tick.reason else ""
    return f"timer {tick.timer}: the {tick.kind} tick of {which} is {tick.outcome}{about}"
