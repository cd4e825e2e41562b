"""When to remove old rows, and how many per transaction: as many as take a tenth of a second."""

from __future__ import annotations

TARGET_S = 0.1
_DAY_S = 86400.0


class Pace:
    """A batch size that follows the time of the last part."""

    def __init__(self, *, first: int, least: int, most: int) -> None:
        self.size, self._least, self._most = first, least, most

    def took(self, seconds: float) -> None:
        """Note the time of the last part. The next one is at most twice as large."""
        factor = min(2.0, TARGET_S / max(seconds, 1e-6))
        self.size = max(self._least, min(self._most, int(self.size * factor)))


def slot_of(now: float, clock: str) -> float:
    """The last moment up to `now`, both in Unix seconds, at which it was HH:MM in UTC."""
    hours, minutes = clock.split(":")
    of_day_s = int(hours) * 3600.0 + int(minutes) * 60.0
    return now - (now - of_day_s) % _DAY_S
