"""A tighter arena for programs of ordinary size: the largest buffers are placed first, then those that stick out are.

Source: Y. Pisarchyk, J. Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys workshop on on-device
intelligence, 2020 ("greedy by size"), with happens-before in place of lifetimes. Quadratic in the number of buffers,
hence only up to `BUFFERS`; how often they are placed is linear.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nimble_jobs.graph.clocks import places_on_stream, tracked, walk
from nimble_jobs.schedule import Plan

BUFFERS = 4096  # whose pairs are held at once
PLACED = 900  # how often a buffer may be placed, all counted, before another round is begun
AGAIN = 400  # or beyond once for each, if that is more

_HALF = 32  # bits; a range is one number, its start before its end
_LOW = (1 << _HALF) - 1
_NO_ROOM = 1 << 62

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def pack(
    plan: Plan, users: dict[int, tuple[int, ...]], size: dict[int, int], enough: int, unit: int
) -> tuple[dict[int, int], int] | None:
    """Offsets of the buffers and size of the arena; None for too many of them. Every buffer needs a user, and its size
    is a multiple of `unit`, also in bytes.

    The buffer that ends last is moved to the front of the order of placement, and those that this concerns are placed
    anew, until one of them ends no lower than the best arena so far: that one is moved next. `enough` bytes end the
    search, and so do buffers that are all live at once.
    """
    buffers = sorted(users, key=lambda b: (-size[b], b))
    if not 0 < len(buffers) <= BUFFERS or tracked(plan) < plan.streams or sum(size.values()) // unit > _LOW:
        return None
    sizes = np.array([size[b] // unit for b in buffers], np.int64)
    placing = _Placing(sizes, _meet(plan, users, buffers))
    best, best_end = placing.ranges >> _HALF, placing.end
    last, least, asked = placing.last, enough // unit, set()
    while placing.placed < max(PLACED, len(buffers) + AGAIN):
        if last not in asked:
            asked.add(last)
            least = max(least, _together(last, sizes, placing.meet))
        if best_end <= least:
            break
        high = placing.move_to_front(last, best_end)
        if high is None:
            best, best_end = placing.ranges >> _HALF, placing.end
        last = high if high is not None else placing.last
    return dict(zip(buffers, (best * unit).tolist(), strict=True)), best_end * unit


class _Placing:
    """Every buffer at the best gap that those before it in an order leave, where the order can be changed."""

    def __init__(self, sizes: Numbers, meet: Flags) -> None:
        self.sizes: list[int] = sizes.tolist()
        self.meet = meet
        self.order = list(range(len(sizes)))
        self.rank = np.arange(len(sizes))
        self.ranges = np.full(len(sizes), -1, np.int64)
        self.placed = 0  # buffers, each time that they were
        self.stale = np.ones(len(sizes), np.bool_)
        self._place(_NO_ROOM)

    @property
    def end(self) -> int:
        return int((self.ranges & _LOW).max())

    @property
    def last(self) -> int:
        """The largest of the buffers that end last."""
        return int((self.ranges & _LOW).argmax())

    def move_to_front(self, buffer: int, limit: int) -> int | None:
        """Place it before all others, and anew those whose gaps may have changed, up to one that does not end below
        `limit`: that one, or None where all do.
        """
        self.order.remove(buffer)
        self.order.insert(0, buffer)
        self.rank[buffer] = self.rank.min() - 1
        self.stale |= self.meet[buffer]
        self.stale[buffer] = True
        return self._place(limit)

    def _place(self, limit: int) -> int | None:
        """Place the stale buffers in order, and whoever comes after one that was moved and may be live with it."""
        stale, ranges, rank = self.stale, self.ranges, self.rank
        for buffer in self.order:
            if stale[buffer]:
                self.placed += 1
                stale[buffer] = False
                meet, size = self.meet[buffer], self.sizes[buffer]
                start = _gap(ranges[meet & (rank < rank[buffer])], size)
                found = start << _HALF | start + size
                if found != ranges[buffer]:
                    ranges[buffer] = found
                    stale |= meet & (rank > rank[buffer])
                if start + size >= limit:
                    return buffer
        return None if self.end < limit else self.last


def _gap(busy: Numbers, size: int) -> int:
    """Where the smallest gap of at least `size` between the busy ranges begins, or else where the last of them ends."""
    if not len(busy):
        return 0
    busy.sort()
    room = busy >> _HALF
    busy &= _LOW
    reach = np.maximum.accumulate(busy, out=busy)
    room[1:] -= reach[:-1]
    room[room < size] = _NO_ROOM
    tightest = int(room.argmin())
    if room[tightest] == _NO_ROOM:
        return int(reach[-1])
    return int(reach[tightest - 1]) if tightest else 0


def _together(buffer: int, sizes: Numbers, meet: Flags) -> int:
    """Size of buffers that may all be live at once, this one and the largest that can be: no arena is smaller."""
    others = meet[buffer].copy()
    total = int(sizes[buffer])
    while others[largest := int(others.argmax())]:
        total += int(sizes[largest])
        others &= meet[largest]
    return total


def _meet(plan: Plan, users: dict[int, tuple[int, ...]], order: list[int]) -> Flags:
    """Whether two different buffers may be live at once: neither is done with before the other begins."""
    known, finished = _clocks(plan, users, order)
    before = np.ones((len(order), len(order)), np.bool_)  # row: the earlier one
    for begins, ends in zip(known, finished, strict=True):
        rows = list(ends)
        before[rows] &= np.array(list(ends.values()), np.int32)[:, None] <= begins
    meet: Flags = ~(before | before.T)
    np.fill_diagonal(meet, val=False)
    return meet


def _clocks(
    plan: Plan, users: dict[int, tuple[int, ...]], order: list[int]
) -> tuple[npt.NDArray[np.int32], list[dict[int, int]]]:
    """By stream and place in the order: how many tasks are known to have finished before the buffer is touched, and how
    many must have after it, where it is touched on the stream.
    """
    known = np.full((len(order), plan.streams), np.iinfo(np.int32).max, np.int32)
    finished: list[dict[int, int]] = [{} for _ in range(plan.streams)]
    rows: dict[int, list[int]] = {}
    for row, buffer in enumerate(order):
        for task in users[buffer]:
            rows.setdefault(task, []).append(row)
    place = places_on_stream(plan)
    for task, clock in walk(plan):
        for row in rows.get(task, ()):
            np.minimum(known[row], clock, out=known[row])
            finished[plan.stream_of[task]][row] = place[task]
    return np.ascontiguousarray(known.T), finished
