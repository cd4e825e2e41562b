"""Finds a timer's due ticks, and those that are too late. Pure. `overlap.py` handles open jobs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from nimble_jobs.spec.model import CronSpec
from nimble_jobs.spec.units import format_duration
from nimble_jobs.store import Due, TickKind
from nimble_jobs.timers.rhythm import Rhythm

PUNCTUAL_S = 30.0  # a tick that fires within this time is on time; ticks are at least a minute apart
AT_ONCE = 1000  # ticks in one transaction; a run of this many missed ticks gets one row
JOBS_AT_ONCE = 50  # jobs submitted in one transaction


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision about a tick, or about several missed ones. Times are Unix seconds."""

    due: int
    kind: TickKind
    missed: str | None = None  # why it is too late; None if it is to be fired
    until: int | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions about due ticks, and the tick after them."""

    verdicts: tuple[Verdict, ...] = ()
    then: Due | None = None
    more: bool = False  # `then` is due too


@dataclass(frozen=True, kw_only=True)
class _Ripe:
    tick: int
    late_s: float
    last: bool  # there is no later due tick


def plan(rhythm: Rhythm, cron: CronSpec, *, next_due: int, now: float, taken: Collection[int] = ()) -> Plan:
    """Decide about the ticks from `next_due` to `now`, at most AT_ONCE of them. `taken` ticks have rows already.

    A tick that is late by more than `grace` is missed. So is a tick with a later due tick after it, unless it is on
    time or `catch_up` is all. With `catch_up: none`, the default of `grace` is 30 s.
    """
    ripe, then = _ripe(rhythm, next_due, now)
    more = then is not None and then.at <= now
    verdicts: list[Verdict] = []
    fired = 0
    for each in ripe:
        if each.tick in taken:
            continue
        if fired == JOBS_AT_ONCE:
            return Plan(verdicts=tuple(verdicts), then=rhythm.due(each.tick), more=True)
        verdict = _verdict(each, cron)
        fired += verdict.missed is None
        verdicts.append(verdict)
    if more and len(verdicts) == AT_ONCE and not fired:
        verdicts = [_summed(verdicts)]
    return Plan(verdicts=tuple(verdicts), then=then, more=more)


def _ripe(rhythm: Rhythm, next_due: int, now: float) -> tuple[list[_Ripe], Due | None]:
    """The due ticks, oldest first, and the tick after them."""
    dues: list[Due] = []
    for due in _from(rhythm, next_due):
        if due.at > now or len(dues) == AT_ONCE:
            return _with_lateness(dues, now, more=due.at <= now), due
        dues.append(due)
    return _with_lateness(dues, now, more=False), None


def _from(rhythm: Rhythm, tick: int) -> Iterator[Due]:
    return map(rhythm.due, chain([tick], rhythm.after(tick)))


def _with_lateness(dues: list[Due], now: float, *, more: bool) -> list[_Ripe]:
    last = len(dues) - 1
    return [
        _Ripe(tick=due.tick, late_s=now - due.at, last=place == last and not more) for place, due in enumerate(dues)
    ]


def _verdict(ripe: _Ripe, cron: CronSpec) -> Verdict:
    on_time = ripe.late_s <= PUNCTUAL_S
    missed = None
    default_s = PUNCTUAL_S if cron.catch_up == "none" else math.inf
    grace_s = default_s if cron.grace is None else cron.grace
    if ripe.late_s > grace_s:
        late = format_duration(math.floor(ripe.late_s))
        rule = "catch_up: none" if cron.grace is None else f"grace: {format_duration(cron.grace)}"
        missed = f"no process fired it in time ({late} late; {rule})"
    elif not ripe.last and not on_time and cron.catch_up != "all":
        missed = f"no process fired it before the next one was due (catch_up: {cron.catch_up})"
    if missed is not None:
        return Verdict(due=ripe.tick, kind=TickKind.SCHEDULED, missed=missed)
    return Verdict(due=ripe.tick, kind=TickKind.SCHEDULED if on_time else TickKind.CATCH_UP)


def _summed(verdicts: list[Verdict]) -> Verdict:
    first, last = verdicts[0], verdicts[-1]
    reason = f"no process fired these {len(verdicts)} ticks; of the first: {first.missed}"
    return Verdict(due=first.due, kind=first.kind, missed=reason, until=last.due, count=len(verdicts))
