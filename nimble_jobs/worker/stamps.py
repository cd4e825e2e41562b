"""How the thread that computes shows its progress to the supervisor: a byte in a pipe now and then.

Only that thread writes. A thread that merely lives on beside it, as the one that beats for a lease, says nothing about
the computation.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection

_APART_S = 0.1  # more stamps than that say nothing new
_AT_ONCE = 4096


class Stamps:
    """The child's end of the pipe."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._next_at = 0.0
        os.set_blocking(link.fileno(), False)

    def __call__(self) -> None:
        """There was progress. Costs one look at the clock, and never waits for the supervisor."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _APART_S
        with suppress(BlockingIOError, BrokenPipeError):  # full: those that wait in it say enough
            os.write(self._link.fileno(), b".")


def any_of(link: Connection) -> bool:
    """Was there progress since the last call? `link` is the supervisor's end, which must not block."""
    found = False
    with suppress(BlockingIOError):
        while os.read(link.fileno(), _AT_ONCE):
            found = True
    return found
