"""Adds timers to a store, resumes them, and lists their next ticks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from nimble_jobs import spec as specs
from nimble_jobs.errors import UsageError
from nimble_jobs.settings import check_targets
from nimble_jobs.spec import JobSpec
from nimble_jobs.store import Due, Store, Timer, TimerChange, TimerState
from nimble_jobs.timers.rhythm import Rhythm
from nimble_jobs.timers.submission import cron_of


def put(
    store: Store, spec: JobSpec, *, file: Path, allow_python: Sequence[Path | str] = (), now: float
) -> tuple[Timer, TimerChange]:
    """Add a timer for a spec with a `cron` part, or change the one of its name. An equal spec changes nothing.

    `file`: the spec's file, for messages. `allow_python`: resolved folders whose code its jobs may run. Raises
    UsageError for a spec without `cron`, BadExpression, BadMoment, SpecError for a `notify` that is not allowed.
    """
    if spec.cron is None:
        raise UsageError(f"{file}: cron: missing; expected a cron part with an expression")
    rhythm = Rhythm.of(spec.name, spec.cron)
    check_targets(spec.notify, store.settings.now(), str(file))
    return store.timers.add(
        name=spec.name,
        spec=specs.dump(spec),
        file=str(file),
        base=str(file.absolute().parent),
        allow_python=tuple(map(str, allow_python)),
        first=lambda timer: rhythm.first(timer.since),
        now=now,
    )


def resume(store: Store, name: str, now: float) -> Timer:
    """Resume a paused timer at its first tick after `now`. Raises NotFound, Damaged."""
    return store.timers.resume(name, lambda timer: rhythm_of(timer).first(timer.since), now)


def upcoming(timer: Timer, count: int, *, now: float) -> list[Due]:
    """The next ticks of a timer; of a paused one, the ticks after a resume. Raises Damaged."""
    rhythm = rhythm_of(timer)
    begin = now if timer.state is TimerState.PAUSED or timer.next_due is None else timer.next_due - 1
    return [rhythm.due(tick) for tick in islice(rhythm.after(begin), count)]


def rhythm_of(timer: Timer) -> Rhythm:
    """When a timer is due. Raises Damaged."""
    return Rhythm.of(timer.name, cron_of(timer))
