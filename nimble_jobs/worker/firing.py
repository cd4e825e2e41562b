"""The duty of every worker, and of `cron serve`, to fire timers."""

from __future__ import annotations

import logging

from nimble_jobs.errors import StoreTrouble
from nimble_jobs.store import Store, Tick, TickOutcome
from nimble_jobs.store.timer_records import utc
from nimble_jobs.timers import Firer
from nimble_jobs.worker.duties import Every

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
_WARNED = (TickOutcome.MISSED, TickOutcome.ERROR)


class Fire:
    """Fires the timers that are due. All workers of a store do it: whoever is first."""

    name = "fire"

    def __init__(self, store: Store) -> None:
        self._firer = Firer(store)
        self._every = Every(INTERVAL_S)

    def due(self, now: float) -> bool:
        return self._every.due(now)

    def run(self, now: float) -> None:
        try:
            fired = self._firer.run(now)
        except StoreTrouble as error:  # the worker's loop waits for it, too, and says so
            log.debug("%s", error)
            self._every.done(now)
            return
        for tick in fired.ticks:
            log.log(logging.WARNING if tick.outcome in _WARNED else logging.INFO, "%s", _told(tick))
        if not fired.more:
            self._every.done(now)


def _told(tick: Tick) -> str:
    which = utc(tick.due) if tick.until is None else f"{utc(tick.due)} to {utc(tick.until)}"
    about = f" as {tick.job}" if tick.job else f": {tick.reason}" if tick.reason else ""
    return f"timer {tick.timer}: the {tick.kind} tick of {which} is {tick.outcome}{about}"
