"""The place of a worker's child process: taken, or empty until the next one starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nimble_jobs.errors import NimbleError
from nimble_jobs.worker.process import Child

log = logging.getLogger(__name__)

STARTS = 5  # after this many children in a row that died before they were ready, give up
BACKOFF_S = 0.2  # wait before the next start; it doubles each time


class Seat:
    """Starts children, one after another. Times are of the monotonic clock."""

    def __init__(self, spawn: Callable[[], Child]) -> None:
        self._spawn = spawn
        self._failed_starts = 0
        self.child: Child | None = None
        self.start_at = 0.0  # when an empty seat is filled again

    def fill(self, now: float) -> None:
        """Start a child if there is none and the wait is over."""
        if self.child is None and now >= self.start_at:
            self.child = self._spawn()

    def ready(self) -> None:
        """The child can run jobs."""
        self._failed_starts = 0

    def check(self, now: float, start_s: float) -> None:
        """End a child that takes longer than `start_s` to start, or that hangs while it ends."""
        if self.child and (late := self.child.late(now, start_s)):
            log.error("the child process %s and is killed", late)
            self.child.end()

    def bury(self, now: float) -> str:
        """The child is dead: free its seat and return how it ended. Raises NimbleError if no child ever gets ready."""
        assert self.child is not None
        was_ready = self.child.device is not None
        how = self.child.bury()
        self.child = None
        log.warning("the child process ended: %s", how)
        if not was_ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise NimbleError(f"{STARTS} child processes in a row died before they were ready, the last one: {how}")
            self.start_at = now + BACKOFF_S * 2.0 ** (self._failed_starts - 1)
        return how

    def clear(self) -> None:
        """Leave no child behind; the next one may start at once."""
        self._failed_starts, self.start_at = 0, 0.0
        if self.child:
            self.child.kill()
            self.child.bury()
            self.child = None
