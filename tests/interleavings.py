"""A device in miniature: streams that advance in any order that a plan allows."""

from __future__ import annotations

import random
from collections.abc import Iterator

from nimble_jobs.errors import PlanError
from nimble_jobs.schedule import Plan


def interleaving(plan: Plan, seed: int) -> Iterator[int]:
    """The tasks in one order, drawn by `seed`, in which a device may run them.

    A stream runs its tasks in launch order; one that waits stands still until what it waits for has run. As on a
    device, a wait that is launched before the event it names holds nothing back. Raises PlanError where every stream
    stands still.
    """
    dice = random.Random(seed)
    place = {task: i for i, task in enumerate(plan.order)}
    waits: dict[int, list[int]] = {}
    for sync in plan.syncs:
        if place[sync.before] < place[sync.after]:
            waits.setdefault(sync.after, []).append(sync.before)
    queues: list[list[int]] = [[] for _ in range(plan.streams)]
    for task in reversed(plan.order):
        queues[plan.stream_of[task]].append(task)
    done: set[int] = set()
    busy = [queue for queue in queues if queue]
    while busy:
        ready = [queue for queue in busy if done.issuperset(waits.get(queue[-1], ()))]
        if not ready:
            raise PlanError(f"every stream stands still, before tasks {sorted(queue[-1] for queue in busy)}")
        queue = dice.choice(ready)
        done.add(queue[-1])
        yield queue.pop()
        if not queue:
            busy.remove(queue)
