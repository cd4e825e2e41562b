"""A tighter arena for programs of ordinary size: the largest buffers are placed first, then those that stick out are.

Source: Y. Pisarchyk, J. Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys workshop on on-device
intelligence, 2020 ("greedy by size"), with happens-before in place of lifetimes. Quadratic in the number of buffers,
hence only up to `BUFFERS` and `WORK`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nimble_jobs.graph.clocks import places_on_stream, tracked, walk
from nimble_jobs.schedule import Plan

WORK = 300_000_000  # comparisons of clock entries, and of pairs over all rounds: about a second each
BUFFERS = 4096  # whose pairs are held at once
ROUNDS = 40

Numbers = npt.NDArray[np.int64]


def pack(
    plan: Plan, users: dict[int, tuple[int, ...]], size: dict[int, int], enough: int
) -> tuple[dict[int, int], int] | None:
    """Offsets of the buffers and size of the arena; None where it would take too long. Every buffer needs a user.

    The buffer that ends last is moved to the front of the order of placement, and all are placed anew; the best of the
    rounds counts, and `enough` bytes end the search.
    """
    buffers = sorted(users, key=lambda b: (-size[b], b))
    few = 0 < len(buffers) <= BUFFERS and len(buffers) ** 2 * plan.streams <= WORK
    if not few or tracked(plan) < plan.streams:
        return None
    sizes = np.array([size[b] for b in buffers], np.int64)
    meet = _meet(*_clocks(plan, users, buffers))
    order = np.arange(len(buffers))
    best, best_end = _place(order, sizes, meet)
    starts, end = best, best_end
    for _ in range(min(ROUNDS, WORK // (4 * len(buffers) ** 2))):
        if best_end <= enough:
            break
        last = int(np.argmax(starts + sizes))
        order = np.concatenate(([last], order[order != last]))
        starts, end = _place(order, sizes, meet)
        if end < best_end:
            best, best_end = starts, end
    return dict(zip(buffers, best.tolist(), strict=True)), best_end


def _place(order: Numbers, sizes: Numbers, meet: npt.NDArray[np.bool_]) -> tuple[Numbers, int]:
    starts = np.zeros(len(order), np.int64)
    for i, buffer in enumerate(order):
        placed = order[:i]
        busy = placed[meet[buffer, placed]]
        starts[buffer] = _gap(starts[busy], starts[busy] + sizes[busy], int(sizes[buffer]))
    return starts, int((starts + sizes).max())


def _meet(known: npt.NDArray[np.int32], finished: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Whether two buffers may be live at once: neither is done with before the other begins."""
    before = np.stack([(finished <= begins).all(axis=1) for begins in known])  # row: the later one
    meet: npt.NDArray[np.bool_] = ~(before | before.T)
    return meet


def _clocks(
    plan: Plan, users: dict[int, tuple[int, ...]], order: list[int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """By buffer and stream: how many tasks are known to have finished before it is touched, and how many must have
    after it.
    """
    known = np.full((len(order), plan.streams), np.iinfo(np.int32).max, np.int32)
    finished = np.zeros((len(order), plan.streams), np.int32)
    rows: dict[int, list[int]] = {}
    for row, buffer in enumerate(order):
        for task in users[buffer]:
            rows.setdefault(task, []).append(row)
    place = places_on_stream(plan)
    for task, clock in walk(plan):
        for row in rows.get(task, ()):
            np.minimum(known[row], clock, out=known[row])
            finished[row, plan.stream_of[task]] = place[task]
    return known, finished


def _gap(starts: Numbers, ends: Numbers, size: int) -> int:
    """Where the smallest gap of at least `size` between the busy ranges begins, or else where the last of them ends."""
    if not len(starts):
        return 0
    by_start = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(ends[by_start])
    begins = np.concatenate(([0], reach[:-1]))
    room = starts[by_start] - begins
    fits = np.flatnonzero(room >= size)
    if not len(fits):
        return int(reach[-1])
    return int(begins[fits[np.argmin(room[fits])]])
