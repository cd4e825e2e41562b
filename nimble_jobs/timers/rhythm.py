"""The ticks of a timer: its expression within its bounds, with its jitter. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from nimble_jobs.spec.model import CronSpec
from nimble_jobs.store import Due
from nimble_jobs.ticks import Expression, jitter_s, parse_moment


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """The ticks of one timer. Times are Unix seconds."""

    name: str
    expression: Expression
    jitter: float = 0.0  # seconds over which starts are spread
    start: float = -math.inf  # no tick before
    end: float = math.inf  # no tick after

    @classmethod
    def of(cls, name: str, cron: CronSpec) -> Rhythm:
        """The rhythm in a spec. Raises BadExpression, BadMoment."""
        zone = cron.timezone
        return cls(
            name=name,
            expression=Expression.parse(cron.expression, zone),
            jitter=cron.jitter,
            start=-math.inf if cron.start is None else parse_moment(cron.start, zone),
            end=math.inf if cron.end is None else parse_moment(cron.end, zone, last=True),
        )

    def after(self, at: float) -> Iterator[int]:
        """The ticks strictly later than `at`, ascending."""
        # The bound itself may be a tick, but `after` excludes its argument.
        first = max(at, self.start - 1)
        return takewhile(lambda tick: tick <= self.end, self.expression.after(first))

    def due(self, tick: int) -> Due:
        """When a tick may fire."""
        return Due(tick=tick, at=tick + (jitter_s(self.name, tick, self.jitter) if self.jitter else 0.0))

    def first(self, at: float) -> Due | None:
        """The first tick strictly later than `at`; None after the last one."""
        tick = next(self.after(at), None)
        return None if tick is None else self.due(tick)

    def previous(self, tick: int) -> int | None:
        """The last tick before another one, regardless of the bounds; None if there is none."""
        return self.expression.before(tick)
