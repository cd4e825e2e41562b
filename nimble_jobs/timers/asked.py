"""Ticks on demand: a job now, or jobs for past ticks that have none."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice, takewhile

from nimble_jobs.errors import StoreError, UsageError
from nimble_jobs.store import Store, Tick, Timer, TimerState
from nimble_jobs.store.asked import RAN
from nimble_jobs.store.timer_records import utc
from nimble_jobs.timers.keep import rhythm_of
from nimble_jobs.timers.submission import job_for

MOST = 10_000  # ticks of one backfill
_TRIES = 100


@dataclass(frozen=True, kw_only=True)
class BackfillTick:
    """A tick in the range of a backfill."""

    due: int  # Unix seconds
    before: Tick | None  # its row, or the row of several ticks that includes it
    runs: bool  # False if it has a job already


@dataclass(frozen=True, kw_only=True)
class Backfill:
    """The ticks of a backfill, done or planned."""

    timer: Timer
    ticks: tuple[BackfillTick, ...]

    @property
    def runs(self) -> tuple[int, ...]:
        """The ticks that get jobs."""
        return tuple(tick.due for tick in self.ticks if tick.runs)


def trigger(store: Store, name: str, *, now: float) -> Tick:
    """Submit a timer's job now, even if it is paused or other jobs of it are open.

    Its templates use this second as the tick. Raises NotFound, and what `submit` raises for a spec.
    """
    for second in islice(count(int(now)), _TRIES):
        if second % 60 == 0:  # this second may be a regular tick
            continue
        timer = store.timers.get(name)
        job = job_for(timer, second, rhythm_of(timer), home=store.home)
        tick = store.timers.trigger(timer, second, job, now)
        if tick is not None:
            return tick
    raise StoreError(f"timer {name} was triggered more than once in a second; try again")


def backfill(
    store: Store,
    name: str,
    *,
    since: float,
    until: float,
    max_running: int = 1,
    dry_run: bool = False,
    now: float,
) -> Backfill:
    """Run the ticks without a job from `since` to `until`, both included: skipped, missed, empty and failed ticks, and
    ticks from before the timer was added. At most `max_running` of its jobs are open at once.

    The processes that fire timers submit the jobs, oldest tick first, regardless of `overlap` and `grace`. Ticks
    without a decision yet are left out. Raises NotFound, Damaged, and UsageError for a range without a tick, or with
    more than 10,000.
    """
    if max_running < 1:
        raise UsageError(f"--max-running: found {max_running}; expected at least 1")
    for _ in range(_TRIES):
        timer = store.timers.get(name)
        planned = _look(store, timer, since, min(until, _decided(timer, now)))
        if dry_run or not planned.runs:
            return planned
        rhythm = rhythm_of(timer)
        done = store.timers.backfill(
            timer,
            planned.runs,
            lambda tick, rhythm=rhythm: next(rhythm.after(tick)),  # type: ignore[misc]
            max_running=max_running,
            now=now,
        )
        if done is not None:
            return planned
    raise StoreError(f"timer {name} keeps changing; try again")


def _decided(timer: Timer, now: float) -> float:
    """The time up to which all ticks are decided."""
    if timer.state is TimerState.ACTIVE and timer.next_due is not None:
        return min(now, timer.next_due - 1)
    return now


def _look(store: Store, timer: Timer, since: float, until: float) -> Backfill:
    after = rhythm_of(timer).after(since - 1e-6)
    dues = list(islice(takewhile(lambda tick: tick <= until, after), MOST + 1))
    between = f"from {utc(since)} to {utc(until)}"
    if since > until:
        problem = f"no tick since {utc(since)} has passed yet"
        raise UsageError(f"timer {timer.name}: {problem}; expected a range with past ticks")
    if not dues:
        raise UsageError(f"timer {timer.name}: no tick {between}; expected a range with past ticks")
    if len(dues) > MOST:
        raise UsageError(f"timer {timer.name}: more than {MOST:,} ticks {between}; expected a shorter range")
    single, several = store.timers.covered(timer.name, dues[0], dues[-1])

    def before(due: int) -> Tick | None:
        return single.get(due) or next((t for t in several if t.due <= due <= (t.until or t.due)), None)

    rows = ((due, before(due)) for due in dues)
    return Backfill(
        timer=timer,
        ticks=tuple(BackfillTick(due=due, before=row, runs=row is None or row.outcome not in RAN) for due, row in rows),
    )
