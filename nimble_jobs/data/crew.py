"""The processes that an input has hired to decode its pictures, and the memory in which they leave the pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nimble_jobs.data.buffers import Buffers

if TYPE_CHECKING:  # Pillow is loaded by those who read pictures
    from nimble_jobs.decoding.pool import Decoders

PIECE_AWAY = 8  # pictures that a process decodes at a time: enough for asking it not to count
FEW = 1024  # fewer pictures are decoded by threads before processes have started
FEW_RUNNING = 64  # the same if they run already


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """Memory for the pixels of one piece."""

    memory: np.ndarray  # uint8 [*]
    start: int  # where it begins in the memory that is shared, in bytes


class Crew:
    """`slot_bytes`: of the pixels of one piece."""

    def __init__(self, decoders: Decoders, slot_bytes: int) -> None:
        self.decoders = decoders
        self._slots = Buffers(2 * decoders.workers + 2, slot_bytes)
        self.shared = decoders.share(self._slots.memory, self._slots.fd)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Memory that nobody else writes to, waiting for it."""
        buffer = self._slots.take()
        assert buffer is not None
        try:
            yield Slot(memory=buffer.array, start=buffer.index * self._slots.nbytes)
        finally:
            buffer.release()

    def close(self) -> None:
        """Let the processes forget the memory. They go on for others."""
        self.decoders.unshare(self.shared)
        self._slots.close()
