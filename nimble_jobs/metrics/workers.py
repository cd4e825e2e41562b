"""The workers of a state folder, as metrics tell about them."""

from __future__ import annotations

from dataclasses import dataclass

from nimble_jobs.store import Order, Store, WorkerInfo
from nimble_jobs.store.figures import Figures
from nimble_jobs.store.health import Health, health_of

# What a worker is doing; a worker in trouble has the state that `worker ls` shows.
STATES = ("starting", "idle", "busy", "paused", "draining", "waits", "still", "stuck", "deaf", "unknown")
_ORDERED = {"pause": "paused", "drain": "draining"}
_FIRING = ("worker", "cron")  # roles of processes that fire timers


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A running worker."""

    slot: str  # the number of its lock: short, and used again by later workers, unlike its id
    device: str
    state: str  # of STATES
    still_s: float | None  # since its job last made progress; None without a job
    residents: int
    residents_bytes: int


def read_workers(store: Store, figures: Figures) -> tuple[list[Worker], int]:
    """The running workers, and how many processes fire timers. Raises StoreError."""
    live = store.workers.live(*_FIRING)
    workers = [info for info in live if info.info.get("role") == "worker"]
    orders = store.orders.of_each([info.id for info in workers])
    return [_worker(store, info, orders[info.id], figures) for info in workers], len(live)


def _worker(store: Store, info: WorkerInfo, order: Order, figures: Figures) -> Worker:
    health = health_of(info, store.home)
    residents, nbytes = figures.residents.get(info.id, (0, 0))
    return Worker(
        slot=info.id.partition("-")[0],
        device=info.device,
        state=_state(info, order, health),
        still_s=health.progress_s,
        residents=residents,
        residents_bytes=nbytes,
    )


def _state(info: WorkerInfo, order: Order, health: Health) -> str:
    state = health.state or _ORDERED.get(order.wanted) or info.status
    if state == "ready":
        state = "busy" if info.info.get("job") else "idle"
    if state == "lent":  # another job of its worker has the device
        state = "busy"
    return state if state in STATES else "unknown"
