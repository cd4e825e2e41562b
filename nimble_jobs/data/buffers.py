"""Host memory for batches on their way to the device: a few equal buffers in one anonymous mapping.

The mapping has no name, so nothing is left behind by a process that is killed; other processes get it by its file
descriptor. Whoever owns a device may pin `memory`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np


class Buffer:
    """One of the buffers, from `take` to `release`."""

    def __init__(self, index: int, array: np.ndarray, give_back: Callable[[int], None]) -> None:
        self.index = index
        self.array = array  # uint8 [nbytes]
        self._give_back = give_back
        self._held = True

    def release(self) -> None:
        """Let others have the memory. More than once does no harm."""
        if self._held:
            self._held = False
            self._give_back(self.index)


class Buffers:
    """`count` buffers of `nbytes` each, taken and given back by any thread."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("nimble-buffers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.count * self.nbytes)
            self._mapping = mmap.mmap(self.fd, self.count * self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = np.frombuffer(self._mapping, dtype=np.uint8)
        self._free = deque(range(count))
        self._ended = False
        self._round = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Take all buffers back and offer them anew. Nobody may use one that was taken before."""
        with self._changed:
            self._round += 1
            self._free = deque(range(self.count))
            self._ended = False

    def end(self) -> None:
        """Give out no more, so that nobody waits for one in vain."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self) -> Buffer | None:
        """A free buffer, waiting for one; None after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._ended)
            if self._ended:
                return None
            index, now = self._free.popleft(), self._round
        first = index * self.nbytes
        return Buffer(index, self.memory[first : first + self.nbytes], partial(self._give_back, now))

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def close(self) -> None:
        """Close the file descriptor. The memory goes once the last array over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _give_back(self, when: int, index: int) -> None:
        with self._changed:
            if when == self._round:
                self._free.append(index)
                self._changed.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
