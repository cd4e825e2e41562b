"""When a timer is due: five fields in a zone, to the moments that they mean.

The rules for clock changes are those of Debian's cron: its manual, cron(8), and its source, which tells jobs with a
wildcard from others (entry.c: MIN_STAR, HR_STAR). If neither minute nor hour starts with `*`, an expression means
times of the day: a skipped time is due at the moment after the gap, a repeated one at its first pass only. Any other
expression means a rhythm: it is due whenever the clocks of the zone show a time that matches. Debian takes a change of
three hours or more for a correction of the clock and leaves skipped times out. Here they are due after the gap.

cronsim finds the matching times, without a zone and forwards only. Its own handling of zones differs from these rules
at midnights that do not exist, and backwards at half-hour changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from cronsim.explain import explain

from nimble_jobs.ticks import fields, zones
from nimble_jobs.ticks.errors import BadExpression

_EPOCH = datetime(1970, 1, 1)
_SOME_YEAR = datetime(2001, 1, 1)
_LONGEST_S = 60 * 366 * 86_400  # longer than cronsim looks ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """When a timer is due. Make one with `parse`."""

    text: str  # as it was given
    fields: str  # five fields, without names
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, zone: str) -> Expression:
        """Check an expression and the name of a zone. Raises BadExpression, also for one that is never due."""
        normal = fields.normalise(text)
        rules = zones.load(zone)
        try:
            comes = next(CronSim(normal, _SOME_YEAR), None)
        except CronSimError:  # it sees some of the impossible dates by itself
            comes = None
        if comes is None:
            raise BadExpression(f"{text!r} is never due: there is no such date", "a date that exists")
        return cls(text=text, fields=normal, zone=rules)

    @property
    def times_of_day(self) -> bool:
        """Are times of the day meant, and not a rhythm? So they are where neither minute nor hour starts with `*`."""
        minute, hour = self.fields.split()[:2]
        return not minute.startswith("*") and not hour.startswith("*")

    def after(self, t: float) -> Iterator[int]:
        """The ticks strictly later than `t`, in UTC seconds, ascending, none twice.

        It ends where nothing matches for fifty years, and with the year 9999.
        """
        try:
            yield from self._times(int(t // 1)) if self.times_of_day else self._rhythm(int(t // 1))
        except (OverflowError, ValueError):  # past the year 9999
            return

    def before(self, t: float) -> int | None:
        """The last tick strictly earlier than `t`, found forwards; None where nothing matches for fifty years."""
        span_s = 7200
        while span_s <= _LONGEST_S:
            last = None
            for tick in self.after(t - span_s):
                if tick >= t:
                    break
                last = tick
            if last is not None:
                return last
            span_s *= 4
        return None

    def words(self) -> str:
        """A sentence without a capital: `at 02:15 every day, Europe/Berlin`."""
        said = explain(self.fields)
        said = re.sub(r"\b(\d*[02-9])?([123])th\b", _ordinal, said)
        _, _, day, _, weekday = self.fields.split()
        if not day.startswith("*") and not weekday.startswith("*"):
            said = said.replace(" and on ", " or on ", 1)
        return f"{said[0].lower()}{said[1:]}, {self.zone.key}"

    def _times(self, t: int) -> Iterator[int]:
        last = t
        for wall in CronSim(self.fields, _wall(t, self.zone)):
            tick = zones.utc_of(wall, self.zone)
            if tick > last:  # several skipped times are due at one moment
                yield tick
                last = tick

    def _rhythm(self, t: int) -> Iterator[int]:
        """Walk through one span of equal offsets after another."""
        offset_s = zones.offset_s(t, self.zone)
        while True:
            change, quiet = None, t  # no change of the clocks up to `quiet`
            for wall in CronSim(self.fields, _EPOCH + timedelta(seconds=t + offset_s)):
                tick = _seconds(wall) - offset_s
                if tick > quiet:
                    ahead = max(tick, quiet + zones.DAY_S)
                    change = zones.first_change(quiet, ahead, offset_s, self.zone)
                    quiet = ahead if change is None else change - 1
                    if tick > quiet:
                        break
                yield tick
            else:
                return
            # From the second before the change on, by the clocks after it: the change's own second may match.
            assert change is not None
            t, offset_s = change - 1, zones.offset_s(change, self.zone)


def _wall(t: int, zone: ZoneInfo) -> datetime:
    return _EPOCH + timedelta(seconds=t + zones.offset_s(t, zone))


def _seconds(wall: datetime) -> int:
    return int((wall - _EPOCH).total_seconds())


def _ordinal(found: re.Match[str]) -> str:
    return f"{found[1] or ''}{found[2]}{dict(zip('123', ('st', 'nd', 'rd'), strict=True))[found[2]]}"
