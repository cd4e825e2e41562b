"""Duties of every worker: no job is forgotten whose worker is gone, or that waits for what can never come."""

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
    """Gives up the attempts of workers that died, and queues their jobs again."""

    name = "recover"
    every_s = INTERVAL_S

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, now: float) -> None:
        for job in self._store.recover(now=now):
            log.warning("%s: its worker is gone; the job is %s", job.id, job.state)
            tidy(self._store, job.id)


class Sweep:
    """Fails queued jobs that wait for one that ended badly."""

    name = "sweep"
    every_s = INTERVAL_S

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, now: float) -> None:
        self._store.jobs.sweep(now=now)


class Reclaim:
    """Queues jobs that the store says this worker runs, though it does not: a restored database may say so."""

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
                endings.requeued(self._store.jobs, job, "its worker lost track of it")
