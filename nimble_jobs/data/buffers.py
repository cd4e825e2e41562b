"""Host memory for batches on their way to the device: a few equal buffers in one anonymous mapping.

The mapping has no name, so a killed process leaves nothing behind. Other processes get it by its file descriptor. The
owner of a device may pin `memory`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from nimble_jobs.pipeline import Pool


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """One buffer, from `take` to `release`."""

    index: int
    array: np.ndarray  # uint8 [nbytes]
    release: Callable[[], None]  # returns the memory; calling it again does no harm


class Buffers:
    """`count` buffers of `nbytes` each. Any thread may take and release them."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, _whole_pages(nbytes)
        self.fd = os.memfd_create("nimble-buffers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.count * self.nbytes)
            self._mapping = mmap.mmap(self.fd, self.count * self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = np.frombuffer(self._mapping, dtype=np.uint8)
        self._pool = Pool(range(count))

    def recut(self, count: int, nbytes: int) -> bool:
        """Make `count` buffers of `nbytes` of the same memory; False if it is too small. No buffer may be in use."""
        nbytes = _whole_pages(nbytes)
        if count * nbytes > self.memory.nbytes:
            return False
        self.count, self.nbytes, self._pool = count, nbytes, Pool(range(count))
        return True

    def begin(self) -> None:
        """Take all buffers back and offer them anew. Buffers that were taken before must no longer be used."""
        self._pool.begin()

    def end(self) -> None:
        """Offer no more buffers, so that no thread waits for one in vain."""
        self._pool.end()

    def take(self) -> Buffer | None:
        """Wait for a free buffer; None after `end`."""
        taken = self._pool.take()
        if taken is None:
            return None
        index, give_back = taken
        first = index * self.nbytes
        return Buffer(index=index, array=self.memory[first : first + self.nbytes], release=give_back)

    @property
    def free(self) -> int:
        """The number of free buffers."""
        return self._pool.free

    def close(self) -> None:
        """Close the file descriptor. The memory is freed with the last array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _whole_pages(nbytes: int) -> int:
    return -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
