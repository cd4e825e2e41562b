"""A tighter arena for programs of ordinary size. Large buffers are placed first; then the one that sticks out is moved.

Source: Y. Pisarchyk, J. Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys workshop on on-device
intelligence, 2020 ("greedy by size"), with happens-before in place of lifetimes. The cost is quadratic in the number of
buffers, hence the limit `BUFFERS`; the number of placements is linear. It is close to linear in tasks and
synchronisations, each of which keeps a set of at most `ENDS` bits.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from nimble_jobs.schedule import Plan

BUFFERS = 4096  # at most; a flag is held for each pair
ENDS = 4 * BUFFERS  # at most so many tasks that are the last on their stream to touch some buffer
PLACED = 900  # no new round begins after so many placements in total,
AGAIN = 400  # or after so many beyond the first placement of each buffer, if that is more

_HALF = 32  # bits; a range is one number: start in the upper half, end in the lower half
_LOW = (1 << _HALF) - 1
# The most units of all buffers together. Each half of a range has a sign bit, so it must stay below 2^31. It does: a
# buffer starts at zero or at the end of another, so no buffer ends beyond the sum of all sizes. Nor does the largest
# end plus the size that `_gap` seeks a place for.
_MOST = (1 << _HALF - 1) - 1
_BLOCK = 64  # columns to transpose at once, a multiple of 8; their flags fit into a cache
_FEW = 6  # up to so many streams per buffer, it is faster to handle one task of many buffers at a time

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def pack(
    plan: Plan, users: dict[int, tuple[int, ...]], size: dict[int, int], enough: int, unit: int
) -> tuple[dict[int, int], int] | None:
    """Offsets of the buffers and size of the arena in bytes; None beyond `BUFFERS`, `ENDS` or what a range can hold.

    Every buffer needs at least one user. Its size is a multiple of `unit`; both are in bytes.

    Each round moves the buffer that ends last to the front of the placement order and places all affected buffers
    again. A round stops at the first buffer that ends no lower than the best arena so far, and the next round moves
    that one. The search ends when the arena has `enough` bytes, or no more than the buffers that are live together.
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
    """Each buffer in the best gap left by those before it in an order. The order can be changed."""

    def __init__(self, sizes: Numbers, meet: Flags) -> None:
        self.sizes: list[int] = sizes.tolist()
        self.lacks = list(sizes.astype(np.int32)[:, None])  # the sizes as arrays, which are faster to subtract
        self.meet = meet
        self.order = list(range(len(sizes)))
        self.ranges = np.zeros(len(sizes), np.int64)
        self.placed = len(sizes)  # placements so far
        self.stale = np.zeros(len(sizes), np.bool_)
        for buffer in self.order:
            self.ranges[buffer] = self._range(buffer, self.ranges[:buffer][meet[buffer, :buffer]])

    @property
    def end(self) -> int:
        return int((self.ranges & _LOW).max())

    @property
    def last(self) -> int:
        """The buffer that ends last; of several, the largest."""
        return int((self.ranges & _LOW).argmax())

    def move_to_front(self, buffer: int, limit: int) -> int | None:
        """Place `buffer` before all others, then again each buffer whose gaps may have changed.

        Stops at the first buffer that does not end below `limit` and returns it; None if all end below.
        """
        self.order.remove(buffer)
        self.order.insert(0, buffer)
        self.stale |= self.meet[buffer]
        self.stale[buffer] = True
        return self._place(limit)

    def _place(self, limit: int) -> int | None:
        """Place the stale buffers in order, and also each later one that may be live with a buffer that moved."""
        stale, ranges = self.stale, self.ranges
        earlier = np.zeros_like(stale)
        for buffer in self.order:
            if stale[buffer]:
                self.placed += 1
                stale[buffer] = False
                meet = self.meet[buffer]
                placed = self._range(buffer, ranges[meet & earlier])
                if placed != ranges[buffer]:
                    ranges[buffer] = placed
                    stale |= meet > earlier
                if placed & _LOW >= limit:
                    return buffer
            earlier[buffer] = True
        return None if self.end < limit else self.last

    def _range(self, buffer: int, busy: Numbers) -> int:
        """The buffer's range: in the smallest gap of the busy ranges with room for it, or else behind the last."""
        start = _gap(busy, self.lacks[buffer]) if len(busy) else 0
        return start << _HALF | start + self.sizes[buffer]


def _gap(busy: Numbers, size: npt.NDArray[np.int32]) -> int:
    """Start of the smallest gap of at least `size` between the busy ranges, or else the end of the last one.

    Overwrites `busy`.
    """
    busy.sort()
    halves = busy.view(np.int32)  # end, start, end, start, ...: little-endian, as all hosts of CUDA are
    reach = np.maximum.accumulate(halves[::2])
    room = halves[1::2]
    between = room[1:]
    between -= reach[:-1]
    room -= size
    tightest = int(room.view(np.uint32).argmin())  # seen as unsigned, a negative room is huge
    if room[tightest] < 0:
        return int(reach[-1])
    return int(reach[tightest - 1]) if tightest else 0


def _together(buffer: int, sizes: Numbers, meet: Flags) -> int:
    """Size of buffers that may all be live at once: `buffer` and, greedily, the largest ones. No arena is smaller."""
    others = meet[buffer].copy()
    total = int(sizes[buffer])
    while others[largest := int(others.argmax())]:
        total += int(sizes[largest])
        others &= meet[largest]
    return total


def _meet(plan: Plan, users: dict[int, tuple[int, ...]], order: list[int]) -> Flags | None:
    """bool [buffers, buffers]: whether two different buffers may be live at once. None beyond `ENDS`.

    They may if neither is finished for certain before the other begins.
    """
    rows: dict[int, list[int]] = {}  # by task: the buffers that it touches, by place in the order
    for row, buffer in enumerate(order):
        for task in users[buffer]:
            rows.setdefault(task, []).append(row)
    stream_of = plan.stream_of
    last: list[dict[int, int]] = [{} for _ in order]  # by stream: its last task that touches the buffer
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
    follow = _transposed(begun, len(bit))  # by task with a bit: the buffers that begin after it, as bits
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
    """For each buffer, as bits: the tasks in `bit` that have finished before any task that touches it starts."""
    waits: dict[int, list[int]] = {}
    for sync in plan.syncs:
        waits.setdefault(sync.after, []).append(sync.before)
    awaited = Counter([sync.before for sync in plan.syncs])  # waits that are still to come
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
    """Transpose a matrix of bits. `rows` has one number per row; the result one row of bytes per column, lowest bit
    first.
    """
    width = -(-columns // 8)
    packed = np.frombuffer(b"".join([row.to_bytes(width, "little") for row in rows]), np.uint8).reshape(-1, width)
    turned = np.empty((columns, -(-len(rows) // 8)), np.uint8)
    for start in range(0, columns, _BLOCK):
        some = packed[:, start // 8 : (start + _BLOCK) // 8]
        flags = np.unpackbits(some, axis=1, count=min(_BLOCK, columns - start), bitorder="little")
        flags = np.ascontiguousarray(flags.T)  # three times as fast to pack as with strides
        turned[start : start + _BLOCK] = np.packbits(flags, axis=1, bitorder="little")
    return turned
