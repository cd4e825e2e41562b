"""A duty of every worker: lets the courier send due notifications."""

from __future__ import annotations

from nimble_jobs.courier import Courier

LAST_NOTICES_S = 5.0  # how long a process that ends tries to send due notifications


class Send:
    """Starts a round of the courier, whose thread does the sending."""

    name = "notify"
    every_s = 1.0

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def run(self, now: float) -> None:
        self._courier.look(now)
