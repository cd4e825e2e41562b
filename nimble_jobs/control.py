"""What workers are asked to do while they run: drain, pause, resume, begin with a fresh process. Never loads torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nimble_jobs.store import Order, Store, Wanted, WorkerInfo

ANSWER_S = 3.0  # a worker that is well answers within a second
_LOOK_S = 0.05


def ask(
    store: Store, wanted: Wanted, ids: Sequence[str] | None = None, *, now: float | None = None
) -> list[WorkerInfo]:
    """Ask workers to run, pause or drain; the workers that were asked. It is durable once this returns.

    `ids` None: all workers; if they are to run or to pause, those that start later as well. Raises NotFound for one
    that does not run.
    """
    chosen = store.workers.chosen(ids)
    named = ids is not None or wanted is Wanted.DRAIN
    if chosen or not named:
        store.orders.want(wanted, [info.id for info in chosen] if named else None, time.time() if now is None else now)
    return chosen


def restart(store: Store, ids: Sequence[str] | None = None, *, now: float | None = None) -> list[WorkerInfo]:
    """Ask workers (None: all) to replace the process that runs their jobs. A job at hand is given back at its next safe
    point, or when limits.grace is over. Raises NotFound.
    """
    chosen = store.workers.chosen(ids)
    if chosen:
        store.orders.restart([info.id for info in chosen], time.time() if now is None else now)
    return chosen


def answered(store: Store, asked: Sequence[WorkerInfo], *, timeout_s: float = ANSWER_S) -> dict[str, WorkerInfo | None]:
    """Wait until each worker that was asked does what is wanted of it now, or has left (None), but no longer than
    `timeout_s`. Those missing have not answered: they are stopped or stuck, and will obey when they go on.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        live = {info.id: info for info in store.workers.live("worker")}
        orders = store.orders.of_each([info.id for info in asked])
        done = {
            info.id: live.get(info.id)
            for info in asked
            if info.id not in live or _obeys(live[info.id], orders[info.id])
        }
        if len(done) == len(asked) or time.monotonic() > deadline:
            return done
        time.sleep(_LOOK_S)


def _obeys(info: WorkerInfo, order: Order) -> bool:
    return info.info.get("wanted") == order.wanted and int(info.info.get("restarts", 0)) >= order.restarts
