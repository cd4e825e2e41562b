"""A duty of every worker: the queue ages as config.yaml says."""

from __future__ import annotations

import logging

from nimble_jobs.spec.units import format_duration
from nimble_jobs.store import Store

log = logging.getLogger(__name__)


class Ranking:
    """Ranks the queued jobs anew when `queue.aging` is another than they were ranked by."""

    name = "ranking"
    every_s = 5.0

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, now: float) -> None:
        seconds = self._store.settings.usable().queue.aging
        if self._store.jobs.set_aging(seconds, now):
            log.info("the queue is ranked anew: %s of waiting make up for a priority of 1", format_duration(seconds))
