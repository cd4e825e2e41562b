"""Rows that are decoded in blocks. Blocks are kept for reading in any order, or decoded ahead for reading in order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nimble_jobs.data import memory
from nimble_jobs.pipeline import usable_cores
from nimble_jobs.spec.units import format_bytes

BLOCK_BYTES = 16 << 20  # bytes of a block's values; a larger record is a block of its own
AHEAD_BYTES = 256 << 20  # bytes of blocks that are decoded ahead
MAKING_BYTES = 1 << 30  # bytes that all decoding threads may take together
KEEP_BYTES = 256 << 20  # bytes of kept blocks for reading in random order, or half of the free memory if that is less


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Consecutive rows. Good ones have a row in `values` (as stored, or encoded images), at the index in `place`."""

    values: Any  # an array [n, *shape], or a sequence of encoded images
    place: np.ndarray  # int64, index into `values` by row; -1 for a bad one
    bad: dict[int, str]
    nbytes: int


Give = Callable[[int], Block]  # by number


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The division of a source into blocks."""

    starts: np.ndarray  # int64 [blocks + 1], the first row of each block, and the end
    chains: np.ndarray  # int64 [blocks], blocks with equal numbers are decoded one after another
    block_bytes: int  # bytes of the largest block, approximately
    making_bytes: int = 0  # bytes that decoding the largest takes, approximately

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.chains)

    def of_row(self, row: int) -> int:
        """The number of the block with this row."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1


class Blocked(Protocol):
    """What may hold records in blocks."""

    @property
    def layout(self) -> Layout | None: ...

    def block(self, number: int) -> Block: ...


def join_layouts(layouts: list[Layout]) -> Layout:
    """The layout of several sources in a row."""
    rows = np.cumsum([0, *(int(one.starts[-1]) for one in layouts)])
    chains, used = [], 0
    for one in layouts:
        chains.append(one.chains + used)
        used += int(one.chains.max(initial=-1)) + 1
    return Layout(
        starts=np.concatenate([*(one.starts[:-1] + r for one, r in zip(layouts, rows, strict=False)), rows[-1:]]),
        chains=np.concatenate(chains),
        block_bytes=max(one.block_bytes for one in layouts),
        making_bytes=max(one.making_bytes for one in layouts),
    )


class Kept:
    """Blocks by number; the most recently used ones are kept."""

    def __init__(self, make: Give, keep_bytes: Callable[[], int]) -> None:
        self._make = make
        self._keep_bytes = keep_bytes
        self._kept: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, number: int) -> Block:
        with self._lock:
            if number not in self._kept:
                self._kept[number] = self._make(number)
                while len(self._kept) > 1 and sum(b.nbytes for b in self._kept.values()) > self._keep_bytes():
                    self._kept.popitem(last=False)
            self._kept.move_to_end(number)
            return self._kept[number]


class Window:
    """Blocks for a reader that goes through rows in order: the blocks in use, and some that threads decode ahead.

    It takes AHEAD_BYTES or one block, MAKING_BYTES or what one block needs, and the blocks from which current batches
    are copied.
    """

    def __init__(self, make: Give, layout: Layout, stop: int, *, threads: int) -> None:
        self._make, self._layout = make, layout
        self._last = layout.of_row(max(0, stop - 1))
        threads = max(1, min(threads, MAKING_BYTES // max(1, layout.making_bytes)))
        self._ahead = max(1, min(2 * threads, AHEAD_BYTES // max(1, layout.block_bytes)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="nimble-read-block")
        self._lock = threading.Lock()
        self._blocks: dict[int, Future[Block]] = {}
        self._users: dict[int, int] = {}
        self._reached = -1  # the last requested block

    @property
    def held(self) -> int:
        """Blocks that are decoded, or being decoded."""
        return len(self._blocks)

    def want(self, first: int, last: int) -> None:
        """Announce that rows [first, last) will be read after those of earlier calls. Starts to decode blocks, also
        ahead.
        """
        if last <= first:
            return
        one, end = self._layout.of_row(first), self._layout.of_row(last - 1)
        with self._lock:
            for number in range(one, end + 1):
                self._users[number] = self._users.get(number, 0) + 1
            self._reached = max(self._reached, end)
            for number in range(one, min(end + self._ahead, self._last) + 1):
                if number not in self._blocks:
                    self._blocks[number] = self._pool.submit(self._made, number, self._blocks.get(number - 1))
            self._drop()

    def __call__(self, number: int) -> Block:
        """Wait for an announced block and return it. Raises what decoding it raised."""
        with self._lock:
            block = self._blocks[number]
        return block.result()

    def done(self, first: int, last: int) -> None:
        """Note that rows [first, last) were copied."""
        if last <= first:
            return
        with self._lock:
            for number in range(self._layout.of_row(first), self._layout.of_row(last - 1) + 1):
                self._users[number] -= 1
            self._drop()

    def close(self) -> None:
        """End the threads and drop all blocks."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._blocks.clear()

    def _made(self, number: int, before: Future[Block] | None) -> Block:
        if before is not None and self._layout.chains[number] == self._layout.chains[number - 1]:
            wait([before])
        return self._make(number)

    def _drop(self) -> None:
        for number in [n for n in self._blocks if n < self._reached and not self._users.get(n)]:
            self._users.pop(number, None)
            del self._blocks[number]


def window_over(source: Blocked, bounds: Iterable[tuple[int, int]]) -> Window | None:
    """A window for consecutive batches, each from one row to before another; None if that would save nothing."""
    layout = source.layout
    if layout is None or not isinstance(bounds, Sequence) or not bounds:
        return None
    if layout.of_row(bounds[0][0]) == layout.of_row(max(0, bounds[-1][1] - 1)):
        return None
    return Window(source.block, layout, bounds[-1][1], threads=usable_cores())


def keep_bytes() -> int:
    """The bytes of blocks that may be kept for reading in random order."""
    return max(KEEP_BYTES, memory.available_bytes() // 2)


def as_slice(indexes: np.ndarray) -> slice | np.ndarray:
    """A slice in place of consecutive indexes, so that rows are copied only once."""
    n = len(indexes)
    run = n > 0 and indexes[-1] - indexes[0] == n - 1 and bool((np.diff(indexes) == 1).all())
    return slice(int(indexes[0]), int(indexes[0]) + n) if run else indexes


def shuffle_note(whole: int) -> str:
    """What users should know about reading an input of so many bytes in random order, if it lies in blocks."""
    room = keep_bytes()
    if whole <= room:
        return f"is read in random order, so it is held in memory: {format_bytes(whole)}"
    return (
        f"is read in random order and takes {format_bytes(whole)}, more than fits in memory: parts beyond "
        f"{format_bytes(room)} are decoded again and again; to avoid this, write it as an .npy file"
    )
