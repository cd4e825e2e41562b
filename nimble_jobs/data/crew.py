"""The processes that an input has hired to decode its pictures, and the memory in which they leave the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nimble_jobs.data.buffers import Buffers
from nimble_jobs.decoding.work import GOOD, Answer, Work

if TYPE_CHECKING:
    from nimble_jobs.decoding.pool import Decoders
    from nimble_jobs.decoding.task import Shared

PIECE_AWAY = 8  # pictures that a process decodes at a time: enough for asking it not to count
PIECE_ENCODED = 32  # that a process only reads
FEW = 1024  # fewer pictures are decoded by threads before processes have started
FEW_RUNNING = 64  # the same if they run already


class Crew:
    """`slot_bytes`: what a piece takes, at least one row."""

    def __init__(self, decoders: Decoders, slot_bytes: int) -> None:
        self.decoders = decoders
        self._slots = Buffers(2 * decoders.workers + 2, slot_bytes)
        self._own = decoders.share(self._slots.memory, self._slots.fd)
        self._lent: list[Shared] = []

    @contextmanager
    def lend(self, buffers: Buffers | None) -> Iterator[None]:
        """Inside the block processes write straight to rows that lie in `buffers`."""
        if buffers is None:
            yield
            return
        shared = self.decoders.share(buffers.memory, buffers.fd)
        self._lent.append(shared)
        try:
            yield
        finally:
            self._lent.remove(shared)
            self.decoders.unshare(shared)

    def do(self, work: Work, into: np.ndarray, blobs: Sequence[bytes | memoryview]) -> Answer:
        """Have it done. Its items lie in `into`, uint8 [n, *], C-contiguous; rows of bad ones may be overwritten."""
        place = self._place(into)
        if place is not None:
            shared, start = place
            return self.decoders.submit(_moved(work, start), shared, blobs).result()
        return self._through_slots(work, into, blobs)

    def close(self) -> None:
        """Let the processes forget the memory. They go on for others."""
        self.decoders.unshare(self._own)
        self._slots.close()

    def _place(self, into: np.ndarray) -> tuple[Shared, int] | None:
        """Where the rows lie in memory that is shared."""
        for shared in reversed(self._lent):  # the one that is lent longest, if the same memory was lent twice
            start = into.ctypes.data - shared.memory.ctypes.data
            if start >= 0 and start + into.nbytes <= shared.memory.nbytes:
                return shared, start
        return None

    def _through_slots(self, work: Work, into: np.ndarray, blobs: Sequence[bytes | memoryview]) -> Answer:
        width = into.shape[1]
        at_once = self._slots.nbytes // width
        answers, left = [], list(blobs)
        for first in range(0, len(work.items), at_once):
            items = work.items[first : first + at_once]
            mine = [left.pop(0) for item in items if item.path is None]
            packed = replace(work, items=tuple(replace(item, offset=i * width) for i, item in enumerate(items)))
            buffer = self._slots.take()
            assert buffer is not None
            try:
                start = buffer.index * self._slots.nbytes
                answer = self.decoders.submit(_moved(packed, start), self._own, mine).result()
                for i, (item, row) in enumerate(zip(items, answer.rows, strict=True)):
                    if row.status == GOOD:
                        found = buffer.array[i * width : i * width + row.length]
                        into.reshape(-1)[item.offset : item.offset + row.length] = found
            finally:
                buffer.release()
            answers.append(answer)
        rows = tuple(row for answer in answers for row in answer.rows)
        return Answer(rows=rows, busy_s=sum(answer.busy_s for answer in answers))


def _moved(work: Work, start: int) -> Work:
    return replace(work, items=tuple(replace(item, offset=item.offset + start) for item in work.items))
