"""A duty of every worker: notices edits of config.yaml, and reports whether the new values are used."""

from __future__ import annotations

import logging

from nimble_jobs.store import Store

log = logging.getLogger(__name__)


class Reread:
    """Reads config.yaml again after each change. If the file is broken, the previous values stay in effect."""

    name = "settings"
    every_s = 5.0

    def __init__(self, store: Store) -> None:
        self._store = store
        self._used = store.settings.usable()
        self._problem: str | None = None

    def run(self, now: float) -> None:
        problem = self._store.settings.problem
        settings = self._store.settings.usable()
        if problem is not None and problem != self._problem:
            log.error("config.yaml is not valid; the previous values stay in effect:\n%s", problem)
            self._store.jobs.event("settings", f"not valid; the previous values stay in effect: {problem}", now=now)
        elif problem is None and (self._problem is not None or settings is not self._used):
            log.info("config.yaml was read again")
            self._store.jobs.event("settings", "config.yaml was read again", now=now)
        self._problem, self._used = problem, settings
