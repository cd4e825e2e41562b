"""A worker's life: it holds a lock, supervises a child that runs jobs, and runs its duties."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from nimble_jobs.courier import Courier
from nimble_jobs.job import Job
from nimble_jobs.store import Store, WorkerLease
from nimble_jobs.worker import child as child_process
from nimble_jobs.worker.attend import attend
from nimble_jobs.worker.duties import Duty
from nimble_jobs.worker.firing import Fire
from nimble_jobs.worker.process import Child, Target
from nimble_jobs.worker.pruning import Prune
from nimble_jobs.worker.ranking import Ranking
from nimble_jobs.worker.reread import Reread
from nimble_jobs.worker.sending import LAST_NOTICES_S, Send
from nimble_jobs.worker.signals import StopSignals
from nimble_jobs.worker.supervisor import Supervisor
from nimble_jobs.worker.tracing import LAST_TRACES_S, Trace
from nimble_jobs.worker.upkeep import Recover, Sweep

log = logging.getLogger(__name__)


def duties_of(store: Store, *, on_lost: Callable[[Job], None] = lambda _job: None) -> tuple[Duty, ...]:
    """The duties of each worker beside its jobs, in order. `on_lost` gets the jobs that dead workers left."""
    return (Recover(store, on_lost), Sweep(store), Fire(store), Reread(store), Ranking(store), Prune(store))


def run(
    home: Path,
    *,
    devices: Sequence[str] = ("auto",),
    max_idle_s: float | None = None,
    max_time_s: float | None = None,
    gpu_memory_bytes: int | None = None,
    grace_s: float | None = None,
    target: Target = child_process.main,
) -> int:
    """Run a worker until SIGTERM, SIGINT, `max_time_s` or `max_idle_s` without work; return 0 if it ended as requested.

    Each of `devices` gets a child process, and a lock and an id of its own. `gpu_memory_bytes` is for each. After a
    signal or `max_time_s`, running jobs have `grace_s`, by default limits.grace, to reach a safe point. Raises
    SettingsError, UsageError if a device does not exist, StoreError if the state folder cannot be used, also for
    `max_idle_s` without a job, HomeReplaced if another folder took its place, NimbleError if no child gets ready.
    """

    def body(store: Store, leases: Sequence[WorkerLease], signals: StopSignals) -> bool:
        def seat(lease: WorkerLease, device: str) -> tuple[WorkerLease, Callable[[], Child]]:
            return lease, lambda: Child(target, home, lease.id, device, gpu_memory_bytes)

        name = ", ".join(lease.id for lease in leases)
        log.info("worker %s starts", name)
        courier = Courier(store, leases[0].id)
        trace = Trace(store)
        duties = (*duties_of(store, on_lost=trace.over), Send(courier), trace)
        with closing(
            Supervisor(
                store,
                list(map(seat, leases, devices)),
                signals,
                duties=duties,
                max_idle_s=max_idle_s,
                grace_s=grace_s,
                on_over=trace.over,
            )
        ) as supervisor:
            over = supervisor.loop()
        trace.finish(LAST_TRACES_S)
        courier.finish(LAST_NOTICES_S)
        log.info("worker %s ends", name)
        return over

    infos = [{"role": "worker", "device": device, "devices": len(devices)} for device in devices]
    return attend(home, infos, body, limit_s=max_time_s)
