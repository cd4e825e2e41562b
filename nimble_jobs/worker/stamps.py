"""The computing thread shows its progress to the supervisor by a byte in a pipe from time to time.

Only that thread writes. A thread that merely runs beside it, such as one that renews a lease, proves nothing about the
computation.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection

_APART_S = 0.1  # at most one stamp in this time
_AT_ONCE = 4096


class Stamps:
    """The child's end of the pipe."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._next_at = 0.0
        os.set_blocking(link.fileno(), False)

    def __call__(self) -> None:
        """Note progress. It costs one look at the clock and never waits for the supervisor."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _APART_S
        with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full of unread stamps
            os.write(self._link.fileno(), b".")


def any_of(link: Connection) -> bool:
    """Whether there was progress since the last call. `link` is the supervisor's end, which must be non-blocking."""
    moved = False
    with suppress(BlockingIOError):
        while os.read(link.fileno(), _AT_ONCE):
            moved = True
    return moved
