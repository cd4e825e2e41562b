"""When something that happens once a day is due."""

from __future__ import annotations

_DAY_S = 86400.0


def slot_of(now: float, clock: str) -> float:
    """The last moment up to `now`, both in Unix seconds, at which it was HH:MM in UTC."""
    hours, minutes = clock.split(":")
    of_day_s = int(hours) * 3600.0 + int(minutes) * 60.0
    return now - (now - of_day_s) % _DAY_S
