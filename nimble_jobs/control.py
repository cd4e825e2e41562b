"""Orders for running workers: drain, pause, resume, restart. Never loads torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nimble_jobs.store import Order, Store, Wanted, WorkerInfo

ANSWER_S = 3.0  # a healthy worker answers within a second
_LOOK_S = 0.05


def ask(
    store: Store, wanted: Wanted, ids: Sequence[str] | None = None, *, now: float | None = None
) -> list[WorkerInfo]:
    """Order workers to run, pause or drain, and return them. The order is durable once this returns.

    Without `ids` it goes to all workers, and an order to run or to pause also applies to workers that start later.
    Raises NotFound if a worker is not running.
    """
    chosen = store.workers.chosen(ids)
    named = ids is not None or wanted is Wanted.DRAIN
    if chosen or not named:
        store.orders.want(wanted, [info.id for info in chosen] if named else None, time.time() if now is None else now)
    return chosen


def restart(store: Store, ids: Sequence[str] | None = None, *, now: float | None = None) -> list[WorkerInfo]:
    """Order workers, without `ids` all, to replace the process that runs their jobs.

    A running job goes back to the queue at its next safe point, or after limits.grace. Raises NotFound.
    """
    chosen = store.workers.chosen(ids)
    if chosen:
        store.orders.restart([info.id for info in chosen], time.time() if now is None else now)
    return chosen


def answered(store: Store, asked: Sequence[WorkerInfo], *, timeout_s: float = ANSWER_S) -> dict[str, WorkerInfo | None]:
    """Wait at most `timeout_s` seconds until each worker obeys its order or has stopped. A stopped worker maps to None.

    A worker that is missing from the result has not answered. It is suspended or stuck, and obeys once it continues.
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
