"""Reads the bounds of a timer: a date, or a date with a time of day."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from nimble_jobs.ticks import zones
from nimble_jobs.ticks.errors import BadMoment

EXPECTED = (
    "a date such as 2027-01-31 or a time such as 2027-01-31T18:00, in the timer's zone unless it ends with an offset"
)
PATTERN = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:Z|[+-]\d{2}:\d{2})?)?"
_PATTERN = re.compile(PATTERN, re.ASCII)


def parse_moment(text: str, zone: str, *, last: bool = False) -> int:
    """UTC seconds of `2027-01-31`, `2027-01-31T18:00` (both in `zone`) or `2027-01-31T18:00:00+01:00`.

    A date alone means its first second, or with `last` its last one. Raises BadMoment and BadZone.
    """
    rules = zones.load(zone)
    try:
        if not _PATTERN.fullmatch(text):
            raise ValueError
        wall = datetime.fromisoformat(text)
        if last and len(text) == len("2027-01-31"):
            return zones.utc_of(wall + timedelta(days=1), rules) - 1
        return zones.utc_of(wall, rules) if wall.tzinfo is None else int(wall.timestamp())
    except (ValueError, OverflowError):  # also the 31st of February
        raise BadMoment(f"found {text[:60]!r}", EXPECTED) from None
