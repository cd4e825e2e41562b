"""A tighter arena for programs of ordinary size: the largest buffers are placed first, then those that stick out are.

Source: Y. Pisarchyk, J. Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys workshop on on-device
intelligence, 2020 ("greedy by size"), with happens-before in place of lifetimes. Quadratic in the number of buffers,
hence only up to `BUFFERS`; how often they are placed is linear.
"""

from __future__ import annotations

from functools import reduce
from operator import and_

import numpy as np
import numpy.typing as npt

from nimble_jobs.schedule import Plan

BUFFERS = 4096  # whose pairs are held at once
PLACED = 900  # how often a buffer may be placed, all counted, before another round is begun
AGAIN = 400  # or beyond once for each, if that is more

_HALF = 32  # bits; a range is one number, its start before its end
_LOW = (1 << _HALF) - 1
_MOST = (1 << _HALF - 1) - 1  # units: each half has a sign

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
    if not 0 < len(buffers) <= BUFFERS or sum(size.values()) // unit > _MOST:
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
        self.lacks = list(sizes.astype(np.int32)[:, None])  # the same as arrays, which are quicker to subtract
        self.meet = meet
        self.order = list(range(len(sizes)))
        self.ranges = np.zeros(len(sizes), np.int64)
        self.placed = len(sizes)  # buffers, each time that they were
        self.stale = np.zeros(len(sizes), np.bool_)
        for buffer in self.order:
            self.ranges[buffer] = self._range(buffer, self.ranges[:buffer][meet[buffer, :buffer]])

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
        self.stale |= self.meet[buffer]
        self.stale[buffer] = True
        return self._place(limit)

    def _place(self, limit: int) -> int | None:
        """Place the stale buffers in order, and whoever comes after one that was moved and may be live with it."""
        stale, ranges = self.stale, self.ranges
        earlier = np.zeros_like(stale)
        for buffer in self.order:
            if stale[buffer]:
                self.placed += 1
                stale[buffer] = False
                meet = self.meet[buffer]
                found = self._range(buffer, ranges[meet & earlier])
                if found != ranges[buffer]:
                    ranges[buffer] = found
                    stale |= meet > earlier
                if found & _LOW >= limit:
                    return buffer
            earlier[buffer] = True
        return None if self.end < limit else self.last

    def _range(self, buffer: int, busy: Numbers) -> int:
        """Its range in the smallest gap between the busy ranges that has room for it, or else behind the last."""
        start = _gap(busy, self.lacks[buffer]) if len(busy) else 0
        return start << _HALF | start + self.sizes[buffer]


def _gap(busy: Numbers, size: npt.NDArray[np.int32]) -> int:
    """Where the smallest gap of at least `size` between the busy ranges begins, or else where the last of them ends."""
    busy.sort()
    halves = busy.view(np.int32)  # end, start, end, start, ...
    reach = np.maximum.accumulate(halves[::2])
    room = halves[1::2]
    between = room[1:]
    between -= reach[:-1]
    room -= size
    tightest = int(room.view(np.uint32).argmin())  # what is below zero counts as much
    if room[tightest] < 0:
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
    bit: dict[int, int] = {}  # by task that touches any of them
    for buffer in order:
        for task in users[buffer]:
            bit.setdefault(task, len(bit))
    done = _done(plan, bit)
    begun = _matrix([_common(done, users[buffer]) for buffer in order], len(bit))  # column: the task is done before
    follow = dict(zip(bit, _numbers(begun.T), strict=True))  # by task: buffers that begin when it is done, as bits
    before = _matrix([_common(follow, users[buffer]) for buffer in order], len(order))  # row: the earlier one
    meet: Flags = ~(before | before.T)
    np.fill_diagonal(meet, val=False)
    return meet


def _done(plan: Plan, bit: dict[int, int]) -> dict[int, int]:
    """By task that has a bit: those of such tasks that have finished before it starts, as bits."""
    waits: dict[int, list[int]] = {}
    for sync in plan.syncs:
        waits.setdefault(sync.after, []).append(sync.before)
    awaited = {sync.before for sync in plan.syncs}
    current = [0] * plan.streams
    recorded: dict[int, int] = {}
    done: dict[int, int] = {}
    for task in plan.order:
        bits = current[plan.stream_of[task]]
        for before in waits.get(task, ()):
            bits |= recorded[before]
        if task in bit:
            done[task] = bits
            bits |= 1 << bit[task]
        current[plan.stream_of[task]] = bits
        if task in awaited:
            recorded[task] = bits
    return done


def _common(bits: dict[int, int], tasks: tuple[int, ...]) -> int:
    """What is set for all of these tasks."""
    return reduce(and_, map(bits.__getitem__, tasks))


def _matrix(rows: list[int], columns: int) -> Flags:
    """Flags whose rows are the bits of these numbers, the lowest first."""
    width = -(-columns // 8)
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
    return np.unpackbits(packed.reshape(-1, width), axis=1, count=columns, bitorder="little").view(np.bool_)


def _numbers(flags: Flags) -> list[int]:
    """The rows of these flags as the bits of numbers."""
    packed = np.packbits(np.ascontiguousarray(flags), axis=1, bitorder="little")  # three times as quick as with strides
    return [int.from_bytes(row, "little") for row in map(bytes, packed)]
