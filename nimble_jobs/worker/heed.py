"""A duty of every worker: it reads what it has been asked to do."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nimble_jobs.store import Order, Store, Wanted

log = logging.getLogger(__name__)


class Heed:
    """Knows what is wanted of this worker: to go on, to pause, to drain, to restart its child."""

    name = "orders"
    every_s = 0.5  # how long somebody waits who asks for something

    def __init__(self, store: Store, worker: str, *, on_change: Callable[[], None]) -> None:
        self._store = store
        self._worker = worker
        self._on_change = on_change
        self.order = Order()
        self.restarted = 0  # of the restarts that were asked for, so many are begun

    def run(self, now: float) -> None:
        order = self._store.orders.of(self._worker)
        self.restarted = min(self.restarted, order.restarts)  # a restored database knows of fewer
        if order != self.order:
            before, self.order = self.order, order
            if order.wanted is not before.wanted:
                log.info("asked to %s", order.wanted)
            self._on_change()

    @property
    def wanted(self) -> Wanted:
        """What to do about new jobs."""
        return self.order.wanted

    def restart(self) -> bool:
        """Is a fresh child wanted? True once for each time that it was asked for."""
        wanted = self.order.restarts > self.restarted
        self.restarted = self.order.restarts
        return wanted
