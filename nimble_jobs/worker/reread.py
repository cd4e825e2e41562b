"""A duty of every worker: it sees that config.yaml was edited, and says whether the new values are used."""

from __future__ import annotations

import logging

from nimble_jobs.store import Store
from nimble_jobs.worker.duties import Every

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


class Reread:
    """Reads config.yaml again after each change. While it is broken the values from before stay in force."""

    name = "settings"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._every = Every(INTERVAL_S)
        self._used = store.settings.usable()
        self._problem: str | None = None

    def due(self, now: float) -> bool:
        return self._every.due(now)

    def run(self, now: float) -> None:
        problem = self._store.settings.problem
        settings = self._store.settings.usable()
        if problem is not None and problem != self._problem:
            log.error("config.yaml is not valid; the values from before stay in force:\n%s", problem)
            self._store.jobs.event("settings", f"not valid, the values from before stay in force: {problem}", now=now)
        elif problem is None and (self._problem is not None or settings is not self._used):
            log.info("config.yaml was read again")
            self._store.jobs.event("settings", "config.yaml was read again", now=now)
        self._problem, self._used = problem, settings
        self._every.done(now)
