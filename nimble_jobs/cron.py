"""The `cron` commands as Python functions. Never loads torch."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from nimble_jobs import client
from nimble_jobs import spec as specs
from nimble_jobs.client import Home
from nimble_jobs.errors import NimbleError, NotFound, UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec.model import CronSpec
from nimble_jobs.store import Due, Store, Tick, Timer, TimerChange, TimerState, WorkerInfo
from nimble_jobs.ticks import BadMoment, parse_moment
from nimble_jobs.timers import Backfill, Fired, Firer, Rhythm
from nimble_jobs.timers import backfill as _backfill
from nimble_jobs.timers import put as _put
from nimble_jobs.timers import resume as _resume
from nimble_jobs.timers import trigger as _trigger
from nimble_jobs.timers import upcoming as _upcoming
from nimble_jobs.timers.keep import rhythm_of
from nimble_jobs.timers.submission import cron_of, rendered

_SHOWN = 5

FIRING_ROLES = ("worker", "cron")  # roles of processes that fire timers


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A timer, the outcome of its last tick, and its next tick."""

    timer: Timer
    cron: CronSpec | None  # None if it cannot be read
    words: str  # at 02:15 every day, Europe/Berlin; or why it cannot be read
    last: Tick | None
    last_state: JobState | None  # id of its job; None if there is none, or it was pruned
    last_error: str | None  # state of that job
    next: Due | None  # None while it is paused, and after its last tick
    late_s: float  # how long the next tick has been due; 0 if it is in the future


@dataclass(frozen=True, kw_only=True)
class Added:
    """A timer that was added, edited, or left unchanged."""

    name: str
    change: TimerChange | None  # None if nothing was changed, as in a dry run
    words: str
    zone: str
    next: tuple[Due, ...]  # the next five ticks
    changed: tuple[str, ...] = ()  # dotted names of fields that an edit changed
    file_before: str | None = None  # the timer's previous file, if it was another one


def add(
    spec: JobSpec | Path | str,
    *,
    store: Store | None = None,
    home: Home = None,
    overrides: Sequence[str] = (),
    allow_python: Sequence[Path | str] = (),
    file: Path | None = None,
    now: float | None = None,
) -> Added:
    """Add a timer for a spec with `cron`, or for a file with one. It has the spec's name.

    A timer of that name is edited: its ticks count from `now`, and earlier ones are not fired. An equal spec changes
    nothing. `file` is the origin of a JobSpec. Raises SpecError, and UsageError for a spec without `cron` and for
    `python:` files in folders that are not allowed.
    """
    at = _now(now)
    if not isinstance(spec, JobSpec):
        file = Path(spec)
        spec = specs.load(file, overrides, now=at)
    elif overrides:
        raise UsageError("overrides go with a spec file; a JobSpec is final")
    file = file or Path(f"{spec.name}.yaml")
    looked = look(spec, file=file, now=at)
    with client.opened(store, home) as store:
        folders = client.permitted(spec, allow_python, settings=store.settings.now())
        specs.check_home(spec, store.home)
        with suppress(NotFound):
            before = store.timers.get(spec.name)
            looked = replace(looked, changed=_changed(before.spec, specs.dump(spec)))
            if Path(before.base, Path(before.file).name) != file.absolute():
                looked = replace(looked, file_before=before.file)
        _, change = _put(store, spec, file=file, allow_python=folders, now=at)
        return replace(looked, change=change)


def look(spec: JobSpec, *, file: Path | None = None, now: float | None = None) -> Added:
    """What `add` would return, without adding anything. Raises UsageError for a spec without `cron`."""
    if spec.cron is None:
        raise UsageError(f"{file or spec.name}: cron: missing; expected a cron part with an expression")
    rhythm = Rhythm.of(spec.name, spec.cron)
    dues = tuple(map(rhythm.due, islice(rhythm.after(_now(now)), _SHOWN)))
    return Added(name=spec.name, change=None, words=rhythm.expression.words(), zone=spec.cron.timezone, next=dues)


def as_of(spec: JobSpec, now: float | None = None) -> tuple[JobSpec, int]:
    """The job of a spec's last tick up to `now`, without `cron`, and this tick; the next tick if there was none.

    Raises UsageError for a spec without `cron`.
    """
    if spec.cron is None:
        raise UsageError(f"{spec.name}: cron: missing; expected a cron part with an expression")
    rhythm = Rhythm.of(spec.name, spec.cron)
    tick = rhythm.expression.before(_now(now) + 1e-6)
    tick = next(rhythm.expression.after(_now(now))) if tick is None else tick
    return specs.restore(rendered(specs.dump(spec), tick, rhythm) | {"cron": None}), tick


def timers(*, store: Store | None = None, home: Home = None, now: float | None = None) -> list[Watched]:
    """All timers, by name."""
    with client.opened(store, home) as store:
        last, at = store.timers.last_ticks(), _now(now)
        return [_watched(store, timer, last.get(timer.name), at) for timer in store.timers.list()]


def show(name: str, *, store: Store | None = None, home: Home = None, now: float | None = None) -> Watched:
    """One timer. Raises NotFound."""
    with client.opened(store, home) as store:
        timer = store.timers.get(name)
        return _watched(store, timer, next(iter(store.timers.ticks(name, limit=1)), None), _now(now))


