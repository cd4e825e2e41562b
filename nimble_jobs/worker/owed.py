"""Writes that a supervisor owes the store: how attempts ended while it could not be written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nimble_jobs.errors import StoreError

log = logging.getLogger(__name__)


class Owed:
    """Writes in the order in which they are due. Each must bear being done twice."""

    def __init__(self) -> None:
        self._writes: list[Callable[[], object]] = []

    def add(self, write: Callable[[], object]) -> None:
        """One more, to be done by the next `pay`."""
        self._writes.append(write)

    def pay(self) -> None:
        """Do them. Raises StoreError; those that are left are done by a later call."""
        while self._writes:
            self._writes[0]()
            del self._writes[0]

    def settle(self, limit_s: float) -> None:
        """The last chance. What cannot be written is left to the next worker, which finds jobs by free locks."""
        until = time.monotonic() + limit_s
        while self._writes:
            try:
                self.pay()
            except StoreError as error:
                if time.monotonic() > until:
                    log.error("left unwritten, the next worker takes the job back: %s", error)
                    return
                time.sleep(0.1)
