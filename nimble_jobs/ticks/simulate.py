"""Simulates a timer's coming year, to find two ticks that would give the same text, such as an output path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

from nimble_jobs.ticks import zones
from nimble_jobs.ticks.expression import Expression
from nimble_jobs.ticks.templates import Template

YEAR_S = 366 * 86_400
_MOST = 50_000  # ticks to look at: a month's, for a timer of every minute
_AROUND_S = 86_400
_LEAST_S = 60  # the least distance of two ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Two ticks, in UTC seconds, that give the same text."""

    first: int
    second: int
    text: str


def coming(expression: Expression, since: float, until: float) -> Iterator[tuple[int, int]]:
    """Pairs of consecutive ticks; the second of each is later than `since` and not later than `until`."""
    before = expression.before(since)
    ticks = takewhile(lambda tick: tick <= until, expression.after(since))
    return pairwise([before, *islice(ticks, _MOST)] if before is not None else islice(ticks, _MOST))


def closest_s(expression: Expression, since: float, until: float) -> int | None:
    """The least distance of consecutive ticks, in seconds; None for fewer than two ticks."""
    closest = None
    for first, second in coming(expression, since, until):
        closest = second - first if closest is None else min(closest, second - first)
        if closest <= _LEAST_S:
            break
    return closest


def clash(text: str, expression: Expression, since: float, until: float) -> Clash | None:
    """The first two ticks in (since, until] that give the same text. Raises BadTemplate.

    Looks at the first 50,000 ticks, and at every tick near a moment when the clocks go back. That is enough: if the
    text names month, day, hour and minute, later ticks can only clash where clocks go back; if it leaves one of them
    out, the first 50,000 ticks clash already.
    """
    template = Template.parse(text)
    spans = [(since, until)] + [
        (at - _AROUND_S, min(at + _AROUND_S, until)) for at in _set_back(expression, since, until)
    ]
    for begin, end in spans:
        seen: dict[str, int] = {}
        for previous, tick in coming(expression, max(begin, since), end):
            filled = template.fill(tick, previous, expression.zone)
            if filled in seen:
                return Clash(first=seen[filled], second=tick, text=filled)
            seen[filled] = tick
    return None


def _set_back(expression: Expression, since: float, until: float) -> Iterator[int]:
    """The moments when the zone's clocks go back."""
    at = int(since)
    offset_s = zones.offset_s(at, expression.zone)
    while (change := zones.first_change(at, int(until), offset_s, expression.zone)) is not None:
        now_s = zones.offset_s(change, expression.zone)
        if now_s < offset_s:
            yield change
        at, offset_s = change, now_s
