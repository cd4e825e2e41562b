"""A tighter arena for programs of ordinary size: the largest buffers are placed first, then those that stick out are.

Source: Y. Pisarchyk, J. Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys workshop on on-device
intelligence, 2020 ("greedy by size"), with happens-before in place of lifetimes. Quadratic in the number of buffers,
hence only up to `BUFFERS`; how often they are placed is linear. Close to linear in tasks and synchronisations: each has
a set of at most `ENDS` bits.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from nimble_jobs.schedule import Plan

BUFFERS = 4096  # whose pairs are held at once
ENDS = 4 * BUFFERS  # tasks that come last on a stream of those that touch a buffer
PLACED = 900  # how often a buffer may be placed, all counted, before another round is begun
AGAIN = 400  # or beyond once for each, if that is more

_HALF = 32  # bits; a range is one number, its start before its end
_LOW = (1 << _HALF) - 1
# Units of all buffers together: each half has a sign. A buffer begins at zero or where one that was placed before it
# ends, and so on down, so that no two in such a pile are the same: none ends beyond the sum, and in `_gap` neither does
# what ends last and the size that is looked for, one upon the other.
_MOST = (1 << _HALF - 1) - 1
_BLOCK = 64  # columns that are transposed at once, a multiple of 8: a cache holds their flags
_FEW = 6  # streams that touch a buffer: quicker many buffers at once, one task of each

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def pack(
    plan: Plan, users: dict[int, tuple[int, ...]], size: dict[int, int], enough: int, unit: int
) -> tuple[dict[int, int], int] | None:
    """Offsets of the buffers and size of the arena; None beyond `BUFFERS`, `ENDS` or what a range can say. Every
    buffer needs a user, and its size is a multiple of `unit`, also in bytes.

    The buffer that ends last is moved to the front of the order of placement, and those that this concerns are placed
    anew, until one of them ends no lower than the best arena so far: that one is moved next. `enough` bytes end the
    search, and so do buffers that are all live at once.
    """
    buffers = sorted(users, key=lambda b: (-size[b], b))
    if not 0 < len(buffers) <= BUFFERS or sum(size.values()) // unit > _MOST:
        return None
    meet = _meet(plan, users, buffers)
    if meet is None:
        return None
    sizes = np.array([size[b] // unit for b in buffers], np.int64)
    placing = _Placing(sizes, meet)
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
    halves = busy.view(np.int32)  # end, start, end, start, ...: little-endian, as all hosts of CUDA are
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


def _meet(plan: Plan, users: dict[int, tuple[int, ...]], order: list[int]) -> Flags | None:
    """Whether two different buffers may be live at once: neither is done with before the other begins. None beyond
    `ENDS`.
    """
    rows: dict[int, list[int]] = {}  # by task: the buffers that it touches, by place in the order
    for row, buffer in enumerate(order):
        for task in users[buffer]:
            rows.setdefault(task, []).append(row)
    stream_of = plan.stream_of
    last: list[dict[int, int]] = [{} for _ in order]  # by stream: it comes after the others, for streams keep order
    for task in plan.order:
        if task in rows:
            stream = stream_of[task]
            for row in rows[task]:
                last[row][stream] = task
    ends = set().union(*(tasks.values() for tasks in last))
    if len(ends) > ENDS:
        return None
    bit = {task: i for i, task in enumerate(filter(ends.__contains__, plan.order))}
    begun = _begun(plan, rows, bit, len(order))
    follow = _transposed(begun, len(bit))  # row: by task with a bit, the buffers that begin when it is done, as bits
    before = np.full((len(order), follow.shape[1]), 255, np.uint8)  # row: the earlier one
    rounds: list[dict[int, int]] = [{} for _ in range(_FEW)]  # one bit of each row at a time
    for row, tasks in enumerate(last):
        if len(tasks) > _FEW:
            before[row] = np.bitwise_and.reduce(follow[[bit[task] for task in tasks.values()]])
        else:
            for done, task in zip(rounds, tasks.values(), strict=False):
                done[row] = bit[task]
    for done in rounds:
        if done:
            before[list(done)] &= follow[list(done.values())]
    flags = np.unpackbits(before, axis=1, count=len(order), bitorder="little").view(np.bool_)
    meet: Flags = flags | flags.T
    np.logical_not(meet, out=meet)
    np.fill_diagonal(meet, val=False)
    return meet


def _begun(plan: Plan, rows: dict[int, list[int]], bit: dict[int, int], count: int) -> list[int]:
    """By buffer: tasks, of those with a bit, that have finished before any that touches it starts, as bits."""
    waits: dict[int, list[int]] = {}
    for sync in plan.syncs:
        waits.setdefault(sync.after, []).append(sync.before)
    awaited = Counter([sync.before for sync in plan.syncs])  # how often still
    current = [0] * plan.streams
    recorded: dict[int, int] = {}
    begun = [-1] * count  # all bits
    for task in plan.order:
        stream = plan.stream_of[task]
        bits = current[stream]
        for before in waits.get(task, ()):
            bits |= recorded[before]
            awaited[before] -= 1
            if not awaited[before]:
                del recorded[before]
        for row in rows.get(task, ()):
            begun[row] &= bits
        if task in bit:
            bits |= 1 << bit[task]
        current[stream] = bits
        if task in awaited:
            recorded[task] = bits
    return begun


def _transposed(rows: list[int], columns: int) -> npt.NDArray[np.uint8]:
    """The columns of the bits of these numbers, a row of bytes each, the lowest bit first."""
    width = -(-columns // 8)
    packed = np.frombuffer(b"".join([row.to_bytes(width, "little") for row in rows]), np.uint8).reshape(-1, width)
    turned = np.empty((columns, -(-len(rows) // 8)), np.uint8)
    for start in range(0, columns, _BLOCK):
        some = packed[:, start // 8 : (start + _BLOCK) // 8]
        flags = np.unpackbits(some, axis=1, count=min(_BLOCK, columns - start), bitorder="little")
        flags = np.ascontiguousarray(flags.T)  # packed three times as quickly as with strides
        turned[start : start + _BLOCK] = np.packbits(flags, axis=1, bitorder="little")
    return turned
