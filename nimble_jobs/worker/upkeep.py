"""Duties of every worker: recover jobs of dead workers, and end jobs whose wait can never end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nimble_jobs.job import Job
from nimble_jobs.store import Store
from nimble_jobs.worker import endings
from nimble_jobs.worker.leftovers import tidy

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


class Recover:
    """Ends the attempts of dead workers, and queues their jobs again."""

    name = "recover"
    every_s = INTERVAL_S

    def __init__(self, store: Store, on_lost: Callable[[Job], None] = lambda _job: None) -> None:
        self._store = store
        self._on_lost = on_lost

    def run(self, now: float) -> None:
        for job in self._store.recover(now=now):
            log.warning("%s: its worker is gone; the job is %s", job.id, job.state)
            self._on_lost(job)
            tidy(self._store, job.id)


class Sweep:
    """Cancels queued jobs that wait for an end that can no longer happen."""

    name = "sweep"
    every_s = INTERVAL_S

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, now: float) -> None:
        self._store.jobs.sweep(now=now)


class Reclaim:
    """Queues jobs that this worker runs according to the store, but not in fact, as after a restored database."""

    name = "reclaim"
    every_s = INTERVAL_S

    def __init__(self, store: Store, worker: str, running: Callable[[], Job | None]) -> None:
        self._store = store
        self._worker = worker
        self._running = running

    def run(self, now: float) -> None:
        running = self._running()
        mine = running and (running.id, running.attempt)
        for job in self._store.jobs.running():
            if job.worker == self._worker and (job.id, job.attempt) != mine:
                endings.requeued(self._store.jobs, job, "its worker no longer ran it")
