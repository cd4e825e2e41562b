"""How an attempt to deliver a notification fails."""

from __future__ import annotations


class NotTaken(Exception):
    """The message was not delivered. `retry_after_s`: how long the receiver wants to be left alone, if it said so."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(NotTaken):
    """The attempt failed. Its text holds no secret."""
