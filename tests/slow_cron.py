"""Ticks by the slowest way there is: every minute of UTC, looked at by itself. Shares no code with `nimble_jobs.ticks`.

Rules for clock changes, after the manual of Debian's cron (cron(8), on local time changes of less than three hours) and
its source (entry.c sets MIN_STAR and HR_STAR, and cron.c runs jobs with and without them apart):

- a job whose minute or hour starts with `*` runs by the clock as it is;
Rules for clock changes, after the manual of Debian's cron (cron(8), on changes of less than three hours) and

We differ from it for changes of three hours and more: what they skip is due after them, too.
"""

from __future__ import annotations

import calendar
import importlib.resources
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
NAMED = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@weekly": "0 0 * * 0", "@monthly": "0 0 1 * *"}
_MONTHS = dict(zip(map(str.upper, calendar.month_abbr[1:]), range(1, 13), strict=True))
_DAYS = dict(zip(["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"], range(7), strict=True))


class Rule:
    """Five fields: does a time of the clock match them?"""

    def __init__(self, text: str) -> None:
        minute, hour, self._day, month, self._weekday = NAMED.get(text, text).upper().split()
        self.fixed = not minute.startswith("*") and not hour.startswith("*")
        self._times = {(h, m) for h in range(24) for m in range(60) if _in(hour, h, 0, 23) and _in(minute, m, 0, 59)}
        self._months = {n for n in range(1, 13) if _in(month, n, 1, 12, _MONTHS)}
        self._days: dict[date, bool] = {}

    def matches(self, wall: datetime) -> bool:
        if (wall.hour, wall.minute) not in self._times or wall.month not in self._months:
            return False
        day = wall.date()
        if day not in self._days:
            self._days[day] = self._is_due(wall)
        return self._days[day]

    def _is_due(self, wall: datetime) -> bool:
        by_day = any(_is_day(term, wall) for term in self._day.split(","))
        by_weekday = any(_is_weekday(term, wall) for term in self._weekday.split(","))
        both = self._day.startswith("*") or self._weekday.startswith("*")
        return (by_day and by_weekday) if both else (by_day or by_weekday)


def zone_of(name: str) -> ZoneInfo:
    """The rules of the tzdata package, whatever the machine has."""
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as stream:
        return ZoneInfo.from_file(stream, key=name)


def ticks(texts: Sequence[str], zone: str, first: int, last: int) -> list[list[int]]:
    """The ticks of each expression from `first` to `last`, both in UTC seconds and whole minutes, both included."""
    rules, where = [Rule(text) for text in texts], zone_of(zone)
    found: list[list[int]] = [[] for _ in texts]
    shown: datetime | None = None  # the latest time that the clocks have shown so far
    for at in range(first - 2 * 86_400, last + 1, 60):  # from earlier on, to know which times have been
        wall = datetime.fromtimestamp(at, UTC).astimezone(where).replace(tzinfo=None)
        new = [wall]  # what the clocks show for the first time: usually one minute, after a gap all that it skipped
        if shown is not None:
            new = []
            while shown < wall:
                shown += MINUTE
                new.append(shown)
        shown = wall if shown is None else max(shown, wall)
        if at < first:
            continue
        for rule, dues in zip(rules, found, strict=True):
            if any(rule.matches(time) for time in new) if rule.fixed else rule.matches(wall):
                dues.append(at)
    return found


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
