"""A duty of every worker: reads the orders of `worker pause`, `drain`, `resume` and `restart`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nimble_jobs.store import Order, Store, Wanted

log = logging.getLogger(__name__)


class Heed:
    """Knows this worker's order: to run, to pause, to drain, or to restart its child."""

    name = "orders"
    every_s = 0.5  # a user waits this long for an answer

    def __init__(self, store: Store, worker: str, *, on_change: Callable[[], None]) -> None:
        self._store = store
        self._worker = worker
        self._on_change = on_change
        self.order = Order()
        self.restarted = 0  # number of requested restarts that have begun

    def run(self, now: float) -> None:
        order = self._store.orders.of(self._worker)
        self.restarted = min(self.restarted, order.restarts)  # a restored database may hold a lower number
        if order != self.order:
            before, self.order = self.order, order
            if order.wanted is not before.wanted:
                log.info("asked to %s", order.wanted)
            self._on_change()

    @property
    def wanted(self) -> Wanted:
        """Whether to take new jobs."""
        return self.order.wanted

    def restart(self) -> bool:
        """Whether a fresh child was requested. True once for each request."""
        wanted = self.order.restarts > self.restarted
        self.restarted = self.order.restarts
        return wanted
