"""Running workers, and what they answer to orders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row
from nimble_jobs.views.members import busy_workers

if TYPE_CHECKING:
    from nimble_jobs.job import Job
    from nimble_jobs.store import Order, Store, WorkerInfo
    from nimble_jobs.store.health import Health

_STATUS = {"pause": "paused", "drain": "draining"}
# What a worker with a job, and one without, does once it obeys. `{job}` is the job's name and id.
DRAINS = ("finishes {job}, then stops", "stops")
PAUSES = ("paused; {job} continues", "paused")
RESUMES = ("takes jobs again", "takes jobs again")
RESTARTS = ("restarts its process once {job} is given back", "restarts its process")


def worker_rows(store: Store) -> list[Row]:
    """The JSON rows of `worker ls`."""
    from nimble_jobs import client
    from nimble_jobs.store.health import health_of

    now = time.time()
    live = client.live_workers(store=store)
    ids = [worker.id for worker in live]
    residents = store.schedules.residents(ids)
    orders = store.orders.of_each(ids)
    running = _running(store)
    health = {worker.id: health_of(worker, store.home) for worker in live}
    return [
        _row(worker, running.get(worker.id), health[worker.id], orders[worker.id], now)
        | {"residents": sorted(key for key, holders in residents.items() if worker.id in holders)}
        for worker in live
    ]


def _running(store: Store) -> dict[str, Job]:
    """The job that each busy worker works on."""
    jobs = {job.id: job for job in store.jobs.running()}
    return {worker: jobs[job] for worker, job in busy_workers(store).items() if job in jobs}


def _row(worker: WorkerInfo, job: Job | None, health: Health, order: Order, now: float) -> Row:
    return {
        "id": worker.id,
        "pid": worker.pid or None,
        "host": worker.info.get("host"),
        "device": worker.device,
        "status": _STATUS.get(order.wanted, worker.status),
        "job": job.id if job else None,
        "lent": worker.info.get("lent"),
        "phase": job.phase if job else None,
        "health": health.state,
        "health_words": health.words or None,
        "seen_s": _rounded(health.seen_s),
        "progress_s": _rounded(health.progress_s),
        "stall_s": worker.info.get("stall_s"),
        "failing": worker.info.get("failing") or {},
        "software": worker.info.get("software") or {},
        "apart": worker.info.get("apart") or {},
        "started_at": figures.iso(worker.started_at),
        "up_s": round(now - worker.started_at, 3),
    }


def answers(store: Store, asked: Sequence[WorkerInfo], what: tuple[str, str]) -> list[Row]:
    """What each worker said to an order, after at most a few seconds. `what`: DRAINS, PAUSES, RESUMES or RESTARTS."""
    from nimble_jobs import control

    busy, idle = what
    answered = control.answered(store, asked)
    running = _running(store)

    def words(worker: WorkerInfo) -> str:
        job = running.get(worker.id)
        if worker.id not in answered:
            return "has not answered yet; it obeys once it is responsive again (see nimble-jobs worker ls)"
        if answered[worker.id] is None:
            return "has stopped"
        return busy.format(job=f"{job.name} {job.id}") if job else idle

    return [
        {
            "id": worker.id,
            "pid": worker.pid or None,
            "answered": worker.id in answered,
            "left": worker.id in answered and answered[worker.id] is None,
            "job": running[worker.id].id if worker.id in running else None,
            "words": words(worker),
        }
        for worker in asked
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
