"""Ticks by the slowest way there is: every minute of UTC, looked at by itself. Shares no code with `nimble_jobs.ticks`.

Rules for clock changes, after the manual of Debian's cron (cron(8), on local time changes of less than three hours) and
its source (entry.c sets MIN_STAR and HR_STAR, and cron.c runs jobs with and without them apart):

- a job whose minute or hour starts with `*` runs by the clock as it is;
Rules for clock changes, after the manual of Debian's cron (cron(8), on changes of less than three hours) and

We differ from it for changes of three hours and more: what they skip is due after them, too.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
NAMED = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@weekly": "0 0 * * 0", "@monthly": "0 0 1 * *"}
_MONTHS = dict(zip(map(str.upper, calendar.month_abbr[1:]), range(1, 13), strict=True))
_DAYS = dict(zip(["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"], range(7), strict=True))


def ticks(text: str, zone: str, first: int, last: int) -> Iterator[int]:
    """The ticks from `first` to `last`, both in UTC seconds and whole minutes, both included."""
    fields = NAMED.get(text, text).upper().split()
    rules, fixed = ZoneInfo(zone), not fields[0].startswith("*") and not fields[1].startswith("*")
    start = first - 2 * 86_400 if fixed else first  # to know which times have been
    shown: datetime | None = None  # the latest time that the clocks have shown so far
    for at in range(start, last + 1, 60):
        wall = datetime.fromtimestamp(at, UTC).astimezone(rules).replace(tzinfo=None)
        if not fixed:
            due = matches(fields, wall)
        else:
            due = False
            candidate = wall if shown is None else shown + MINUTE
            while candidate <= wall:  # usually one minute; after a gap, all that it skipped
                due = due or matches(fields, candidate)
                candidate += MINUTE
            shown = wall if shown is None else max(shown, wall)
        if due and at >= first:
            yield at


def matches(fields: list[str], wall: datetime) -> bool:
    """Does a time of the clock match five fields in capitals?"""
    minute, hour, day, month, weekday = fields
    if not (_in(minute, wall.minute, 0, 59) and _in(hour, wall.hour, 0, 23) and _in(month, wall.month, 1, 12, _MONTHS)):
        return False
    by_day = any(_is_day(term, wall) for term in day.split(","))
    by_weekday = any(_is_weekday(term, wall) for term in weekday.split(","))
    both = day.startswith("*") or weekday.startswith("*")
    return (by_day and by_weekday) if both else (by_day or by_weekday)


def _is_day(term: str, wall: datetime) -> bool:
    last = calendar.monthrange(wall.year, wall.month)[1]
    if term == "L":
        return wall.day == last
    if term == "LW":
        working = [n for n in range(1, last + 1) if wall.replace(day=n).isoweekday() <= 5]
        return wall.day == working[-1]
    return _in(term, wall.day, 1, 31)


def _is_weekday(term: str, wall: datetime) -> bool:
    last = calendar.monthrange(wall.year, wall.month)[1]
    today = wall.isoweekday() % 7
    name, nth, number = term.partition("#")
    if nth:
        return today == _number(name, _DAYS) % 7 and (wall.day - 1) // 7 + 1 == int(number)
    if term.endswith("L"):
        return today == _number(term[:-1], _DAYS) % 7 and wall.day + 7 > last
    return _in(term, today, 0, 7, _DAYS) or (today == 0 and _in(term, 7, 0, 7, _DAYS))


def _in(field: str, value: int, low: int, high: int, names: dict[str, int] | None = None) -> bool:
    for term in field.split(","):
        span, _, step = term.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            begin, end = low, high
        else:
            begin = _number(first, names)
            end = (7 if names is _DAYS and last == "SUN" else _number(last, names)) if dash else begin
        if begin <= value <= end and (value - begin) % int(step or 1) == 0:
            return True
    return False


def _number(text: str, names: dict[str, int] | None) -> int:
    return int(text) if text.isdigit() else (names or {})[text]
