"""How an attempt to deliver a notification fails."""

from __future__ import annotations


class NotTaken(Exception):
    """The receiver did not take the message; `retry_after_s` is what it asked for."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """The attempt failed. Its text holds no secret; `retry_after_s` is how long the receiver wants to be left alone."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
