"""Fires due ticks, a part at a time. Any number of processes may do this for one store."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from nimble_jobs.errors import NimbleError, StoreError, first_line
from nimble_jobs.spec.model import CronSpec
from nimble_jobs.store import Store, Tick, TickKind, TickOutcome, Timer, TimerState
from nimble_jobs.store.firing import GAP_S, Planned
from nimble_jobs.store.open_jobs import WAITING_AT_MOST
from nimble_jobs.timers.overlap import may_go, policy
from nimble_jobs.timers.plan import Verdict, plan
from nimble_jobs.timers.rhythm import Rhythm
from nimble_jobs.timers.submission import cron_of, job_for

log = logging.getLogger(__name__)

CLOCK_S = 60.0  # smaller corrections of a clock change nothing
BUDGET_S = 0.25  # how long one part may take


@dataclass(frozen=True, kw_only=True)
class Fired:
    """The result of one part."""

    ticks: tuple[Tick, ...] = ()  # ticks that got rows or jobs
    more: bool = False  # more is due now


class Firer:
    """Fires the timers of a store."""

    def __init__(
        self, store: Store, *, budget_s: float = BUDGET_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._budget_s = budget_s
        self._monotonic = monotonic

    def run(self, now: float) -> Fired:
        """Fire what is due at `now`, one part per timer, until the time is used up. Raises StoreError."""
        until = self._monotonic() + self._budget_s
        timers = self._store.timers.due(now, slack_s=CLOCK_S)
        random.shuffle(timers)  # timers with many due ticks must not delay the others
        ticks: list[Tick] = []
        more = False
        for place, timer in enumerate(timers):
            if place and self._monotonic() > until:
                return Fired(ticks=tuple(ticks), more=True)
            done, left = self._fire(timer, now)
            ticks += done
            more |= left
        return Fired(ticks=tuple(ticks), more=more)

    def _fire(self, timer: Timer, now: float) -> tuple[list[Tick], bool]:
        """Do one part of a timer's work; returns whether more is left."""
        try:
            cron = cron_of(timer)
            rhythm = Rhythm.of(timer.name, cron)
        except (NimbleError, ValueError) as e:  # its ticks are unknown
            return self._stop(timer, first_line(e), now), False
        active = timer.state is TimerState.ACTIVE
        if active and _set_back(timer, now):
            self._rewind(timer, rhythm, now)
            return [], False
        ticks, full = self._release(timer, cron, rhythm, now)
        if not active or full or timer.next_due is None or timer.next_at is None or timer.next_at > now:
            return ticks, False
        taken = self._store.timers.taken(timer)
        parts = plan(rhythm, cron, next_due=timer.next_due, now=now, taken=taken)
        planned = [self._planned(timer, verdict, rhythm) for verdict in parts.verdicts]
        absent = any(each.missed or each.kind is TickKind.CATCH_UP for each in parts.verdicts)
        fired = self._store.timers.fire(timer, planned, parts.then, policy(cron), now, absent=absent)
        return [*ticks, *(fired or ())], parts.more and fired is not None

    def _release(self, timer: Timer, cron: CronSpec, rhythm: Rhythm, now: float) -> tuple[list[Tick], bool]:
        """Release waiting ticks. Also returns whether so many wait that no more may be added."""
        standing = self._store.timers.standing(timer.name)
        ticks = []
        for tick in (*standing.waiting, *standing.backfill):
            expired = _expired(tick, cron, rhythm, now)
            if expired is None and not may_go(tick)(standing):
                continue
            verdict = Verdict(due=tick.due, kind=tick.kind, missed=expired)
            done = self._store.timers.release(timer, tick, self._planned(timer, verdict, rhythm), may_go(tick), now)
            if done is not None:
                ticks.append(done)
                standing = self._store.timers.standing(timer.name)
        return ticks, len(standing.waiting) >= WAITING_AT_MOST

    def _planned(self, timer: Timer, verdict: Verdict, rhythm: Rhythm) -> Planned:
        """A verdict with the job to submit, or with the reason why there is none."""
        outcome, reason, job = TickOutcome.MISSED, verdict.missed, None
        if reason is None:
            try:
                job = job_for(timer, verdict.due, rhythm, home=self._store.home)
            except StoreError:
                raise
            except Exception as e:  # noqa: BLE001  # whatever is wrong with a spec, the timer and the others go on
                outcome, reason = TickOutcome.ERROR, str(e) if isinstance(e, NimbleError) else first_line(e)
        return Planned(
            due=verdict.due,
            kind=verdict.kind,
            job=job,
            outcome=None if job else outcome,
            reason=reason,
            until=verdict.until,
            count=verdict.count,
        )

    def _rewind(self, timer: Timer, rhythm: Rhythm, now: float) -> None:
        log.warning("timer %s: the clock was set back; missed ticks after now become due again", timer.name)
        cuts = {}
        for first, _last, _count in self._store.timers.crossing(timer, now):
            passed = list(takewhile(lambda tick: tick <= now, rhythm.after(first - 1)))
            cuts[first] = (passed[-1], len(passed)) if passed else (first, 1)
        self._store.timers.rewind(timer, rhythm.first(now), cuts, now)

    def _stop(self, timer: Timer, reason: str, now: float) -> list[Tick]:
        """Record in one row that a timer cannot be read, and stop it."""
        if timer.next_due is None or timer.next_at is None or timer.next_at > now:
            return []
        log.error("timer %s: %s", timer.name, reason)
        planned = Planned(due=timer.next_due, kind=TickKind.SCHEDULED, outcome=TickOutcome.ERROR, reason=reason)
        return self._store.timers.fire(timer, [planned], None, policy(CronSpec(expression="@daily")), now) or []


def _set_back(timer: Timer, now: float) -> bool:
    """Whether the clock showed a time during the last absence that is now in the future."""
    if timer.gap_from is None or timer.gap_at is None or timer.moved_at > timer.gap_at + GAP_S:
        return False
    return timer.gap_from <= now < timer.moved_at - CLOCK_S


def _expired(tick: Tick, cron: CronSpec, rhythm: Rhythm, now: float) -> str | None:
    """The reason if a tick has waited for too long."""
    if cron.grace is None or tick.kind is TickKind.BACKFILL:
        return None
    late_s = now - rhythm.due(tick.due).at
    return f"still waited after {late_s:.0f} s; {tick.reason}; grace: {cron.grace:g} s" if late_s > cron.grace else None
