"""Errors of attempts to deliver a notification."""

from __future__ import annotations


class NotTaken(Exception):
    """The message was not delivered. `retry_after_s`: the wait that the receiver asked for, if any."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(NotTaken):
    """The attempt failed. Its text holds no secret."""
