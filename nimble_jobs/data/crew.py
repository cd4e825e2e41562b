"""The processes that decode an input's pictures, and the memory for their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nimble_jobs.data.buffers import Buffers
from nimble_jobs.decoding.work import GOOD, LENGTH, STATUS, Answer, Work

if TYPE_CHECKING:
    from nimble_jobs.decoding.pool import Decoders
    from nimble_jobs.decoding.task import Shared

PIECE_AWAY = 8  # pictures that a process decodes at a time, enough to hide the cost of a request
PIECE_ENCODED = 64  # pictures per piece if a process only reads them
FEW = 1024  # for fewer pictures threads are done before processes have started
FEW_RUNNING = 64  # the same if the processes run already


class Crew:
    """`slot_bytes`: bytes of a piece, at least of one row."""

    def __init__(self, decoders: Decoders, slot_bytes: int) -> None:
        self.decoders = decoders
        self._slots = Buffers(2 * decoders.workers + 2, slot_bytes)
        self._own = decoders.share(self._slots.memory, self._slots.fd)
        self._lent: list[Shared] = []

    @contextmanager
    def lend(self, buffers: Buffers | None) -> Iterator[None]:
        """Inside the block processes write straight into rows in `buffers`."""
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
        """Have it done. Results go to `into`, uint8 [n, *], C-contiguous; rows of bad ones may be overwritten."""
        if not len(work):
            return Answer.of([], 0.0)
        place = self._place(into)
        if place is not None:
            shared, start = place
            return self.decoders.submit(work.moved(start), shared, blobs).result()
        return self._through_slots(work, into, blobs)

    def close(self) -> None:
        """Let the processes drop the memory. They stay for other inputs."""
        self.decoders.unshare(self._own)
        self._slots.close()

    def _place(self, into: np.ndarray) -> tuple[Shared, int] | None:
        """The place of the rows in shared memory."""
        for shared in reversed(self._lent):  # the first one, if the same memory was lent twice
            start = into.ctypes.data - shared.memory.ctypes.data
            if start >= 0 and start + into.nbytes <= shared.memory.nbytes:
                return shared, start
        return None

    def _through_slots(self, work: Work, into: np.ndarray, blobs: Sequence[bytes | memoryview]) -> Answer:
        width = into.shape[1]
        at_once = self._slots.nbytes // width
        answers = []
        for first in range(0, len(work), at_once):
            some = work.part(first, first + at_once)
            offsets = np.arange(len(some)) * width
            packed = replace(some, places=np.stack([offsets, some.places[:, 1]], axis=1))
            buffer = self._slots.take()
            assert buffer is not None
            try:
                start, mine = buffer.index * self._slots.nbytes, blobs[first : first + at_once]
                answer = self.decoders.submit(packed.moved(start), self._own, mine).result()
                ends = some.places[:, 0], offsets, answer.rows[:, LENGTH], answer.rows[:, STATUS]
                for there, here, length, status in zip(*(column.tolist() for column in ends), strict=True):
                    if status == GOOD:
                        into.reshape(-1)[there : there + length] = buffer.array[here : here + length]
            finally:
                buffer.release()
            answers.append(answer)
        return Answer.joined(answers)
