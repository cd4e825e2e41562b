"""Writes that a supervisor owes the store: ends of attempts that could not be recorded yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nimble_jobs.errors import StoreError

log = logging.getLogger(__name__)


class Owed:
    """Pending writes, in order. Each must be safe to repeat."""

    def __init__(self) -> None:
        self._writes: list[Callable[[], object]] = []

    def add(self, write: Callable[[], object]) -> None:
        """Add a write for the next `pay`."""
        self._writes.append(write)

    def rest(self) -> list[Callable[[], object]]:
        """The writes that are still pending, for another list."""
        writes, self._writes = self._writes, []
        return writes

    def pay(self) -> None:
        """Do the writes. Raises StoreError; a later call does the remaining ones."""
        while self._writes:
            self._writes[0]()
            del self._writes[0]

    def settle(self, limit_s: float) -> None:
        """Last try before the process ends. What still fails is left to the next worker, which recovers jobs by free
        locks.
        """
        until = time.monotonic() + limit_s
        while self._writes:
            try:
                self.pay()
            except StoreError as error:
                if time.monotonic() > until:
                    log.error("the end of the job was not recorded; the next worker recovers it: %s", error)
                    return
                time.sleep(0.1)