def history(name: str, *, store: Store | None = None, home: Home = None, limit: int | None = None) -> list[Tick]:
    """The past ticks of a timer, the newest first. Raises NotFound."""
    with client.opened(store, home) as store:
        return store.timers.ticks(store.timers.get(name).name, limit=limit)


def job_of(store: Store, tick: Tick) -> Job | None:
    """A tick's job; None if there is none, or it was pruned."""
    if tick.job is None:
        return None
    try:
        return store.jobs.get(tick.job)
    except NotFound:
        return None


def upcoming(
    name: str | None = None,
    count: int = 10,
    *,
    store: Store | None = None,
    home: Home = None,
    now: float | None = None,
) -> list[tuple[Timer, Due]]:
    """The next ticks of a timer, or of all that are not paused, the earliest first. Raises NotFound."""
    at = _now(now)
    with client.opened(store, home) as store:
        if name is not None:
            chosen = [store.timers.get(name)]
        else:
            chosen = [timer for timer in store.timers.list() if timer.state is TimerState.ACTIVE]
    each = ([(timer, due) for due in _upcoming(timer, count, now=at)] for timer in chosen)
    return list(islice(heapq.merge(*each, key=lambda pair: (pair[1].tick, pair[0].name)), count))


def pause(name: str, *, store: Store | None = None, home: Home = None, now: float | None = None) -> Timer:
    """Stop firing a timer until it is resumed. Raises NotFound."""
    with client.opened(store, home) as store:
        return store.timers.pause(name, _now(now))


def resume(name: str, *, store: Store | None = None, home: Home = None, now: float | None = None) -> Timer:
    """Fire a timer again, from its first tick after `now`. Ticks that were due during the pause are not fired."""
    with client.opened(store, home) as store:
        return _resume(store, name, _now(now))


def trigger(name: str, *, store: Store | None = None, home: Home = None, now: float | None = None) -> Tick:
    """Submit a timer's job now, even if it is paused; templates use this second. Raises NotFound, SpecError."""
    with client.opened(store, home) as store:
        return _trigger(store, name, now=_now(now))


def remove(name: str, *, store: Store | None = None, home: Home = None, now: float | None = None) -> Timer:
    """Remove a timer and the record of its ticks. Its jobs stay. Raises NotFound."""
    with client.opened(store, home) as store:
        return store.timers.remove(name, _now(now))


def backfill(
    name: str,
    since: float | str,
    until: float | str,
    *,
    max_running: int = 1,
    dry_run: bool = False,
    store: Store | None = None,
    home: Home = None,
    now: float | None = None,
) -> Backfill:
    """Run past ticks without a job from `since` to `until`, both included; at most `max_running` jobs at once.

    Bounds are Unix seconds, or texts such as `2026-11-01` in the timer's zone. A date alone as `until` includes the
    whole day. The processes that fire timers submit the jobs, the oldest first. Raises NotFound, BadMoment, and
    UsageError for a range without ticks.
    """
    with client.opened(store, home) as store:
        zone = cron_of(store.timers.get(name)).timezone
        begin = _moment("--from", since, zone, last=False)
        end = _moment("--to", until, zone, last=True)
        if end < begin:
            raise UsageError(f"--to: found {until}, which is before --from; expected a later time")
        return _backfill(store, name, since=begin, until=end, max_running=max_running, dry_run=dry_run, now=_now(now))


def fire(*, store: Store | None = None, home: Home = None, now: float | None = None) -> list[Tick]:
    """Fire all due ticks once, as workers and `cron serve` do continuously."""
    with client.opened(store, home) as store:
        at, firer = _now(now), Firer(store)
        ticks: list[Tick] = []
        part = Fired(more=True)
        while part.more:
            part = firer.run(at)
            ticks += part.ticks
        return ticks


def firing(*, store: Store | None = None, home: Home = None) -> list[WorkerInfo]:
    """The processes that fire timers now: workers and `cron serve`."""
    with client.opened(store, home) as store:
        return store.workers.live(*FIRING_ROLES)


def _moment(option: str, at: float | str, zone: str, *, last: bool) -> float:
    try:
        return parse_moment(at, zone, last=last) if isinstance(at, str) else at
    except BadMoment as e:
        raise BadMoment(f"{option}: {e.problem}", e.expected) from None


def _watched(store: Store, timer: Timer, last: Tick | None, now: float) -> Watched:
    due = None
    if timer.state is TimerState.ACTIVE and timer.next_due is not None and timer.next_at is not None:
        due = Due(tick=timer.next_due, at=timer.next_at)
    try:
        cron, words = cron_of(timer), _words(timer)
    except NimbleError as e:  # so that the other timers are shown
        cron, words = None, str(e)
    job = None if last is None else job_of(store, last)
    late_s = max(0.0, now - due.at) if due is not None else 0.0
    return Watched(
        timer=timer,
        cron=cron,
        words=words,
        last=last,
        last_state=job.state if job else None,
        last_error=job.error if job else None,
        next=due,
        late_s=late_s,
    )


def _changed(before: Any, after: Any, where: str = "") -> tuple[str, ...]:
    """The dotted names of the values that differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        inside = (_changed(before.get(name), after.get(name), f"{where}.{name}") for name in names)
        return tuple(itertools.chain.from_iterable(inside))
    return () if before == after else (where.lstrip("."),)


def _words(timer: Timer) -> str:
    return rhythm_of(timer).expression.words()


def _now(now: float | None) -> float:
    return time.time() if now is None else now
