"""What a timer would do in the coming year: is any text, such as a path, made twice?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

from nimble_jobs.ticks import zones
from nimble_jobs.ticks.expression import Expression
from nimble_jobs.ticks.templates import Template

YEAR_S = 366 * 86_400
_MOST = 50_000  # ticks that are walked through one by one: those of a month for a timer of every minute
_AROUND_S = 86_400
_LEAST_S = 60  # no two ticks are closer


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Two ticks, in UTC seconds, that give one text."""

    first: int
    second: int
    text: str


def coming(expression: Expression, since: float, until: float) -> Iterator[tuple[int, int]]:
    """The ticks later than `since`, up to `until`, each after the tick before it."""
    before = expression.before(since)
    ticks = takewhile(lambda tick: tick <= until, expression.after(since))
    return pairwise([before, *islice(ticks, _MOST)] if before is not None else islice(ticks, _MOST))


def closest_s(expression: Expression, since: float, until: float) -> int | None:
    """The least distance of two ticks in a row, in seconds; None where there are no two."""
    closest = None
    for first, second in coming(expression, since, until):
        closest = second - first if closest is None else min(closest, second - first)
        if closest <= _LEAST_S:
            break
    return closest


def clash(text: str, expression: Expression, since: float, until: float) -> Clash | None:
    """The first two ticks later than `since`, up to `until`, that give one text. Raises BadTemplate.

    Looks at 50,000 ticks, and at all around the moments when clocks go back: only there can further ones be alike
    where a text names month, day, hour and minute, and where it does not, the first 50,000 have shown that.
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
    """The moments at which the clocks of the zone go back."""
    at = int(since)
    offset_s = zones.offset_s(at, expression.zone)
    while (change := zones.first_change(at, int(until), offset_s, expression.zone)) is not None:
        now_s = zones.offset_s(change, expression.zone)
        if now_s < offset_s:
            yield change
        at, offset_s = change, now_s
