"""A duty of every worker: applies `queue.aging` of config.yaml to the queue."""

from __future__ import annotations

import logging

from nimble_jobs.spec.units import format_duration
from nimble_jobs.store import Store

log = logging.getLogger(__name__)


class Ranking:
    """Ranks the queued jobs anew when `queue.aging` has changed."""

    name = "ranking"
    every_s = 5.0

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, now: float) -> None:
        seconds = self._store.settings.usable().queue.aging
        if self._store.jobs.set_aging(seconds, now):
            log.info("the queue was re-ranked: a wait of %s now equals one step of priority", format_duration(seconds))
