"""A duty of every worker: it has the courier look whether notifications are due."""

from __future__ import annotations

from nimble_jobs.courier import Courier
from nimble_jobs.worker.duties import Every

INTERVAL_S = 1.0
LAST_NOTICES_S = 5.0  # how long a process that leaves tries to send what is due


class Send:
    """Starts a round of the courier, whose thread does the sending."""

    name = "notify"

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._every = Every(INTERVAL_S)

    def due(self, now: float) -> bool:
        return self._every.due(now)

    def run(self, now: float) -> None:
        self._every.done(now)
        self._courier.look(now)
