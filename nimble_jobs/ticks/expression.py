"""Turns the five fields of an expression, in a time zone, into the moments when a timer is due.

Clock changes are handled as in Debian's cron, after its manual cron(8) and its source (entry.c: MIN_STAR, HR_STAR). An
expression whose minute and hour both do not start with `*` names times of the day: a skipped time is due right after
the gap, and a repeated time only the first time. Any other expression is a rhythm: it is due whenever the zone's clocks
show a matching time. There is one difference: Debian's cron takes a change of three hours or more for a correction of
the clock and leaves skipped times out. Here they are due after the gap.

cronsim finds the matching times, without a zone and forwards only. Its own zone handling differs from these rules at
midnights that do not exist, and backwards at half-hour changes.
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
_LONGEST_S = 60 * 366 * 86_400  # longer than cronsim's horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """When a timer is due. Make one with `parse`."""

    text: str  # as the user wrote it
    fields: str  # five fields, without names
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, zone: str) -> Expression:
        """Check an expression and the name of a zone. Raises BadExpression, also if the expression is never due."""
        normal = fields.normalise(text)
        rules = zones.load(zone)
        try:
            comes = next(CronSim(normal, _SOME_YEAR), None)
        except CronSimError:  # cronsim finds some of the impossible dates itself
            comes = None
        if comes is None:
            raise BadExpression(f"{text!r} is never due: there is no such date", "a date that exists")
        return cls(text=text, fields=normal, zone=rules)

    @property
    def times_of_day(self) -> bool:
        """Whether the expression names times of the day: neither minute nor hour starts with `*`."""
        minute, hour = self.fields.split()[:2]
        return not minute.startswith("*") and not hour.startswith("*")

    def after(self, t: float) -> Iterator[int]:
        """The ticks strictly later than `t`, in UTC seconds, ascending and without repeats.

        Ends if nothing matches for fifty years, and after the year 9999.
        """
        try:
            yield from self._times(int(t // 1)) if self.times_of_day else self._rhythm(int(t // 1))
        except (OverflowError, ValueError):  # past the year 9999
            return

    def before(self, t: float) -> int | None:
        """The last tick strictly earlier than `t`; None if nothing matches for fifty years."""
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
        """The expression in words, without a capital: `at 02:15 every day, Europe/Berlin`."""
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
        """Walk through the spans of equal UTC offset, one after another."""
        offset_s = zones.offset_s(t, self.zone)
        while True:
            change, quiet = None, t  # the clocks do not change up to `quiet`
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
            # Go on from the second before the change, with the offset after it: the second of the change may match.
            assert change is not None
            t, offset_s = change - 1, zones.offset_s(change, self.zone)


def _wall(t: int, zone: ZoneInfo) -> datetime:
    return _EPOCH + timedelta(seconds=t + zones.offset_s(t, zone))


def _seconds(wall: datetime) -> int:
    return int((wall - _EPOCH).total_seconds())


def _ordinal(found: re.Match[str]) -> str:
    return f"{found[1] or ''}{found[2]}{dict(zip('123', ('st', 'nd', 'rd'), strict=True))[found[2]]}"
