"""A duty of every worker: it has the courier look whether notifications are due."""

from __future__ import annotations

from nimble_jobs.courier import Courier

LAST_NOTICES_S = 5.0  # how long a process that leaves tries to send what is due


class Send:
    """Starts a round of the courier, whose thread does the sending."""

    name = "notify"
    every_s = 1.0

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def run(self, now: float) -> None:
        self._courier.look(now)
